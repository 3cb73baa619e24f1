"""Rows that travel between ranks while other work is computed.

Legend: S rows, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.all_to_all import send_rows

Made = TypeVar("Made")
Work = Callable[[], Made]
_OPS = torch.ops._c10d_functional


def send_rows_beside(
    x_SD: Tensor,
    leaving: Sequence[int],
    arriving: Sequence[int],
    group: dist.ProcessGroup,
    work: Work[Made],
) -> tuple[Tensor, Made]:
    """Return `send_rows` and `work()`, which runs while the rows travel.

    Gradients travel back while the gradients of `work` are computed: autograd runs nodes in the
    opposite order of their making. A compiler orders operators itself.

    Args:
        x_SD: rows in the order of the ranks that they go to.
        leaving: rows for each rank.
        arriving: rows from each rank.
        group: the ranks.
        work: doesn't read the rows that arrive.
    """
    if group.size() == 1 or torch.compiler.is_compiling():
        return send_rows(x_SD, leaving, arriving, group), work()
    trip = _Trip(list(leaving), list(arriving), group)
    travelling = _Depart.apply(x_SD, trip)
    made = work()
    return _Arrive.apply(travelling, trip), made  # type: ignore[return-value]


@dataclass
class _Trip:
    """Rows of `_Depart` for `_Arrive`, and their gradients the other way.

    Attributes:
        returning: gradients on their way back.
    """

    leaving: list[int]
    arriving: list[int]
    group: dist.ProcessGroup
    returning: Tensor | None = None


class _Depart(torch.autograd.Function):
    """Send rows without waiting; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return _sent(x, trip.leaving, trip.arriving, trip.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        returning, ctx.trip.returning = ctx.trip.returning, None
        assert returning is not None
        return _OPS.wait_tensor(returning), None


class _Arrive(torch.autograd.Function):
    """Wait for the rows; backward sends their gradients back without waiting."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return _OPS.wait_tensor(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        trip.returning = _sent(grads[0], trip.arriving, trip.leaving, trip.group)
        return grads[0], None  # autograd wants the shape of what arrived; `_Depart` ignores it


def _sent(
    x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Return rows that are still to arrive, in the order of the ranks that send them."""
    name = group.group_name
    return _OPS.all_to_all_single(x.contiguous(), list(arriving), list(leaving), name)
