"""What a rank stores, by arithmetic: byte for byte what its model and optimizer have."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp.cli.dry_run import dependencies
from megacpp.config.arguments import parse_run
from megacpp.config.presets import PRESETS, preset
from megacpp.config.schema import Config
from megacpp.memory.forms.parameters import rank_bytes
from megacpp.memory.forms.units import stored_of
from megacpp.model.sizes import embedding_parameters, head_parameters, layer_parameters
from parallel.simulate.dry_run import class_of
from parallel.simulate.fake import as_trained, fake_tensors, fake_world, planned_model

SMALL = ["tiny", "--train.tokens-per-step", "0", "--train.grad-accum", "4"]
MLA = ["--model.attention.kind", "mla", "--model.attention.no-qk-norm"]
WIDE = ["--model.mamba3.mimo-rank", "2", "--model.mamba3.out-norm", "--precision.dtype", "fp64"]
DEEP = ["nam52_deep_base", "--model.depth", "5", "--model.pattern", "AEMRF"]

AROUND = "--model.top.loss 0.1 --model.ngram.heads 2 --model.ngram.table-size 1000".split()

CASES = {  # ranks, rank, flags
    "one process": (1, 0, SMALL),
    "latents, mimo, fp64": (1, 0, [*SMALL, *MLA, "--model.attention.q-lora-rank", "32", *WIDE]),
    "tp and ep": (8, 5, [*SMALL, "--mesh.tp", "2", "--mesh.ep", "4"]),
    "uneven shards": (6, 5, [*SMALL, "--mesh.ep", "2"]),
    "rows of experts": (64, 13, [*DEEP, "--mesh.ep", "8", "--mesh.cp", "2"]),
    "replicas": (4, 3, [*SMALL, "--mesh.dp-replicate", "4", "--mesh.dp-shard", "1"]),
    "last stage, tied": (4, 3, [*SMALL, "--mesh.pp", "2", "--model.tie-embeddings"]),
    "first stage, tied": (4, 0, [*SMALL, "--mesh.pp", "2", "--model.tie-embeddings"]),
    "nulls": (2, 1, [*SMALL, "--model.moe.null-rho", "0.5", "--mesh.ep", "2"]),
    "adamw": (2, 1, [*SMALL, "--optim.name", "adamw"]),
    "outputs by adamw": (8, 5, [*SMALL, "--optim.adamw-layers", "wo,out_proj,w2", "--mesh.tp=2"]),
    "wide momentum": (2, 1, [*SMALL, "--optim.muon-momentum-dtype", "fp32"]),
    "8 bit": (2, 1, [*SMALL, "--optim.adamw-state", "8bit"]),
    "4 bit": (2, 1, [*SMALL, "--optim.adamw-state", "4bit", "--optim.name", "adamw"]),
    "tokens around": (8, 5, [*SMALL, *AROUND, "--mesh.tp", "2"]),
    "tokens around, first stage": (4, 0, [*SMALL, *AROUND, "--mesh.pp", "2"]),
    "streams": (2, 1, [*SMALL, "--model.mhc.streams", "3"]),
    "streams, tp and ep": (
        8,
        5,
        [*SMALL, "--model.mhc.streams", "2", "--mesh.tp=2", "--mesh.ep=4"],
    ),
    "compressed": (2, 1, [*SMALL, "--recompute.compress", "0.25"]),
}


def in_the_model(config: Config, size: int, rank: int) -> tuple[dict, dict, dict, int]:
    """Parameters, gradients and state by class, and buffers, of the trainer's own model."""
    with fake_world(config, size, rank) as world:
        model = planned_model(config, world, dependencies().prepare(config))
        with fake_tensors():
            model.to_empty(device=world.device)
            optimizer = dependencies().optimizers(model, config, world.holders)
        sums: tuple[dict, dict] = ({}, {})
        for name, p in model.named_parameters():
            kind = class_of(model, name, p)
            for found in sums if p.requires_grad else sums[:1]:
                found[kind] = found.get(kind, 0) + _bytes(p)
        state: dict[str, dict[str, int]] = {}
        for group in optimizer.param_groups:
            of_class = state.setdefault(group["algorithm"], {})
            for name, p in zip(group["param_names"], group["params"], strict=True):
                kind = class_of(model, name, p)
                held = sum(map(_bytes, optimizer.state[p].values()))
                of_class[kind] = of_class.get(kind, 0) + held
        return *sums, state, sum(b.numel() * b.itemsize for b in model.buffers())


def _bytes(t: Any) -> int:
    local = t.to_local() if hasattr(t, "to_local") else t
    if hasattr(local, "codes"):
        return sum(part.numel() * part.itemsize for part in (local.codes, local.scale, local.qmap))
    return local.numel() * local.itemsize


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_model(case: str) -> None:
    if "bit" in case:
        pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")
    size, rank, flags = CASES[case]
    config = as_trained(parse_run(flags, size).config)
    found = rank_bytes(config, size, rank)
    assert (found.parameters, found.gradients, found.state, found.buffers) == in_the_model(
        config, size, rank
    )
    assert sum(found.by_mover.values()) == sum(found.parameters.values())


@pytest.mark.parametrize("name", PRESETS)
def test_one_process_has_the_whole_model(name: str) -> None:
    """Counted here parameter by parameter, in megacpp/model/sizes.py by kind of block."""
    config = parse_run([name], 1).config
    model = preset(name).model
    total = sum(layer_parameters(model)) + embedding_parameters(model) + head_parameters(model)
    total -= model.vocab_size * model.dim if model.tie_embeddings else 0
    assert sum(rank_bytes(config, 1, 0).parameters.values()) == 4 * total


def test_shards_are_stored_as_long_as_the_longest() -> None:
    """FSDP2 pads: ranks that hold less of a matrix store as much."""
    config = parse_run([*SMALL, "--mesh.ep", "2"], 6).config
    stored = [stored_of(config, 6, rank).parameters for rank in range(6)]
    held = [sum(rank_bytes(config, 6, rank).parameters.values()) for rank in range(6)]
    buffers = rank_bytes(config, 6, 0).buffers
    assert len(set(stored)) == 1 and len(set(held)) > 1
    assert all(s - buffers >= h for s, h in zip(stored, held, strict=True))
