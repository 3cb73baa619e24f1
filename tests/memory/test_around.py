"""Estimates of hashed n-grams and of token order prediction, against the meter and a trace."""

from __future__ import annotations

import dataclasses

import pytest

from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import MeshConfig
from megacpp.memory.forms.local_shapes import LocalShapes
from tests.memory.test_activations import FULL, Dtype, agree, config_of, size_of
from tests.memory.working_cases import most_bytes, named_parts
from tests.memory.working_sets import working_sets

PARTS = ("ngram", "norm", "top", "head")


@pytest.mark.parametrize(
    ("pattern", "dtype", "mesh"),
    [
        ("AF", "bf16", MeshConfig(dp_shard=1)),
        ("AF", "fp64", MeshConfig(dp_shard=1)),
        ("AF", "bf16", MeshConfig(dp_shard=1, cp=2)),
        ("AE", "bf16", MeshConfig(dp_shard=2, tp=2, ep=2)),
    ],
    ids=str,
)
def test_what_is_kept(pattern: str, dtype: Dtype, mesh: MeshConfig) -> None:
    """In bytes, part by part, on the first rank and the last."""
    config = config_of(pattern, dtype, FULL, mesh)
    ngram = NgramConfig(heads=2, table_size=30, dim=4)
    model = dataclasses.replace(config.model, top=TOPConfig(0.3, window=6), ngram=ngram)
    for rank in {0, size_of(mesh) - 1}:
        agree(dataclasses.replace(config, model=model), rank)


@pytest.mark.parametrize(
    ("size", "flags"),
    [(1, ""), (1, "--precision.dtype fp32"), (2, "--mesh.tp 2"), (4, "--mesh.cp 2")],
)
def test_moments_are_those_of_a_trace(size: int, flags: str) -> None:
    """Small words and ids of single tokens are left out: they weigh 1 in 1000 at most."""
    around = "--model.top.loss 0.3 --model.ngram.heads 4 --model.ngram.table-size 5000"
    one_step = "--train.grad-accum 1 --train.tokens-per-step 0"
    words = f"dense_110m --model.depth 1 --model.vocab-size 16384 {around} {one_step} {flags}"
    config = parse_run(words.split(), size).config
    own, parts = LocalShapes.on_rank(config, size, 0), named_parts(config)
    traced = working_sets(trace_step(config, size), parts=parts, casts=size == 1)
    for (phase, part), found in traced.items():
        if part not in PARTS:
            continue
        most = most_bytes(own, parts[part], phase)
        assert 0.998 <= most / found.bytes <= 1.002, (phase, part, most, found.bytes)
