"""All further features in one model are the same run on every mesh as on one process.

Forked gloo ranks and tests/parallel/parity.py, fp64: sparse attention, multi-token prediction,
token order, hashed n-grams, an n-gram memory, several streams, null experts in groups. Each has
tests of its own; here they meet: a memory adds to several streams, depths of prediction read the
collapsed one, a stage's last block hands all streams on.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import KEEP, MeshConfig
from tests.differences import largest
from tests.figures import Record
from tests.parallel.parity import Run, Trace, check, error, traces_of
from tests.together import Together


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


SELECTIVE = replace(KEEP, ablock="selective", eblock="full", fblock="full", norms=True)
RUNS = [
    Run("everything", mesh(dp_shard=2), recompute=PER_BLOCK, evaluate=True),
    Run("everything", mesh(tp=2), accum=2),
    Run("everything", mesh(cp=2)),
    Run("everything_mla", mesh(cp=2), recompute=SELECTIVE),
    Run("everything", mesh(dp_shard=2, ep=2), recompute=SELECTIVE),
    Run("everything", mesh(pp=2), accum=4, evaluate=True),
    # weights that a later layer's backward doesn't find
    Run("everything", mesh(dp_shard=2, reshard="always"), accum=2, recompute=SELECTIVE),
    Run("everything_mla", mesh(cp=2, tp=2), recompute=PER_BLOCK),
    Run("everything_mla", mesh(dp_shard=2, tp=2, ep=4)),
    Run("everything", mesh(pp=2, tp=2, dp_shard=2, ep=2), accum=2, recompute=PER_BLOCK),
    # the preset with every feature, of whose two sparse layers the second is a stage later
    Run("everything_tiny", mesh(pp=2), accum=2, evaluate=True),
    Run("everything_tiny", mesh(pp=2, tp=2, ep=2), accum=2, recompute=PER_BLOCK),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run, record_property: Record) -> None:
    expected = results()[run.reference][0]
    for losses in expected.auxiliary:
        assert all(losses[term] > 0 for term in ("sequence", "z", "indexer", "top", "mtp")), losses
    check(results()[run], expected, run.dtype)
    record_property("meshes equal one rank", 1)
    worst = largest(error(trace.gradients, expected.gradients)[0] for trace in results()[run])
    record_property("largest relative difference of a gradient", worst)


@pytest.mark.parametrize("run", [run for run in RUNS if run.evaluate], ids=str)
def test_the_same_evaluation(run: Run) -> None:
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        for found, other in zip(trace.evaluations, expected, strict=True):
            assert abs(found / other - 1) <= 1e-12
