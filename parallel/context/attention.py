"""Attention over the context axis, exactly: keys gathered, keys in a ring, or heads for tokens.

`all_gather`: every rank gets the keys and values of all tokens for its own queries. `ring`: they
go around (parallel/context/ring.py), so that no rank holds them all. `heads`: an all-to-all
turns tokens of all heads into whole rows of some. Of MLA the latents move, C + R numbers a token,
and each rank expands them for its queries.

Legend: B rows, T tokens of a row, t this rank's tokens of it, N query heads, n the rank's share of
them, K key/value heads, G = N / K, H query/key head dim, V value head dim, C latent, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.attention.gqa import CoreAttention, GroupedQueryAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.kernels.attention.parts import Scores
from megacpp.kernels.attention.reference import attention_between, causal_attention
from megacpp.model.documents import Documents
from parallel.collectives import gather
from parallel.context.heads import from_heads, own_heads, to_heads, to_rows
from parallel.context.layout import ContextLayout
from parallel.context.ring import Ring, chunk_documents, ring_attention
from parallel.context.segments import row_of

Kind = Literal["all_gather", "ring", "heads"]


class ContextAttention(ParallelStyle):
    """Replaces the attention of an A mixer (`inner`, of MLA `attend`) on the 1-D context mesh.

    Its documents must then be a part of whole rows (`Documents.take`) in the layout's order.
    `heads` needs the query heads and the key/value heads that this process holds to divide by the
    number of context ranks; the others take any.
    """

    def __init__(self, kind: Kind, layout: ContextLayout) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout, group = self.layout, device_mesh.get_group()
        assert layout.degree == group.size() and layout.rank == group.rank()
        if isinstance(module, MultiHeadLatentAttention):
            latent = {
                "all_gather": latent_gathered,
                "ring": latent_in_ring,
                "heads": latent_by_heads,
            }[self.kind]
            module.attend = partial(latent, module, layout, group)  # type: ignore[method-assign]
        else:
            assert isinstance(module, GroupedQueryAttention)
            inner = module.inner
            grouped = {
                "all_gather": grouped_gathered,
                "ring": grouped_in_ring,
                "heads": grouped_by_heads,
            }[self.kind]
            inner.forward = partial(grouped, inner, layout, group)  # type: ignore[method-assign]
        return module


def grouped_gathered(
    inner: CoreAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKV: Tensor,
    docs: Documents,
) -> Tensor:
    """Own queries on all keys: one all-gather of T K (H + V) numbers a row, back one
    reduce-scatter of as many."""
    k_BTKH, v_BTKV = of_all_ranks((k_BtKH, v_BtKV), group)
    return _attend_gathered(inner, layout, q_BtNH, k_BTKH, v_BTKV, docs)


def grouped_in_ring(
    inner: CoreAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKV: Tensor,
    docs: Documents,
) -> Tensor:
    """Own queries on the keys that come by, blocks of t K (H + V) numbers a row."""
    num_heads, dims = k_BtKH.shape[2], (k_BtKH.shape[-1], v_BtKV.shape[-1])

    def expand(block_BSX: Tensor) -> tuple[Tensor, Tensor]:
        k_BSKH, v_BSKV = block_BSX.unflatten(-1, (num_heads, -1)).split(dims, -1)
        return k_BSKH, v_BSKV

    ring = Ring(layout, group, docs, expand, Scores(inner.scale, inner.softcap), inner.observe)
    return ring_attention(q_BtNH, torch.cat((k_BtKH, v_BtKV), -1).flatten(2), ring)


def grouped_by_heads(
    inner: CoreAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKV: Tensor,
    docs: Documents,
) -> Tensor:
    """Whole rows of the rank's heads: one all-to-all there and one back, in backward again."""
    row, num_heads = row_of(docs, layout), k_BtKH.shape[2]
    q_BtKX = q_BtNH.unflatten(2, (num_heads, -1)).flatten(3)  # query heads behind their key head
    q, k, v = to_heads((q_BtKX, k_BtKH, v_BtKV), layout, group)
    q_BTnH = q.unflatten(3, (-1, q_BtNH.shape[-1])).flatten(2, 3)
    return from_heads(_attend_own_heads(inner, layout, q_BTnH, k, v, row), layout, group)


