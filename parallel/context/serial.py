"""Recurrence over the context axis, one chunk of a row after another.

For a recurrence that has no parallel form, with heads that do not divide by the ranks. Each rank
hands the state to the rank of the next chunk, and its gradient comes back the same way.

Legend: B rows, t this rank's tokens of a row, J chunks of a rank, C tokens of a chunk, H heads, V
value dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.model.documents import Documents
from megacpp.model.scan import CarryingScan, HeadTensors, TokenTensors, kept
from megacpp.torch_extras import once_differentiable
from parallel.context.layout import ContextLayout
from parallel.context.segments import continues, cut, linked, row_of


class SerialScan(nn.Module):
    """Scan of this rank's chunks, each entered by the state behind the chunk before.

    A state, at least fp32, from rank to rank at every boundary between two ranks' chunks, and as
    much back. Each receipt and dispatch is a step of one chain in autograd's graph, so that
    backward waits for them in exactly the reverse order.
    """

    def __init__(self, scan: CarryingScan, layout: ContextLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.scan, self.layout, self.group = scan, layout, group

    def forward(self, inputs: TokenTensors, weights: HeadTensors, docs: Documents | None) -> Tensor:
        """Return outputs `[B, t, H, V]` of this rank's tokens."""
        layout, scan, group = self.layout, self.scan, self.group
        owners = {chunk: rank for rank, held in enumerate(layout.chunks) for chunk in held}
        h, ys_BCHV = scan.empty_state(inputs, weights), []
        # All ranks or none have a gradient to send, and the model needs that of one of these.
        given = [*inputs.tensors().values(), *weights.tensors().values()]
        chain = next((x for x in given if x.requires_grad), given[0])
        parts = inputs.map_dims(lambda x, dims: cut(x, layout, dims.tokens))
        parts = parts.map(lambda x_S: x_S.unflatten(0, (-1, layout.per_rank)))  # [B, J, ...]
        for j, segment in enumerate(_segments(docs, layout)):
            chunk = layout.chunks[layout.rank][j]
            before, after = owners.get(chunk - 1), owners.get(chunk + 1)
            if before is not None and before != layout.rank:
                h = receive(chain, h, before, group)
            h = kept(h, continues(segment))
            part = parts.map(lambda x_BJ, j=j: x_BJ[:, j])
            y_BCHV, h = scan.carried(part, weights, segment, h)
            if after is not None and after != layout.rank:
                chain = send(h, after, group)
            ys_BCHV.append(y_BCHV)
        return linked(torch.cat(ys_BCHV, 1), chain)


def _segments(docs: Documents | None, layout: ContextLayout) -> list[Documents]:
    """Return the documents `[B, C]` of each of this rank's chunks, from left to right."""
    whole = row_of(docs, layout).whole
    assert docs is not None

    def make() -> list[Documents]:
        ids, positions = (x.chunk(layout.per_rank, 1) for x in (docs.ids_BT, docs.positions_BT))
        return [Documents(i, p, whole) for i, p in zip(ids, positions, strict=True)]

    return docs.memo(("serial", layout), make)


def receive(chain: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Receive a state from the rank of the chunk before; backward sends its gradient there.

    Args:
        chain: any shape; must come earlier in forward, and waits for this in backward.
        like: a tensor of the state's shape `[B, ...]` and dtype.
        source: rank of the group.
        group: the context ranks.
    """
    return _Receive.apply(chain, like, source, group)  # type: ignore[return-value]


def send(h: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
    """Send a state to the rank of the chunk behind; backward receives its gradient from there.

    Returns a scalar that stands for the dispatch in the chain.
    """
    return _Send.apply(h, target, group)  # type: ignore[return-value]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Tensor, like: Tensor, source: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.source, ctx.group = source, group
        h = torch.empty_like(like)
        dist.recv(h, group=group, group_src=source)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.source)
        return None, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
        ctx.target, ctx.group, ctx.shape = target, group, h.shape
        dist.send(h.contiguous(), group=group, group_dst=target)
        return h.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dh = grads[0].new_empty(ctx.shape)
        dist.recv(dh, group=ctx.group, group_src=ctx.target)
        return dh, None, None
