"""Audits of compiled blocks and of products in fp8: equal twice, and a flipped bit is found."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from checkpointing.apply import ActivationCheckpointing
from megacpp.config.schema import Config, MeshConfig, RunConfig
from parallel.audit import AuditedBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.start import join
from tests.checkpointing.fp8_cases import changed
from tests.parallel.test_audit import planted
from tests.parallel.test_precision import FP8, ROWS, WORDS, T, config_of
from tests.ranks import run_ranks
from tests.synthetic import ragged_batch

CPU = torch.device("cpu")
STEPS = 3
FEATURES: dict[str, dict[str, Any]] = {
    "compiled": {"train": {"compile": "aot_eager"}},
    "fp8": {"precision": FP8},
    "fp8 rowwise": {"precision": FP8 | {"fp8_recipe": "rowwise"}},
    "compiled fp8": {"precision": FP8, "train": {"compile": "aot_eager"}},
}


def feature(name: str, ranks: int) -> Config:
    config = changed(config_of("AEF", dtype="fp32"), **FEATURES[name])
    return dataclasses.replace(
        config, mesh=MeshConfig(dp_shard=ranks), run=RunConfig(audit_every=1)
    )


def audited(rank: int, size: int, name: str, bad: range) -> list[tuple[str, str]]:
    """Audit some steps; a bit of one gradient of the last rank flips in these runs of an audit."""
    config = feature(name, size)
    world = World(0, 1, CPU) if size == 1 else join(config.mesh, CPU)
    ac = ActivationCheckpointing(config, CPU)
    boundary = AuditedBoundary(build_model(config, world, ac), world, config)
    assert bool(ac.compiled) == name.startswith("compiled")
    found = []
    with planted(boundary, bad) if rank == size - 1 else nullcontext("") as hit:
        for step in range(STEPS):
            first = (step * size + rank) * ROWS
            boundary.accumulate([ragged_batch(range(first, first + ROWS), T, WORDS)], step)
            found.append((hit, boundary._audit["differs"]))
            for p in boundary.model.parameters():
                p.grad = None
    return found


def ran(ranks: int, name: str, bad: range) -> list[list[tuple[str, str]]]:
    return [audited(0, 1, name, bad)] if ranks == 1 else run_ranks(audited, ranks, name, bad)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_equal_twice_and_a_flip_is_named(name: str, ranks: int) -> None:
    """The audit of the second step flips; its runs are counted from 0, two of each good audit."""
    found = ran(ranks, name, range(2, 3))
    said = {one[1] for one in (of_rank[1] for of_rank in found)}
    words = f"{found[-1][1][0]} on rank {ranks - 1} differs when it is computed again"
    assert said == {f"the gradient of {words}"}
    assert {of_rank[step][1] for of_rank in found for step in (0, 2)} == {""}
