"""Gated DeltaNet on every mesh axis, pairs of axes and more: the same run as one process."""

from __future__ import annotations

import functools

import pytest

from tests.parallel.parity import Run, Trace, check, traces_of
from tests.parallel.test_compositions import mesh
from tests.together import Together

RUNS = [
    # each axis alone; both exchanges over cp, both orders of chunks
    Run("delta", mesh(dp_shard=2)),
    Run("delta", mesh(dp_replicate=2)),
    Run("delta", mesh(tp=2)),
    Run("delta", mesh(tp=4)),
    Run("delta", mesh(cp=2)),
    Run("delta", mesh(cp=2, cp_order="contiguous")),
    Run("delta", mesh(cp=2, cp_gated_deltanet="heads")),
    Run("delta", mesh(cp=4, cp_order="contiguous")),
    Run("delta", mesh(cp=4, cp_gated_deltanet="heads", cp_order="contiguous")),
    Run("delta", mesh(pp=2), accum=4, evaluate=True),
    Run("delta", mesh(pp=4), accum=4),
    Run("delta", mesh(pp=2, pp_schedule="zbv"), accum=4),
    Run("delta", mesh(dp_shard=2, ep=2)),
    Run("delta", mesh(tp=2), dtype="fp32"),
    Run("delta", mesh(cp=2), dtype="fp32"),
    # pairs, and Muon on matrices that no rank has whole
    Run("delta", mesh(dp_shard=2, tp=2), optimizer="muon_adamw"),
    Run("delta", mesh(dp_shard=2, cp=2), optimizer="muon_adamw"),
    Run("delta", mesh(cp=2, tp=2)),
    Run("delta", mesh(cp=2, tp=2, cp_gated_deltanet="heads")),
    Run("delta", mesh(pp=2, tp=2), accum=2, optimizer="muon_adamw"),
    Run("delta", mesh(pp=2, cp=2, pp_schedule="zbv"), accum=4),
    Run("delta", mesh(pp=2, dp_shard=2), accum=2),
    Run("delta", mesh(dp_shard=2, cp=2, tp=2, ep=4)),
    Run("delta", mesh(pp=2, cp=2, tp=2), accum=2),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    check(results()[run], results()[run.reference][0], run.dtype)


@pytest.mark.parametrize("run", [run for run in RUNS if run.evaluate], ids=str)
def test_the_same_evaluation(run: Run) -> None:
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        assert trace.sharded and trace.evaluations == pytest.approx(expected, rel=1e-12)
