"""Closed forms of n-gram memories against the model: bytes, moments, traffic, repeated FLOPs.

Fake tensors and fake ranks; what is compared exactly is counted in bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.engram.sizes import table_rows
from megacpp.cli.measure import measure
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import resolve
from megacpp.config.presets import tiny
from megacpp.config.schema import KEEP, CheckpointingPolicy, MeshConfig, TrainConfig
from megacpp.memory.estimate import estimate
from megacpp.memory.forms.parameters import rank_bytes
from megacpp.memory.replayed import replayed_flops_per_token
from megacpp.memory.traffic import traffic
from megacpp.model.pattern import layer_kinds, with_kinds
from parallel.simulate.fake import as_trained
from tests.memory.test_activations import agree, config_of
from tests.memory.test_estimate import OVER, TWO, UNDER
from tests.memory.test_parameters import in_the_model
from tests.memory.test_traffic import counted, run_of
from tests.memory.working_cases import misses

SMALL = {"layers": "all", "heads": 2, "table_size": 20, "dim": 8, "conv_kernel": 2}
SELECTIVE, FULL = (replace(KEEP, ablock=x) for x in ("selective", "full"))
MESHES = {
    "one": MeshConfig(dp_shard=1),
    "tp": MeshConfig(dp_shard=1, tp=2),
    "cp": MeshConfig(dp_shard=1, cp=2),
    "tp cp": MeshConfig(dp_shard=1, tp=2, cp=2, cp_order="contiguous"),
}
POLICIES = {
    "none": KEEP,
    "selective": SELECTIVE,
    "selective, norms": replace(SELECTIVE, norms=True),
    "full": FULL,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_forward_keeps(mesh: str, policy: str) -> None:
    agree(config_of("AFA", policy=POLICIES[policy], mesh=MESHES[mesh], engram=SMALL))


def test_what_a_forward_keeps_in_fp64() -> None:
    agree(config_of("AFA", "fp64", rows=1, engram={**SMALL, "max_order": 4, "conv_kernel": 3}))


MEMORIES = "--model.engram.layers all --model.engram.table_size 300"
FEW_HEADS = (
    "--model.attention.num_heads 2 --model.attention.num_kv_heads 2"  # so that memories show
)
WORKING = [
    (1, f"{FEW_HEADS} --model.engram.dim 2048"),
    (1, "--recompute.ablock selective"),
    (1, f"{FEW_HEADS} --precision.dtype fp32"),
    (2, f"{FEW_HEADS} --mesh.tp 2 --recompute.ablock selective"),
    (2, f"{FEW_HEADS} --mesh.tp 2 --recompute.ablock full"),
    (2, f"{FEW_HEADS} --mesh.cp 2 --recompute.ablock selective"),
    (2, f"{FEW_HEADS} --mesh.cp 2 --model.engram.table_size 20000"),
]


@pytest.mark.parametrize(("size", "flags"), WORKING, ids=[f"{n} {flags}" for n, flags in WORKING])
def test_fullest_moments_are_those_of_a_trace(size: int, flags: str) -> None:
    found = misses("AA", f"{MEMORIES} {flags}", size)
    assert all(abs(miss) <= 0.1 for miss in found.values()), found


TINY = ["tiny", "--model.engram.layers", "0,2", "--model.engram.table-size", "500"]
STORED = {
    "tp": (8, 5, ["--mesh.tp", "2", "--mesh.ep", "4"]),
    "uneven shards": (6, 5, ["--mesh.ep", "2"]),
}


@pytest.mark.parametrize("case", STORED)
def test_what_a_rank_stores(case: str) -> None:
    size, rank, flags = STORED[case]
    config = as_trained(parse_run([*TINY, "--train.grad-accum", "4", *flags], size).config)
    found = rank_bytes(config, size, rank)
    sums = found.parameters, found.gradients, found.state, found.buffers
    assert sums == in_the_model(config, size, rank)


def test_fewer_layers_have_tables_as_large() -> None:
    model = replace(tiny().model, pattern="A", depth=9, engram=EngramConfig("all", table_size=100))
    few = with_kinds(model, ["A+engram", "A", "A+engram"])
    assert layer_kinds(few) == ["A+engram", "A", "A+engram"]
    assert (
        table_rows(few)
        == table_rows(model)
        > table_rows(replace(few, engram=replace(few.engram, table_size=100)))
    )


STEPS = {
    "fsdp, large tables": (2, [*TWO, "--model.engram.table-size", "20000"]),
    "tp cp, selective": (
        4,
        [*TWO, *"--mesh.tp 2 --mesh.cp 2 --recompute.ablock selective".split()],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_estimate_of_a_step(case: str) -> None:
    size, flags = STEPS[case]
    shape = ["--model.depth", "2", "--model.pattern", "AA", "--model.engram.layers", "0"]
    config = parse_run([*TINY, *shape, *flags], size).config
    event, peak = (stream := trace_step(config, size)).peak()
    found = estimate(config, size)
    where = stream.where(event), found.moment
    assert (1 - UNDER) * peak <= found.tensors <= (1 + OVER) * peak, (where, peak, found.tensors)


SENT = {
    "tp, all again": (2, "--mesh.tp 2 --recompute.ablock full --recompute.fblock full"),
    "cp tp": (4, "--mesh.cp 2 --mesh.tp 2 --gradient-checkpointing false"),
}


@pytest.mark.parametrize("case", SENT)
def test_what_travels(case: str) -> None:
    world, flags = SENT[case]
    memories = "--model.pattern AF --model.depth 2 --data.seq-len 64 --model.engram.layers all"
    config = run_of(world, f"{memories} --model.engram.table-size 100 --optim.name adamw {flags}")
    found, turned = counted(config, world, 0)  # without Muon only convolutions exchange over tp
    forms = traffic(config, world, 0).by_axis
    assert turned > 0 and forms["tp"] == found["tp"] + turned
    assert forms.get("cp") == found.get("cp")


@pytest.mark.parametrize("policy", [SELECTIVE, FULL], ids=["selective", "full"])
def test_flops_that_run_again(policy: CheckpointingPolicy) -> None:
    base, tokens = tiny(), 16
    model = replace(base.model, pattern="AA", depth=2, engram=EngramConfig("0", 2, 3, 100, 32))
    config = replace(base, model=model, train=TrainConfig(device_batch_size=1))
    config = replace(config, data=replace(base.data, seq_len=tokens))
    none = resolve(replace(config, recompute=KEEP), 1)
    again = replace(none, recompute=policy)
    repeated = measure(again, 1, 0).repeated(measure(none, 1, 0)) / tokens
    assert replayed_flops_per_token(again) == repeated
