"""Multi-token prediction on every mesh is one process: losses of every depth, all gradients.

Forked gloo ranks and tests/parallel/parity.py, in fp64. The loss of a depth is a mean over its
valid labels in the whole step, so accumulating, or any cut of the step over ranks, changes nothing.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megacpp.config.schema import KEEP, MeshConfig
from tests.parallel.parity import Run, Trace, check, traces_of
from tests.together import Together


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


KEPT = replace(KEEP, mtp=False)
RUNS = [
    Run("ahead", mesh(dp_shard=2), evaluate=True),
    Run("ahead_tied", mesh(dp_shard=2, reshard="always"), accum=2, sync="each"),
    Run("ahead", mesh(dp_shard=2), optimizer="muon_adamw"),
    Run("ahead", mesh(tp=2)),
    Run("ahead_tied", mesh(tp=2), recompute=KEPT),
    Run("ahead", mesh(cp=2)),
    Run("ahead_tied", mesh(cp=2, cp_attention="ring")),
    Run("ahead", mesh(dp_shard=2, ep=2)),
    Run("ahead", mesh(pp=2), accum=4, evaluate=True),
    Run("ahead_tied", mesh(pp=2), accum=2),
    Run("ahead_apart", mesh(pp=2), accum=2),
    Run("ahead_apart", mesh(tp=2)),
    Run("ahead", mesh(pp=2, pp_schedule="interleaved"), accum=4),
    Run("ahead", mesh(pp=2, pp_schedule="zbv"), accum=4, evaluate=True),
    Run("ahead_apart", mesh(pp=2, pp_schedule="dualpipev"), accum=4, optimizer="muon_adamw"),
    Run("ahead_tied", mesh(pp=2, tp=2, pp_schedule="zbv"), accum=4),
    Run("ahead_tied", mesh(pp=2, dp_shard=2, pp_schedule="dualpipev"), accum=4, recompute=KEPT),
    Run("ahead", mesh(pp=2, dp_shard=2), accum=2),
    Run("ahead_tied", mesh(pp=2, cp=2), accum=2),
    Run("ahead_tied", mesh(pp=2, tp=2, dp_shard=2), accum=2),
    Run("ahead", mesh(cp=2, tp=2), accum=2),
]


ACCUMULATED = [Run("ahead", accum=n) for n in (1, 2, 8)]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    runs = [*RUNS, *ACCUMULATED]
    return Together(__name__, runs, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    expected = results()[run.reference][0]
    assert all(losses["mtp"] > 0 for losses in expected.auxiliary)
    check(results()[run], expected, run.dtype)


@pytest.mark.parametrize("run", ACCUMULATED[1:], ids=str)
def test_microbatches_are_one_batch(run: Run) -> None:
    check(results()[run], results()[ACCUMULATED[0]][0], run.dtype)


@pytest.mark.parametrize("run", [run for run in RUNS if run.evaluate], ids=str)
def test_the_same_evaluation(run: Run) -> None:
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        for found, other in zip(trace.evaluations, expected, strict=True):
            assert abs(found / other - 1) <= 1e-12
