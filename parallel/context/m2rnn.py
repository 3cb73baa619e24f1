"""M2RNN over the context axis, exactly: heads for tokens, or one chunk of a row after another.

The tanh rules out a parallel scan. `heads` turns tokens of all heads into whole rows of some by an
all-to-all. `serial`, for head counts that do not divide, works on the chunks in the order of the
row: each rank hands the state to the rank of the next chunk, its gradient comes back the same way.

Legend: B rows, T tokens of a row, t this rank's tokens of it, C tokens of a chunk, N heads, n the
rank's share of them, K key, V value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.kernels.m2rnn.reference import m2rnn_carried
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide
from parallel.context.convolution import convolve_with_halo
from parallel.context.heads import from_heads, own_heads, to_own_heads
from parallel.context.layout import ContextLayout
from parallel.context.segments import continues, cut, linked, row_of

Kind = Literal["heads", "serial"]
Scan = Callable[..., Tensor]


def m2rnn_kind(wanted: Literal["auto", "heads", "serial"], num_heads: int, degree: int) -> Kind:
    """`auto` is heads where the heads of a process divide by the context ranks, else serial."""
    if wanted != "auto":
        return wanted
    return "serial" if num_heads % degree else "heads"


class ContextM2RNN(ParallelStyle):
    """Replaces `scan` and `convolve` of an M2RNN mixer on the 1-D context mesh.

    Its documents must then be a part of whole rows (`Documents.take`) in the layout's order.
    `heads` needs the heads that this process holds to divide by the number of context ranks;
    `serial` takes any number, and as long as one rank with the whole row.
    """

    def __init__(self, kind: Kind, layout: ContextLayout) -> None:
        super().__init__()
        self.kind, self.layout = kind, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, M2RNN)
        layout, group = self.layout, device_mesh.get_group()
        assert layout.degree == group.size() and layout.rank == group.rank()
        if self.kind == "heads":
            scan = partial(scan_by_heads, module.scan, layout, group)
        else:
            scan = partial(scan_serially, module, layout, group)
        module.scan = scan  # type: ignore[method-assign]
        module.convolve = partial(  # type: ignore[method-assign]
            convolve_with_halo, module, module.convolve, layout, group
        )
        return module


def scan_by_heads(
    scan: Scan,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNK: Tensor,
    k_BtNK: Tensor,
    v_BtNV: Tensor,
    f_BtN: Tensor,
    w_NVV: Tensor,
    docs: Documents | None,
) -> Tensor:
    """`scan` of whole rows for this rank's share of the heads, `[B, t, N, V]`.

    One all-to-all there (one more where dtypes differ) and one back. q and k heads that heads of
    several ranks share are gathered instead.
    """
    row, num_heads = row_of(docs, layout), v_BtNV.shape[2]
    parts = {"v": v_BtNV, "f": f_BtN, "q": q_BtNK, "k": k_BtNK}
    rows = to_own_heads(parts, num_heads, layout, group)
    w_nVV = w_NVV[own_heads(num_heads, layout)]
    y_BTnV = scan(rows["q"], rows["k"], rows["v"], rows["f"], w_nVV, row)
    return from_heads(y_BTnV, layout, group)


def scan_serially(
    mixer: M2RNN,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNK: Tensor,
    k_BtNK: Tensor,
    v_BtNV: Tensor,
    f_BtN: Tensor,
    w_NVV: Tensor,
    docs: Documents | None,
) -> Tensor:
    """The recurrence over this rank's chunks, entered by what the chunk before left behind.

    B N K V numbers, at least fp32, from rank to rank at every boundary between two ranks' chunks,
    and as many back. Each receipt and dispatch is a step of one chain in autograd's graph, so that
    backward waits for them in exactly the reverse order.
    """
    owners = {chunk: rank for rank, held in enumerate(layout.chunks) for chunk in held}
    (B, _, N, V), K = v_BtNV.shape, k_BtNK.shape[-1]
    inputs = (q_BtNK, k_BtNK, v_BtNV, f_BtN)
    # All ranks or none have a gradient to send, and the model needs that of one of these.
    chain = next((x for x in (*inputs, w_NVV) if x.requires_grad), v_BtNV)
    h_BNKV, ys_BCNV = wide(v_BtNV).new_zeros(B, N, K, V), []
    parts = [cut(x, layout).unflatten(0, (B, -1)) for x in inputs]  # [B, J, C, ...]
    for j, segment in enumerate(_segments(docs, layout)):
        chunk = layout.chunks[layout.rank][j]
        before, after = owners.get(chunk - 1), owners.get(chunk + 1)
        if before is not None and before != layout.rank:
            h_BNKV = receive(chain, h_BNKV, before, group)
        h_BNKV = torch.where(continues(segment)[:, None, None, None], h_BNKV, 0.0)
        q, k, v, f = (x[:, j] for x in parts)
        y_BCNV, h_BNKV = m2rnn_carried(
            *(q, k, v, f, w_NVV, segment, h_BNKV),
            mixer.clip,
            mixer.chunk_size,
            mixer.keep_states,
            backend=mixer.kernels.m2rnn,
        )
        if after is not None and after != layout.rank:
            chain = send(h_BNKV, after, group)
        ys_BCNV.append(y_BCNV)
    return linked(torch.cat(ys_BCNV, 1), chain)


def _segments(docs: Documents | None, layout: ContextLayout) -> list[Documents]:
    """The documents `[B, C]` of each of this rank's chunks, from left to right. Once per batch."""
    whole = row_of(docs, layout).whole
    assert docs is not None

    def make() -> list[Documents]:
        ids, positions = (x.chunk(layout.per_rank, 1) for x in (docs.ids_BT, docs.positions_BT))
        return [Documents(i, p, whole) for i, p in zip(ids, positions, strict=True)]

    return docs.memo(("serial", layout), make)


def receive(chain: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """A state from the rank of the chunk before; backward sends its gradient there.

    `chain` is what must come earlier in forward, and waits for this in backward.
    """
    return _Receive.apply(chain, like, source, group)  # type: ignore[return-value]


def send(h_BNKV: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
    """A state to the rank of the chunk behind; backward receives its gradient from there.

    Returns a scalar that stands for the dispatch in the chain.
    """
    return _Send.apply(h_BNKV, target, group)  # type: ignore[return-value]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Tensor, like: Tensor, source: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.source, ctx.group = source, group
        h_BNKV = torch.empty_like(like)
        dist.recv(h_BNKV, group=group, group_src=source)
        return h_BNKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.source)
        return None, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BNKV: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
        ctx.target, ctx.group, ctx.shape = target, group, h_BNKV.shape
        dist.send(h_BNKV.contiguous(), group=group, group_dst=target)
        return h_BNKV.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dh_BNKV = grads[0].new_empty(ctx.shape)
        dist.recv(dh_BNKV, group=ctx.group, group_src=ctx.target)
        return dh_BNKV, None, None
