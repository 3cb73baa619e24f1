"""The estimate of a step against a trace of it, and what every estimate must be.

A sampled few on small models; bench/estimate.py has the grid of large ones. Bounds are those of the
launch gate: never more than half a percent under, two percent over at most.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.presets import nam52_deep_base, nam56r_base
from megacpp.config.schema import KEEP, Config, ModelConfig
from megacpp.errors import ConfigError
from megacpp.memory.components import COMPONENTS
from megacpp.memory.device import communicators
from megacpp.memory.estimate import NO_TENSOR, MemoryEstimate, estimate, estimate_memory
from megacpp.model.sizes import embedding_parameters, head_parameters, layer_parameters
from megacpp.model.stages import split_layers

UNDER, OVER = 0.005, 0.02
TWO = ["--train.tokens-per-step", "0", "--train.grad-accum", "2"]
HYBRID = ["tiny", "--model.depth", "5", "--model.pattern", "AEMRF", *TWO]
DENSE = ["dense_110m", "--model.depth", "2", "--model.dim", "192", "--data.seq-len", "512", *TWO]

AROUND = "--model.top.loss 0.1 --model.ngram.heads 2 --model.ngram.table-size 100000".split()
WORDS = (
    "tiny --model.pattern F --model.depth 2 --model.vocab-size 32003 --model.mtp.depths 1 "
    "--data.seq-len 64 --train.device-batch-size 2 --optim.name adamw"
).split()
PIPELINE = [*HYBRID, *"--model.depth 10 --mesh.pp 2 --train.grad-accum 4".split()]
WORDS_FIRST = (
    "tiny --model.pattern A --model.depth 4 --model.vocab-size 32003 --data.seq-len 64 "
    "--train.device-batch-size 2 --train.tokens-per-step 0 --mesh.pp 2"
).split()
LOOPED_M = (
    "tiny --model.pattern M --model.depth 6 --model.dim 512 --model.vocab-size 8191 "
    "--data.seq-len 96 --train.device cpu --train.device-batch-size 2 --train.tokens-per-step 0 "
    "--train.grad-accum 6 --mesh.pp 3 --mesh.pp-schedule looped_bfs"
).split()
WINDOWS = (
    "--train.device cpu --model.depth 8 --data.seq-len 1024 --model.attention.window 64 "
    "--model.attention.full-layers every:2 --model.attention.yarn.original-seq-len 256"
).split()
ALL_KEPT = ["--recompute.eblock", "none", "--recompute.mblock", "none", "--recompute.no-norms"]

LOOPED = "interleaved", "interleaved_zb", "zbv"  # and what stays between a backward's two walks
CASES: dict[str, Any] = {  # ranks, flags, and the rank if it isn't the first
    "cpu": (1, ["tiny", "--model.depth", "5", "--model.pattern", "AEMRF", "--train.device", "cpu"]),
    "autocast, tied": (1, [*DENSE, "--model.vocab-size", "8192"]),
    "masks of two kinds": (1, [*DENSE, *WINDOWS]),
    "tied, gathered twice": (4, [*DENSE, "--mesh.reshard", "always"]),
    "fsdp, each": (4, [*HYBRID, "--train.gradient-sync", "each", "--mesh.dp-replicate", "2"]),
    "tp ep, gathered twice": (
        8,
        [*HYBRID, "--mesh.tp", "2", "--mesh.ep", "4", "--mesh.reshard", "always"],
    ),
    "cp, resident": (
        4,
        [*HYBRID, *"--mesh.cp 2 --train.gradient-sync resident --optim.name adamw".split()],
    ),
    "tokens around": (1, [*DENSE, *AROUND]),
    "norms of results": (1, [*HYBRID, "--model.post-norm"]),
    "each, one process": (1, [*HYBRID, "--train.gradient-sync", "each"]),
    "many words": (1, WORDS),
    "tokens around, tp, each": (
        4,
        [*DENSE, *AROUND, *"--train.gradient-sync each --mesh.tp 2 --mesh.reshard always".split()],
    ),
    "1024 ranks, capacity": (
        1024,
        [*HYBRID, *ALL_KEPT, "--mesh.ep", "8", "--model.moe.capacity-factor", "1.25"],
    ),
    "first stage of two": (4, PIPELINE, 0),
    "last stage of two": (4, PIPELINE, 3),
    "last stage of two, gathered twice": (4, [*PIPELINE, "--mesh.reshard", "always"], 3),
    "reductions of a first stage": (4, [*WORDS_FIRST, "--train.grad-accum", "2"], 0),
    "all forwards first": (6, LOOPED_M, 5),
    **{f"{x}, the last rank": (4, [*PIPELINE, "--mesh.pp-schedule", x], 3) for x in LOOPED},
    "both ways": (4, [*PIPELINE, "--mesh.pp-schedule", "dualpipe"], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_agrees(case: str) -> None:
    size, flags, *ranks = CASES[case]
    rank = ranks[0] if ranks else 0
    config = parse_run(flags, size).config
    event, peak = (stream := trace_step(config, size, rank)).peak()
    found = estimate(config, size, rank)
    where = stream.where(event), found.moment
    assert (1 - UNDER) * peak <= found.tensors <= (1 + OVER) * peak, (where, peak, found.tensors)
    reserved = sum(found.components.get(name, 0) for name in NO_TENSOR)
    assert found.upper - reserved >= peak


MESHES = [
    ("nam56r_base", 8, ["--mesh.tp", "2", "--mesh.ep", "4"]),
    ("nam52_deep_base", 64, ["--mesh.ep", "8", "--mesh.cp", "2", "--data.seq-len", "16384"]),
    ("dense_110m", 1, []),
    ("moe_small", 16, ["--mesh.ep", "4", "--mesh.pp", "2"]),
]


@pytest.mark.parametrize(("name", "size", "flags"), MESHES, ids=[m[0] for m in MESHES])
def test_what_every_estimate_is(name: str, size: int, flags: list[str]) -> None:
    config = parse_run([name, *flags], size).config
    found = estimate(config, size, budget=1 << 40)
    assert set(found.components) <= set(COMPONENTS)
    assert sum(found.components.values()) == found.point <= found.upper
    assert found.point - found.tensors == sum(found.components[name] for name in NO_TENSOR)
    assert found.moments[found.moment] == max(found.moments.values()) == found.tensors
    assert found.resting < found.tensors and found.verdict == "fits"
    assert estimate(config, size, budget=found.point).verdict == "at_risk"
    assert estimate(config, size, budget=found.point - 1).verdict == "does_not_fit"
    assert estimate(config, size).verdict == "unknown"
    assert json.loads(json.dumps(found.as_json()))["point"] == found.point
    assert estimate(config, size, detail=False) == dataclasses.replace(
        estimate(config, size), detail={}
    )


def test_a_cpu_reserves_nothing() -> None:
    config = parse_run(["tiny", "--train.device", "cpu"], 2).config
    found = estimate(config, 2)
    assert found.point == found.tensors and not set(NO_TENSOR) & set(found.components)
    assert communicators(config.mesh, 1) == 0 < communicators(config.mesh, 2)


def test_detail_sums_to_what_is_stored_and_kept() -> None:
    config = parse_run(["nam56r_base", "--mesh.tp", "2", "--mesh.ep", "4"], 8).config
    found = estimate(config, 8)
    assert sum(found.detail["optimizer_state"].values()) == found.components["optimizer_state"]
    assert sum(found.detail["parameters"].values()) == found.components["parameters"]
    assert {"A", "E", "M", "R"} == set(found.detail["activations"])
    assert all(saved > 0 for saved in found.detail["recompute_saves"].values())
    routing = found.detail["moe_routing"]
    assert routing["dropless at most"] > routing["gathered inputs"] + routing["expert outputs"]


def test_activations_grow_with_tokens_alone() -> None:
    """Four times the tokens: four times what is kept, but for a state in front of every row's
    first chunk (1 % of M); parameters and optimizer state don't move.
    """

    def at(tokens: int) -> MemoryEstimate:
        return estimate_memory(nam56r_base().model, 8, tp_degree=2, ep_degree=4, seq_len=tokens)

    short, long = at(4096), at(16384)
    kept = [sum(found.detail["activations"].values()) for found in (short, long)]
    assert kept[1] == pytest.approx(4 * kept[0], rel=3e-3)
    assert short.components["parameters"] == long.components["parameters"]
    assert short.components["optimizer_state"] == long.components["optimizer_state"]


# ---- plain numbers ------------------------------------------------------------------------------


def test_the_call_with_plain_numbers() -> None:
    """An expert axis beside the others, or experts on ranks that share the data: the same mesh."""
    wanted: dict[str, Any] = {"world_size": 8, "tp_degree": 2, "ep_degree": 4, "batch_size": 1}
    one = estimate_memory(
        nam56r_base().model, **wanted, dp_degree=1, seq_len=4096, grad_checkpoint=True
    )
    assert one == estimate_memory(nam56r_base().model, **wanted, dp_degree=4)
    assert one == estimate_memory(nam56r_base().model, **wanted)
    kept = estimate_memory(nam56r_base().model, **wanted, grad_checkpoint=False)
    policy = estimate_memory(nam56r_base().model, **wanted, grad_checkpoint=KEEP)
    assert kept == policy and kept.point > one.point
    adamw = estimate_memory(nam56r_base().model, **wanted, optimizer="adamw")
    assert adamw.components["optimizer_state"] > 2 * one.components["optimizer_state"]
    assert one.as_dict()["point"] == one.point / 2**30


ODD = dataclasses.replace(
    nam52_deep_base().model, m2rnn=dataclasses.replace(nam52_deep_base().model.m2rnn, num_heads=19)
)


@pytest.mark.parametrize(
    ("model", "degrees", "starts"),
    [
        (nam56r_base().model, {"tp_degree": 3}, "world_size=8"),
        (nam56r_base().model, {"tp_degree": 2, "dp_degree": 3}, "dp_degree=3"),
        (nam56r_base().model, {"optimizer": "sgd"}, "optimizer=sgd"),
        (ODD, {"tp_degree": 2, "ep_degree": 4, "dp_degree": 1}, "mesh.tp=2"),
    ],
    ids=["world", "data", "optimizer", "heads"],
)
def test_what_can_not_be_is_one_line(
    model: ModelConfig, degrees: dict[str, Any], starts: str
) -> None:
    with pytest.raises(ConfigError) as error:
        estimate_memory(model, 8, **degrees)
    text = str(error.value)
    assert text.startswith(f"{starts}: ") and "Fix: " in text and "\n" not in text


def test_other_ranks_of_a_pipeline_need_other_memory() -> None:
    config: Config = parse_run(["nam56r_base", "--mesh.pp", "2", "--mesh.ep", "4"], 8).config
    first, last = (estimate(config, 8, rank) for rank in (0, 4))
    assert "forward of head" in last.moments and "forward of head" not in first.moments


def test_stages_store_their_layers_and_the_ends_their_tables() -> None:
    """fp32 parameters on two ranks, counted layer by layer: 4 bytes each."""
    config = parse_run(
        [*DENSE, "--mesh.pp", "2", "--model.no-tie-embeddings", "--model.depth", "6"], 2
    )
    model = config.config.model
    layers = [4 * n for n in layer_parameters(model)]
    stored = [estimate(config.config, 2, rank).components["parameters"] for rank in (0, 1)]
    past = split_layers(model, 2)[0].stop
    assert 0 < past < 6
    assert stored[0] == 4 * embedding_parameters(model) + sum(layers[:past])
    assert stored[1] == sum(layers[past:]) + 4 * head_parameters(model)


def test_one_rank_has_nothing_resident() -> None:
    """Without shards autocast casts weights in each microbatch, whatever gradient_sync says."""
    flags = [*HYBRID, *"--train.device cuda --precision.dtype bf16 --train.gradient-sync".split()]
    defer, resident = (
        estimate(parse_run([*flags, sync], 1).config, 1).components
        for sync in ("defer", "resident")
    )
    assert defer == resident and min(resident.values()) >= 0
