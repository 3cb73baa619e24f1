"""Several residual streams on every axis: the same run as one process.

Forked gloo ranks in fp64, tests/parallel/parity.py. Logits of `res` have directions without a
gradient (what is added to a row or a column cancels): in those AdamW takes steps of lr / eps times
whatever rounding left, a millionfold, which its bound there knows.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megacpp.config.schema import KEEP, MeshConfig
from parallel.pipeline import APART
from tests.parallel.parity import Run, Trace, check, traces_of
from tests.together import Together


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


GROUPS = replace(KEEP, mhc_group_size=3, norms=True)
RUNS = [
    Run("streams", mesh(tp=2), recompute=GROUPS),
    Run("streams", mesh(cp=2)),
    Run("streams", mesh(dp_shard=2, ep=2), recompute=GROUPS),
    Run("streams", mesh(pp=2), accum=4, evaluate=True, recompute=GROUPS),
    Run("streams", mesh(pp=2, pp_schedule="interleaved"), accum=4),
    Run("streams", mesh(pp=2, pp_schedule="zbv"), accum=4, recompute=GROUPS),
    Run("streams", mesh(pp=2, pp_schedule="dualpipev"), accum=4),
    Run("streams", mesh(dp_shard=2, tp=2, ep=2), accum=2, optimizer="muon_adamw"),
    Run("streams", mesh(pp=2, cp=2), accum=2),
]


@functools.cache
def traces() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    found, (expected,) = traces()[run], traces()[run.reference]
    check(found, expected, run.dtype)


def test_streams_ran_again() -> None:
    """Of every layer but the model's last, once a backward; the first and last stage of a zero
    bubble walk theirs once, others once for each half, where torch has halves."""
    (by_tp,) = (run for run in RUNS if run.mesh == mesh(tp=2))
    for trace in traces()[by_tp]:
        assert trace.again["read_streams"] == 4 * 3 and trace.again["mix_streams"] == 2 * 3
    (by_zbv,) = (run for run in RUNS if run.mesh.pp_schedule == "zbv")
    halves = 2 if APART else 1
    of_ranks = [trace.again["read_streams"] for trace in traces()[by_zbv]]
    assert sum(of_ranks) == (1 + halves + halves + 1) * 4 * 3


def test_the_plan_leaves_connections_whole() -> None:
    start = traces()[RUNS[0]][0].start
    shapes = {name: tuple(x.local.shape) for name, x in start.items() if "blocks.1.conn" in name}
    assert shapes == {
        "blocks.1.connection.phi": (15, 3 * 16),
        "blocks.1.connection.scale": (3,),
        "blocks.1.connection.bias": (15,),
    }
    assert torch.equal(*(t.start["blocks.1.connection.phi"].local for t in traces()[RUNS[0]]))
