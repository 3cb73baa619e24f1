"""Tensors that a rank of a pipeline has sent are let go as its step goes on, in every schedule.

Forked gloo ranks, whose requests hold the tensors that they send.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.pipeline import SCHEDULES, Pipeline
from parallel.start import join
from tests.parallel.test_pipeline import CPU, Case, batches_of, build, config_of
from tests.ranks import on_worlds
from tests.together import Together

RANKS, MICROBATCHES = 2, 8
# Most tensors of ranks 0 and 1 that are alive behind the last action: gradients that no input
# answers, or, where all forwards come first, the last one of each stage. Of a stage that sends no
# gradient, a variable of torch holds the last result.
LEFT = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (3, 4 + 2),
    "interleaved_zb": (3, 4 + 2),
    "looped_bfs": (1, 1 + 1),
    "zbv": (2, 4),
    "dualpipev": (2, 4),
    "dualpipe": (2, 2),
}


class Sends(TorchDispatchMode):
    """Notes the storages that are sent, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent += [StorageWeakRef(t.untyped_storage()) for t in args[0]]
        return func(*args, **(kwargs or {}))

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.sent)


def alive_at_the_end(_rank: int, name: str) -> tuple[int, int]:
    """Return the number of tensors sent in a step, and of those alive behind its last action."""
    case = Case(RANKS, name, MICROBATCHES, cuts="FFFF")  # type: ignore[arg-type]
    world, found = join(case.mesh, CPU), 0
    pipeline = Pipeline(build(case, world)[1], world, config_of(case))
    reduce = PipelineStage.perform_reduce_grad

    def counted(stage: PipelineStage, *args: Any) -> None:
        nonlocal found
        found = sends.alive()
        reduce(stage, *args)

    with Sends() as sends, patch.object(PipelineStage, "perform_reduce_grad", counted):
        for step in range(2):
            sends.sent.clear()
            batches = batches_of(step, case)
            pipeline.accumulate(batches, torch.ones(len(batches)).double())
    assert not sends.alive(), "a step holds nothing that it has sent when it has ended"
    return len(sends.sent), found


@functools.cache
def results() -> Together[str, list[tuple[int, int]]]:
    make = lambda some: on_worlds(alive_at_the_end, dict.fromkeys(some, RANKS))  # noqa: E731
    return Together(__name__, SCHEDULES, make)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tensors_are_let_go_as_they_have_arrived(name: str) -> None:
    sent, alive = zip(*results()[name], strict=True)
    assert min(sent) >= MICROBATCHES
    assert all(map(int.__le__, alive, LEFT[name])), alive  # torch 2.15 lets some go before