def latent_gathered(
    mixer: MultiHeadLatentAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    c_BtC: Tensor,
    k_pe_BtR: Tensor,
    docs: Documents,
) -> Tensor:
    """Own queries on all latents: one all-gather of T (C + R) numbers a row, back one
    reduce-scatter of as many."""
    latents = of_all_ranks((c_BtC, k_pe_BtR), group)
    k_BTNH, v_BTNV = mixer.seam("mla_kv", mixer.expand_kv, *latents)
    return _attend_gathered(mixer.inner, layout, q_BtNH, k_BTNH, v_BTNV, docs)


def latent_in_ring(
    mixer: MultiHeadLatentAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    c_BtC: Tensor,
    k_pe_BtR: Tensor,
    docs: Documents,
) -> Tensor:
    """Own queries on the latents that come by, blocks of t (C + R) numbers a row; they are
    expanded at every stop, in backward again."""
    dims = (mixer.latent_dim, mixer.rope_dim)

    def expand(block_BSL: Tensor, w_XC: Tensor) -> tuple[Tensor, Tensor]:
        c_BSC, k_pe_BSR = block_BSL.to(w_XC.dtype).split(dims, -1)
        return mixer.expand_kv(c_BSC, k_pe_BSR, w_XC)

    inner = mixer.inner
    ring = Ring(layout, group, docs, expand, Scores(inner.scale, inner.softcap), inner.observe)
    latent_BtL = torch.cat((c_BtC, k_pe_BtR), -1)
    return ring_attention(q_BtNH, latent_BtL, ring, (mixer.wkv_b.weight,))


def latent_by_heads(
    mixer: MultiHeadLatentAttention,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    q_BtNH: Tensor,
    c_BtC: Tensor,
    k_pe_BtR: Tensor,
    docs: Documents,
) -> Tensor:
    """Whole rows of the rank's heads: an all-to-all of queries there and of outputs back; the
    latents, which heads share, are gathered and expanded for the rank's heads alone."""
    row, num_heads = row_of(docs, layout), q_BtNH.shape[2]
    (q_BTnH,) = to_heads((q_BtNH,), layout, group)
    latent_BTC, k_pe_BTR = to_rows((c_BtC, k_pe_BtR), layout, group)

    def expand_own(c_BTC: Tensor, k_pe_BTR: Tensor) -> tuple[Tensor, Tensor]:
        w_NXC = mixer.wkv_b.weight.unflatten(0, (num_heads, -1))
        w_XC = w_NXC[own_heads(num_heads, layout)].flatten(0, 1)
        return mixer.expand_kv(c_BTC, k_pe_BTR, w_XC)

    k_BTnH, v_BTnV = mixer.seam("mla_kv", expand_own, latent_BTC, k_pe_BTR)
    o_BTnV = _attend_own_heads(mixer.inner, layout, q_BTnH, k_BTnH, v_BTnV, row)
    return from_heads(o_BTnV, layout, group)


def _attend_gathered(
    inner: CoreAttention,
    layout: ContextLayout,
    q_BtNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    docs: Documents,
) -> Tensor:
    """This rank's queries on the keys of all ranks in rank order, which their documents know."""
    keys = chunk_documents(docs, layout, layout.gathered_chunks())
    inner.observe(q_BtNH, k_BTKH, docs, keys)
    settings = (docs, keys, inner.scale, inner.softcap, inner.kernels.attention)
    return inner.seam("core_attn", attention_between, q_BtNH, k_BTKH, v_BTKV, *settings)


def _attend_own_heads(
    inner: CoreAttention,
    layout: ContextLayout,
    q_BTnH: Tensor,
    k_BTkH: Tensor,
    v_BTkV: Tensor,
    row: Documents,
) -> Tensor:
    """Whole rows of this rank's share of the heads, `[B, T, n, V]`."""
    inner.observe(q_BTnH, k_BTkH, row, row, share=(layout.rank, layout.degree))
    settings = (row, inner.scale, inner.softcap, inner.kernels.attention)
    return inner.seam("core_attn", causal_attention, q_BTnH, k_BTkH, v_BTkV, *settings)


def of_all_ranks(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each `[B, t, ..., X]` as `[B, T, ..., X]` in rank order: one all-gather.

    They are joined along X with tokens in front, so that neither the all-gather nor the
    reduce-scatter of backward copies what it moves.
    """
    own_tBX = torch.cat([x.transpose(0, 1) for x in parts], -1)
    all_BTX = gather(own_tBX, 0, group).transpose(0, 1)
    return all_BTX.split([x.shape[-1] for x in parts], -1)
