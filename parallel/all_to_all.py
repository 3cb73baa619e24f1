"""Collectives in which parts of a dim, or rows, change their ranks; each has its gradient.

    exchange      A[I_X, J] -> A[I, J_X]              backward: exchange back
    send_rows     rows to the ranks that want them    backward: rows back

The others are in collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import paired

_OPS = torch.ops._c10d_functional


def exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Split dim `split` into one part per rank and join the received parts along dim `join`.

    `exchange(x_BtNH, split=2, join=1)` turns a sequence shard of all heads into all tokens (of
    the ranks in order) of some heads; with the two dims swapped it is its own inverse.

    Args:
        x: any shape; the group's size divides dim `split`.
        split: dim that is split.
        join: dim that is joined.
        group: the ranks.
    """
    forth, back = (split, join, group), (join, split, group)
    return paired(x, group, (exchange_plain, *forth), (exchange_plain, *back))


def send_rows(
    x_SD: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `leaving[r]` consecutive rows to rank r; return `arriving[r]` rows of each r, joined.

    Args:
        x_SD: rows in the order of the ranks that they go to.
        leaving: rows for each rank.
        arriving: rows from each rank; as many as that rank has for this one in `leaving`.
        group: the ranks.
    """
    forth, back = (leaving, arriving, group), (arriving, leaving, group)
    return paired(x_SD, group, (send_rows_plain, *forth), (send_rows_plain, *back))


def exchange_plain(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Return `exchange` without a gradient.

    Args:
        x: any shape; the group's size divides dim `split`.
        split: dim that is split.
        join: dim that is joined.
        group: the ranks.
    """
    n = group.size()
    if n == 1:
        return x
    assert x.shape[split] % n == 0, f"dim {split} of {tuple(x.shape)} is cut into {n}"
    parts = x.unflatten(split, (n, -1)).movedim(split, 0).contiguous()  # [n, ..., part, ...]
    flat = parts.flatten()
    arrived = send_rows_plain(flat, [flat.numel() // n] * n, [flat.numel() // n] * n, group)
    return arrived.view(parts.shape).movedim(0, join).flatten(join, join + 1)


def send_rows_plain(
    x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Return `send_rows` without a gradient, of any dtype.

    Args:
        x: rows, dim 0, in the order of the ranks that they go to.
        leaving: rows for each rank.
        arriving: rows from each rank.
        group: the ranks.
    """
    if group.size() == 1:
        return x
    name = group.group_name
    return _OPS.wait_tensor(
        _OPS.all_to_all_single(x.contiguous(), list(arriving), list(leaving), name)
    )
