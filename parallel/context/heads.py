"""Exchange of a mixer's tokens for heads: whole rows of some heads on every context rank.

Legend: B rows, T tokens of a row, t this rank's tokens of it, H heads, h the rank's share of them,
G things that neighbouring heads share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.torch_extras import listed, to_device
from parallel.all_to_all import exchange
from parallel.collectives import gather
from parallel.context.layout import ContextLayout


def own_heads(num_heads: int, layout: ContextLayout) -> slice:
    """Return the heads that this rank works on."""
    share, rest = divmod(num_heads, layout.degree)
    assert rest == 0, f"{num_heads} heads over {layout.degree} context ranks"
    return slice(layout.rank * share, (layout.rank + 1) * share)


def to_heads(
    parts: Sequence[Tensor], layout: ContextLayout, group: dist.ProcessGroup
) -> list[Tensor]:
    """Return each `[B, t, H, ...]` as `[B, T, h, ...]`, tokens in the order of the row.

    One all-to-all for all parts of a dtype, which may differ in H: each divides by the ranks.
    """

    def send(x_BtWX: Tensor) -> Tensor:
        return _in_row_order(exchange(x_BtWX, 2, 1, group), layout)

    shares = [x.unflatten(2, (layout.degree, -1)) for x in parts]  # [B, t, W, h, ...]
    return [x.squeeze(2) for x in _together(send, shares, 3)]


def to_own_heads(
    parts: dict[str, Tensor], num_heads: int, layout: ContextLayout, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Return whole rows of the tensors that this rank's heads need, by name.

    Tensors whose G the ranks can't divide are gathered instead.

    Args:
        parts: `[B, t, G, ...]` each: G heads, or things that heads share.
        num_heads: heads of the layer.
        layout: of the tokens.
        group: the context ranks.
    """
    by_head = {name: x for name, x in parts.items() if x.shape[2] % layout.degree == 0}
    shared = {name: x for name, x in parts.items() if name not in by_head}
    rows = dict(zip(by_head, to_heads(list(by_head.values()), layout, group), strict=True))
    for name, x in zip(shared, to_rows(list(shared.values()), layout, group), strict=True):
        rows[name] = for_own_heads(x, 2, num_heads, layout)
    return rows


def from_heads(x_BThD: Tensor, layout: ContextLayout, group: dist.ProcessGroup) -> Tensor:
    """Return `[B, T, h, ...]` as `[B, t, H, ...]`: one all-to-all."""
    if layout.per_rank > 1:
        index_T = layout.gathered_index(x_BThD.shape[1])
        x_BThD = x_BThD.index_select(1, to_device(index_T, x_BThD.device))
    return exchange(x_BThD, 1, 2, group)


def to_rows(
    parts: Sequence[Tensor], layout: ContextLayout, group: dist.ProcessGroup
) -> list[Tensor]:
    """Return each `[B, t, ...]` as `[B, T, ...]` in row order: one all-gather per dtype."""

    def send(x_BtD: Tensor) -> Tensor:
        return _in_row_order(gather(x_BtD, 1, group), layout)

    return _together(send, parts, 2)


def for_own_heads(x_G: Tensor, dim: int, num_heads: int, layout: ContextLayout) -> Tensor:
    """Return the entries along `dim` that this rank's heads read, out of G that all heads share.

    There are fewer than the rank's heads when equally many neighbours share each, else one per
    head.

    Args:
        x_G: any shape, with G entries along `dim`.
        dim: dim of the entries.
        num_heads: heads of the layer.
        layout: of the tokens.
    """
    each = num_heads // x_G.shape[dim]
    own = own_heads(num_heads, layout)
    wanted = [head // each for head in range(own.start, own.stop)]
    distinct = sorted(set(wanted))
    share = len(wanted) // len(distinct)
    if wanted == [g for g in distinct for _ in range(share)]:
        return x_G.narrow(dim, distinct[0], len(distinct))
    return x_G.index_select(dim, listed(wanted, x_G.device))


def _in_row_order(x_BTD: Tensor, layout: ContextLayout) -> Tensor:
    """Return tokens in the order of the row, from the rank order of an exchange."""
    if layout.per_rank == 1:
        return x_BTD
    index_T = layout.gathered_index(x_BTD.shape[1]).argsort()
    return x_BTD.index_select(1, to_device(index_T, x_BTD.device))


def _together(send: Callable[[Tensor], Tensor], parts: Sequence[Tensor], lead: int) -> list[Tensor]:
    """Apply `send` to all parts of a dtype at once, joined behind their first `lead` dims."""
    sent: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in parts):
        same = [i for i, x in enumerate(parts) if x.dtype == dtype]
        shapes = [parts[i].shape[lead:] for i in same]
        arrived = send(torch.cat([parts[i].flatten(lead) for i in same], -1))
        split = arrived.split([shape.numel() for shape in shapes], -1)
        sent |= {i: x.unflatten(-1, s) for i, s, x in zip(same, shapes, split, strict=True)}
    return [sent[i] for i in range(len(parts))]
