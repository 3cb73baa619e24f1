"""Harness of distributed tests: results, errors, deaths and hangs reach the caller."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.schema import MeshConfig
from megacpp.lessons import ranks
from megacpp.lessons.runs import Run
from parallel.context.layout import ContextLayout
from tests.ranks import RankError, RankTimeoutError, run_ranks


def test_results_come_back_in_rank_order() -> None:
    def body(rank: int, world: int, x: Tensor) -> tuple[int, Tensor]:
        dist.all_reduce(x)
        return rank, x

    results = run_ranks(body, 3, torch.arange(4.0))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(x, 3 * torch.arange(4.0)) for _, x in results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_travel_as_they_are(dtype: torch.dtype) -> None:
    """Values, shapes and types; views, scalars, empty ones and parameters too."""
    whole = torch.arange(12.0).reshape(3, 4).to(dtype)
    sent = [whole, whole.t(), whole[1:, ::2], whole[:1, 1], whole[0, 0], whole[:0]]
    (found,) = run_ranks(lambda rank, world: (sent, torch.nn.Parameter(torch.ones(2))), 1)
    for x, y in zip(found[0], sent, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
        assert x.is_contiguous()
    found[0][0].zero_()  # writable, and each tensor has memory of its own
    assert torch.equal(found[0][1], sent[1])
    assert isinstance(found[1], torch.nn.Parameter) and found[1].requires_grad


def test_an_error_names_the_rank_that_raised_and_ends_the_others() -> None:
    def body(rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("seventeen")
        time.sleep(600)  # in a collective it would race with its own "connection reset"

    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2:.*seventeen"):
        run_ranks(body, 2)
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("words", ["Connection closed by peer", "Connection reset by peer"])
def test_the_cause_goes_before_what_it_broke(words: str) -> None:
    """Rank 0 loses its peer, in either of gloo's words, and both errors arrive."""

    def body(rank: int, world: int) -> None:
        if rank == 0:
            raise RuntimeError(f"[gloo/transport/tcp/pair.cc:542] {words} [10.0.0.1]")
        time.sleep(0.2)
        raise ValueError("seventeen")

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2:.*seventeen"):
        run_ranks(body, 2)


def test_a_rank_that_dies_is_an_error() -> None:
    def body(rank: int, world: int) -> None:
        if rank == 0:
            os._exit(9)
        time.sleep(600)

    with pytest.raises(RankError, match="rank 0 of 2: ended without a result, exit code 9"):
        run_ranks(body, 2)


def test_a_hang_shows_where_every_rank_was() -> None:
    def stuck(rank: int, world: int) -> None:
        time.sleep(600)

    with pytest.raises(RankTimeoutError, match=r"(?s)ranks \[0, 1\] of 2 .* in stuck"):
        run_ranks(stuck, 2, timeout_s=5.0)


def test_a_collective_that_a_rank_does_not_enter_fails_within_20_seconds() -> None:
    """However long the time limit is; a slow rank that computes isn't taken for one that waits."""

    def body(rank: int, world: int) -> None:
        dist.all_reduce(torch.ones(2))
        if rank:
            dist.all_reduce(torch.ones(2))

    began = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"(?s)ranks \[0, 1, 2\] of 3 .* in all_reduce"):
        run_ranks(body, 3, timeout_s=1200.0)
    assert time.monotonic() - began < 20


def test_a_rank_that_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> int:
        until = time.monotonic() + 5.0
        while rank == 0 and time.monotonic() < until:
            pass
        dist.barrier()
        return rank

    monkeypatch.setattr(ranks, "STILL_S", 2.0)
    assert run_ranks(body, 3) == [0, 1, 2]


def test_a_rank_whose_child_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def burn() -> None:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            pass

    def body(rank: int, world: int) -> int | None:
        child = multiprocessing.get_context("fork").Process(target=burn)
        child.start()
        child.join()
        return child.exitcode

    monkeypatch.setattr(ranks, "STILL_S", 2.0)
    assert run_ranks(body, 1) == [0]


def test_rows_that_are_no_microbatches_are_refused() -> None:
    """A step of lessons has 8 rows: another number of microbatches would be another step."""
    for accum, mesh in ((3, MeshConfig(dp_shard=2, cp=2)), (4, MeshConfig(dp_shard=4))):
        with pytest.raises(ValueError, match=rf"8 rows .* evenly to \d data ranks x accum={accum}"):
            _ = Run("plain", mesh, accum=accum).device_batch


def test_an_order_of_chunks_is_known() -> None:
    with pytest.raises(ValueError, match="order='middle': must be one of contiguous, head_tail"):
        ContextLayout.for_rank("middle", 0, 4)  # type: ignore[arg-type]
