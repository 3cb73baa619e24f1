"""Modules that read tokens beside their own, on every axis and on several: the same run.

Token order prediction behind the last block and hashed n-grams in front of the first, where ranks
share rows (cp), words (tp), layers (pp) or the storage of all of it (FSDP2). Forked gloo ranks and
tests/parallel/parity.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megacpp.config.schema import MeshConfig
from tests.parallel.parity import Run, Trace, check, traces_of
from tests.together import Together


def mesh(**degrees: Any) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **degrees})


RUNS = [
    Run("around", mesh(dp_shard=2, reshard="always"), accum=4),
    Run("around", mesh(tp=2)),
    Run("around", mesh(tp=4)),
    Run("around", mesh(cp=2)),
    Run("around", mesh(cp=2, cp_order="contiguous"), dtype="fp32"),
    Run("around", mesh(pp=2), accum=4),
    Run("around", mesh(pp=2, pp_schedule="zbv"), accum=4),
    Run("around", mesh(dp_shard=2, ep=2)),
    Run("around", mesh(dp_shard=2, cp=2, tp=2, ep=4), accum=2, sync="each"),
    Run("around", mesh(pp=2, cp=2, tp=2), accum=2),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    one, tables = results()[run.reference][0], "ngram.tables.weight"
    check(results()[run], one, run.dtype)
    assert not torch.equal(one.start[tables].local, one.parameters[tables].local)
    assert all(terms["top"] > 0 for terms in results()[run][0].auxiliary)
