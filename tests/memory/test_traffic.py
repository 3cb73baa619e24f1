"""Bytes that travel in closed form against a step that is run: fake ranks, real calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megacpp.cli.dry_run import dependencies
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.traffic import traffic
from parallel.simulate.dry_run import dry_run
from parallel.simulate.fake import as_trained

SMALL = (
    "--model.dim 128 --model.attention.num-heads 4 --model.attention.num-kv-heads 4 "
    "--model.vocab-size 1024 --model.pattern AEMRF --model.depth 5 --model.mamba3.conv-kernel 4 "
    "--model.mamba3.headdim 16 --model.m2rnn.value-dim 16 --model.m2rnn.key-dim 16 "
    "--data.seq-len 32 --model.mamba3.chunk-size 16 --model.m2rnn.chunk-size 16 "
)
SHARDS = ("dp_shard", "efsdp", "fsdp")  # which of them a group of ranks is called depends on others
BLOCKS = (  # of every kind but E
    "--recompute.ablock full --recompute.mblock conv_bc_only "
    "--recompute.rblock full_plus_norms --recompute.fblock full"
)
AGAIN, KEPT = f"{BLOCKS} --recompute.eblock full", "--gradient-checkpointing false"
MLA = (
    "--model.attention.kind mla --model.attention.qk-norm false --model.pattern A --model.depth 2 "
    f"{KEPT}"
)
AROUND = "--model.top.loss 0.1 --model.ngram.heads 2 --model.ngram.table-size 100"
FP8 = (
    "--precision.dtype bf16 --precision.fp8 torchao --precision.fp8-recipe tensorwise "
    "--precision.fp8-all-gather true --precision.fp8-local-scales true --precision.fp8-ends 1 "
    "--precision.fp8-layers AEFMR --recompute.fp8-wrapper torchao"
)
FP8_ROWS = (
    "--precision.dtype bf16 --precision.fp8 torchao --precision.fp8-ends 0 "
    "--precision.fp8-layers AEFMR --recompute.fp8-wrapper torchao"
)
# Ranks, rank, flags: each axis alone and with others, every kind of exchange, every policy.
CASES = {
    "tp ep, all again": (8, 0, f"--mesh.tp 2 --mesh.ep 4 --mesh.reshard always {BLOCKS}"),
    "replicas, copies, each": (
        *(8, 0),
        "--mesh.dp-replicate 2 --mesh.ep 4 --mesh.ep-dispatch per_expert "
        "--train.gradient-sync each",
    ),
    "resident, tied": (
        *(4, 0),
        "--mesh.reshard always --train.gradient-sync resident --model.tie-embeddings true",
    ),
    "pp tp, gathered anew": (8, 4, "--mesh.pp 2 --mesh.reshard always --mesh.tp 2"),
    "pp, replicas for shards": (
        *(8, 0),
        "--mesh.pp 2 --mesh.pp-schedule zbv --mesh.tp 2 --mesh.dp-replicate 2",
    ),
    "pp both ways": (
        *(8, 4),
        "--mesh.pp 2 --mesh.pp-schedule dualpipe --mesh.tp 2 --train.grad-accum 4 "
        "--model.tie-embeddings true",
    ),
    "streams, pp tp": (8, 4, f"--mesh.pp 2 --mesh.tp 2 --model.mhc.streams 3 {AGAIN}"),
    "streams of layers, all again": (
        *(4, 0),
        f"--mesh.tp 2 --model.mhc.streams 2 {AGAIN} --recompute.mhc-group-size -1",
    ),
    "norms behind mixers, all again": (4, 0, f"--mesh.tp 2 --model.post-norm true {AGAIN}"),
    "norms behind mixers, tp ep": (
        4,
        0,
        f"--mesh.tp 2 --mesh.ep 2 --model.post-norm true {BLOCKS}",
    ),
    "norms behind mixers, cp, all again": (
        *(4, 0),
        f"--mesh.cp 2 --model.post-norm true {AGAIN}",
    ),
    "cp, all again": (4, 0, f"--mesh.cp 2 {AGAIN}"),
    "cp tp ep, slots": (
        *(8, 0),
        "--mesh.cp 2 --mesh.tp 2 --mesh.ep 4 --mesh.cp-order contiguous "
        "--model.moe.capacity-factor 1.25 --model.mamba3.ngroups 4",
    ),
    "ep padded": (4, 1, f"--mesh.ep 2 --mesh.ep-dispatch padded {KEPT}"),
    "ep padded, capacity": (
        *(8, 0),
        "--mesh.tp 2 --mesh.ep 4 --mesh.ep-dispatch padded --model.moe.capacity-factor 1.25",
    ),
    "nulls, groups": (
        *(8, 0),
        "--mesh.tp 2 --mesh.ep 4 --model.moe.null-rho 0.5 --model.moe.num-groups 4 "
        "--model.moe.top-k-groups 2 --model.moe.num-experts 16",
    ),
    "cp: ring and serial": (
        *(8, 2),
        f"--mesh.cp 4 --mesh.cp-attention ring --mesh.cp-m2rnn serial {KEPT} "
        "--model.pattern AR --model.depth 2",
    ),
    "cp: heads": (
        *(4, 0),
        f"--mesh.cp 2 --mesh.cp-attention heads --mesh.cp-mamba3 heads {KEPT} "
        "--model.pattern AMR --model.depth 3",
    ),
    "tp, tokens around": (8, 0, f"--mesh.tp 2 --mesh.reshard always {AGAIN} {AROUND}"),
    "pp tp, tokens around": (8, 3, f"--mesh.pp 2 --mesh.reshard always --mesh.tp 2 {AROUND}"),
    "last of pp, tokens around": (4, 2, f"--mesh.pp 2 --mesh.reshard always {AROUND}"),
    "gathered in FP8": (*(4, 0), f"--mesh.dp-replicate 2 --mesh.reshard always {FP8}"),
    "pp, gathered in FP8": (*(8, 4), f"--mesh.pp 2 --mesh.dp-replicate 2 {FP8} {KEPT}"),
    "scales of tp": (8, 0, f"--mesh.tp 2 --mesh.ep 4 {FP8_ROWS} {KEPT}"),
    "scales of tp, all again": (8, 4, f"--mesh.pp 2 --mesh.tp 2 {FP8_ROWS} {AGAIN}"),
    "scales of tp, mlp again": (
        *(4, 0),
        f"--mesh.tp 2 {FP8_ROWS} --recompute.mlp true --precision.fp8-recipe rowwise "
        "--precision.fp8-local-scales true",
    ),
    "cp: latents by heads": (8, 1, f"--mesh.cp 4 {MLA} --mesh.cp-attention heads"),
    "cp: latents gathered": (8, 2, f"--mesh.cp 4 {MLA} --mesh.cp-order contiguous"),
}


def run_of(world: int, flags: str) -> Config:
    flags = flags if "cp" in flags else f"--train.grad-accum 2 {flags}"
    words = f"tiny {SMALL} --train.device-batch-size 2 {flags}".split()
    return as_trained(parse_run(words, world).config)


def counted(config: Config, world: int, rank: int) -> tuple[dict[str, int], int]:
    """Bytes by axis, and those of the optimizer; without what no model size changes."""
    found: Counter[str] = Counter()
    optimizer = 0
    for (axis, kind, dtype), moved in dry_run(config, world, rank, dependencies()).traffic.items():
        if dtype == torch.float64 or (dtype == torch.int64 and kind != "all_gather"):
            continue  # counts, sums of losses
        if kind == "all_reduce" and axis in SHARDS:
            continue  # largest values of weights
        if kind == "all_to_all" and axis not in ("ep", "cp"):
            optimizer += moved.bytes
        else:
            found["shards" if axis in SHARDS else axis] += moved.bytes
    return dict(found), optimizer


def foretold(config: Config, world: int, rank: int) -> tuple[dict[str, int], int]:
    found: Counter[str] = Counter()
    for axis, size in traffic(config, world, rank).by_axis.items():
        found["shards" if axis in SHARDS else axis] += size
    return {axis: size for axis, size in found.items() if axis != "muon"}, found["muon"]


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_every_axis(name: str) -> None:
    world, rank, flags = CASES[name]
    config = run_of(world, flags)
    (real, moved), (closed, updates) = counted(config, world, rank), foretold(config, world, rank)
    assert closed == real
    # An owner of few large matrices gets or returns more than its share.
    assert updates <= moved <= 3 * updates if moved else not updates


def test_muon_where_owners_have_equal_shares() -> None:
    """Equal matrices, as many as ranks, and their cells on all of them."""
    flags = "--model.pattern A --model.depth 4 --model.attention.num-kv-heads 4"
    config = run_of(4, flags.replace("kv-heads 4", "kv-heads 4 --model.attention.head-dim 32"))
    _, moved = counted(config, 4, 0)
    _, updates = foretold(config, 4, 0)
    assert moved == updates > 0


def test_adamw_sends_nothing() -> None:
    config = run_of(4, "--optim.name adamw")
    assert counted(config, 4, 0)[1] == foretold(config, 4, 0)[1] == 0


def test_one_rank_sends_nothing() -> None:
    assert traffic(run_of(1, ""), 1).parts == {}


@pytest.mark.parametrize(("norms", "times"), [("false", 8), ("true", 10)])
def test_a_dense_block_moves_four_streams_over_tp_each_way(norms: str, times: int) -> None:
    """8 U per attention and feed-forward together: U = tokens x width x 2 bytes.

    Where norms run again, both mixers' inputs are gathered again.
    """
    flags = f"--mesh.tp 2 --model.pattern AF --model.depth 2 --recompute.norms {norms}"
    config = run_of(8, flags)
    two, four = (
        traffic(replace(config, model=replace(config.model, depth=depth)), 8).parts[
            "tp", "activations"
        ]
        for depth in (2, 4)
    )
    stream = 2 * 32 * 128 * 2
    assert four - two == 2 * times * stream  # of two microbatches


def test_bytes_of_gathers_and_reductions_per_parameter() -> None:
    """Per parameter and step at 8 microbatches: 36 deferred, 64 each, 6 resident."""
    found = {}
    for sync in ("defer", "each", "resident"):
        flags = f"--mesh.reshard always --train.gradient-sync {sync} --model.pattern F"
        config = run_of(4, f"{flags} --model.mlp.hidden-dim 512".replace("  ", " "))
        config = replace(config, train=replace(config.train, grad_accum=8))
        more = replace(config, model=replace(config.model, depth=8))
        extra = traffic(more, 4).bytes - traffic(config, 4).bytes
        muon = traffic(more, 4).by_axis["muon"] - traffic(config, 4).by_axis["muon"]
        norm = 128 * (4 + 4 * (8 if sync == "each" else 1))
        found[sync] = ((extra - muon) / 3 - norm) / (3 * 128 * 512)  # of three layers
    assert found == {"defer": 36, "each": 64, "resident": 6}
