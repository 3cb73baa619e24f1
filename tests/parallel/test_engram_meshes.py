"""Engram on meshes: the same run as one process, and what its tables and convolution send.

Forked gloo ranks and tests/parallel/parity.py; its way into the stream starts awake.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megacpp.config.schema import KEEP, MeshConfig
from tests.parallel.parity import Run, Trace, check, traces_of
from tests.together import Together

AGAIN = replace(KEEP, ablock="selective")


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


CONTIGUOUS = mesh(tp=2, cp=2, cp_order="contiguous")
RUNS = [
    Run("engram", mesh(tp=2)),
    Run("engram", mesh(tp=4), accum=2),
    Run("engram", mesh(cp=2)),
    Run("engram", mesh(pp=2), accum=4),
    Run("engram", mesh(dp_shard=2, ep=2)),
    Run("engram", CONTIGUOUS),
    Run("engram", CONTIGUOUS, recompute=AGAIN),
    Run("engram", mesh(dp_shard=2, tp=2, pp=2), accum=2),
    Run("engram", mesh(dp_shard=2, tp=2), optimizer="muon_adamw"),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    make = functools.partial(traces_of, collectives=True)
    return Together(__name__, RUNS, make, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    check(results()[run], results()[run.reference][0], run.dtype)


def test_running_again_sends_nothing_again() -> None:
    """And gives the same bits: loss, norm and parameters of every step."""
    policies = KEEP, AGAIN
    plain, again = (results()[Run("engram", CONTIGUOUS, recompute=p)] for p in policies)
    for one, other in zip(plain, again, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for name, part in one.parameters.items():
            assert torch.equal(part.local, other.parameters[name].local), name
        assert other.again["engram"] > 0 and "engram" not in one.again
        kinds = [[(c.kind, c.numel) for c in trace.collectives] for trace in (one, other)]
        assert sorted(kinds[0]) == sorted(kinds[1])
