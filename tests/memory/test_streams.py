"""Estimates of several residual streams: bytes kept to the byte, working sets within 2 %."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megacpp.cli.measure import measure
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, TrainConfig
from megacpp.memory.estimate import estimate
from megacpp.memory.forms.activations import activation_bytes
from tests.memory.test_activations import FULL, NONE, SELECTIVE, agree, config_of, same
from tests.memory.working_cases import WIDE, ratios

MHC = {"streams": 3, "iterations": 2}


def grouped(policy: CheckpointingPolicy, size: int) -> CheckpointingPolicy:
    return dataclasses.replace(policy, mhc_group_size=size)


KEPT: list[tuple[str, CheckpointingPolicy, MeshConfig | None, dict[str, Any]]] = [
    ("AMERFF", NONE, None, {}),
    ("AMERFF", grouped(NONE, 1), None, {}),
    ("AMERFF", grouped(SELECTIVE, 3), None, {}),
    ("AMERFF", grouped(FULL, 0), None, {}),
    ("AMERFF", FULL, None, {}),
    ("AEF", grouped(NONE, 2), MeshConfig(dp_shard=1, tp=2, reshard="never"), {}),
    ("EMF", grouped(SELECTIVE, 2), MeshConfig(dp_shard=1, cp=2, reshard="never"), {}),
    ("AEE", grouped(FULL, 2), MeshConfig(dp_shard=2, ep=2, reshard="never"), {"dtype": "fp32"}),
]


@pytest.mark.parametrize(("pattern", "policy", "mesh", "others"), KEPT)
def test_kept_to_the_byte(
    pattern: str, policy: CheckpointingPolicy, mesh: MeshConfig | None, others: dict[str, Any]
) -> None:
    heads = {"num_kv_heads": 4}
    agree(config_of(pattern, policy=policy, mesh=mesh, attention=heads, mhc=MHC, **others))


def test_kept_by_a_stage() -> None:
    """Streams come in, those behind its last block wait for the stage after it."""
    mesh = MeshConfig(pp=2, dp_shard=1)
    config = config_of("AFEFAF", policy=grouped(NONE, 2), mesh=mesh, mhc=MHC)
    config = dataclasses.replace(config, train=TrainConfig(device_batch_size=2, grad_accum=2))
    for rank in range(2):
        same(activation_bytes(config, 2, rank), measure(config, 2, rank))


STREAMS = "--model.mhc.streams 4 --model.mhc.iterations 2"
WORKING = {  # pattern, flags, ranks
    "kept": ("FM", "--recompute.mhc_group_size -1", 1),
    "groups": ("FFAF", "--recompute.mhc_group_size 2", 1),
    "groups on tp": (
        "FFAF",
        "--recompute.mhc_group_size 2 --recompute.fblock full --mesh.tp 2"
        " --recompute.norms true --model.attention.num_kv_heads 4",
        2,
    ),
}


def run_of(case: str) -> tuple[Config, int]:
    pattern, flags, size = WORKING[case]
    words = f"{WIDE} --model.pattern {pattern} --model.depth {len(pattern)} {STREAMS} {flags}"
    return parse_run(words.split(), size).config, size


@pytest.mark.parametrize("case", WORKING)
def test_working_sets(case: str) -> None:
    found = ratios(*run_of(case))
    assert found and all(0.98 <= ratio <= 1.02 for ratio in found.values()), found


def test_the_whole_step() -> None:
    """Most bytes of a step, with and without groups, and what the groups save of them."""
    peaks = []
    for size in (-1, 2):
        config, ranks = run_of("groups on tp")
        config = dataclasses.replace(config, recompute=grouped(config.recompute, size))
        _, traced = trace_step(config, ranks).peak()
        found = estimate(config, ranks).tensors
        assert 0.995 * traced <= found <= 1.02 * traced, size
        peaks.append(found)
    assert peaks[1] < 0.98 * peaks[0], peaks
