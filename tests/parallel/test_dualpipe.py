"""DualPipe, which holds each stage on two ranks, is one process; nam56r runs on every schedule.

Forked gloo ranks and tests/parallel/parity.py, in fp64: losses, norms, gradients and parameters of
three steps, routers and loads. Copies of a stage stay equal, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, MeshConfig, TrainConfig
from megacpp.memory.forms.pipeline import APART, in_flight
from megacpp.model.stage_actions import from_torch
from megacpp.model.stages import stage_parts, stages_per_rank
from parallel.pipeline import SCHEDULES
from parallel.simulate.schedule import torch_order
from tests.parallel.parity import Run, Trace, check, traces_of
from tests.together import Together


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, "pp": 2, "pp_schedule": "dualpipe", **axes})  # type: ignore[arg-type]


BOTH_WAYS = [
    Run("plain", mesh(), accum=4, evaluate=True),
    Run("tied", mesh(pp=4), accum=8, evaluate=True),
    Run("ahead_tied", mesh(dp_shard=2), accum=4, optimizer="muon_adamw"),
    Run("options", mesh(cp=2, cp_m2rnn="serial"), accum=4),
    Run("sparse_stages", mesh(pp=4), accum=8),
]
NAM56R = [
    *(Run("nam56r", mesh(pp_schedule=schedule), accum=4) for schedule in SCHEDULES),
    Run("nam56r", mesh(pp_schedule="dualpipev", cp=2, cp_m2rnn="serial"), accum=4),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    runs = [*BOTH_WAYS, *NAM56R]
    return Together(__name__, runs, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", [*BOTH_WAYS, *NAM56R], ids=str)
def test_the_same_run(run: Run) -> None:
    found, expected = results()[run], results()[run.reference][0]
    check(found, expected, run.dtype)
    for trace in found:
        for here, there in zip(trace.evaluations, expected.evaluations, strict=True):
            assert abs(here / there - 1) <= 1e-12


@pytest.mark.parametrize("run", BOTH_WAYS, ids=str)
def test_copies_of_a_stage_stay_equal(run: Run) -> None:
    traces = results()[run]
    apart = len(traces) // run.mesh.pp
    for rank, trace in enumerate(traces):
        other = traces[(run.mesh.pp - 1 - rank // apart) * apart + rank % apart]
        assert trace.parameters.keys() == other.parameters.keys()
        for name, part in trace.parameters.items():
            assert torch.equal(part.local, other.parameters[name].local), name


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 20)])
def test_every_action_is_planned_once(ranks: int, microbatches: int) -> None:
    """Each stage runs its half of the microbatches, and what is sent is received in its order."""
    order = torch_order("dualpipe", ranks, microbatches)
    for rank, actions in order.items():
        parts = [part for action in actions for part in action.sub_actions or (action,)]
        forwards = Counter(a.stage_index for a in parts if a.computation_type.name == "FORWARD")
        stages = {rank, 2 * ranks + ranks - 1 - rank}
        assert forwards == dict.fromkeys(stages, microbatches // 2)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if stages_per_rank(name) > 1])
def test_no_rank_keeps_more_than_is_estimated(schedule: str) -> None:
    ends = "BW" if APART else "BI"
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        mesh = MeshConfig(pp=ranks, pp_schedule=schedule)  # type: ignore[arg-type]
        config = Config(mesh=mesh, train=TrainConfig(grad_accum=microbatches))
        for rank, actions in enumerate(from_torch(torch_order(schedule, ranks, microbatches))):
            kept = itertools.accumulate((a.kind == "F") - (a.kind in ends) for a in actions)
            parts = stage_parts(config.model, mesh, rank)
            own = SimpleNamespace(stage=rank, config=config, stage_parts=parts)
            assert max(kept) <= sum(in_flight(own)), rank  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_whole_preset_is_accepted(schedule: str) -> None:
    flags = f"nam56r --mesh.pp 4 --mesh.pp-schedule {schedule} --train.device-batch-size 1"
    config = parse_run([*flags.split(), "--train.tokens-per-step", "262144"], 8).config
    assert (config.mesh.pp_schedule, config.mesh.dp_shard) == (schedule, 2)
    assert config.train.grad_accum == 32
