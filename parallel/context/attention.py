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
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.attention.gqa import CoreAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.attention.sparse import SparseCore
from megacpp.kernels.attention.parts import Scores
from megacpp.model.documents import Documents
from parallel.collectives import gather
from parallel.context.heads import from_heads, own_heads, to_heads, to_rows
from parallel.context.layout import ContextLayout
from parallel.context.ring import Ring, chunk_documents, ring_attention
from parallel.context.segments import row_of

Kind = Literal["all_gather", "ring", "heads"]


class ContextAttention(ParallelStyle):
    """Style that swaps the core attention of an A mixer for that of the 1-D context mesh.

    Its documents must then be a part of whole rows (`Documents.take`) in the layout's order.
    `heads` needs the query heads and the key/value heads that this process holds to divide by the
    number of context ranks; the others take any. Of a sparse mixer, whose queries choose among all
    keys, the keys are gathered whatever the kind.
    """

    def __init__(self, kind: Kind, layout: ContextLayout) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout, group, core = self.layout, device_mesh.get_group(), module.inner
        assert layout.degree == group.size() and layout.rank == group.rank()
        assert isinstance(core, CoreAttention)
        if isinstance(core, SparseCore):
            core.gather = KeysOfRows(layout, group)
            return module
        kinds = {"all_gather": GatheredAttention, "ring": RingAttention, "heads": AttentionByHeads}
        module.inner = kinds[self.kind](core, layout, group)
        return module


class ContextCore(CoreAttention):
    """Core attention of some tokens of whole rows, with the arguments of `CoreAttention`."""

    def __init__(
        self, plain: CoreAttention, layout: ContextLayout, group: dist.ProcessGroup
    ) -> None:
        super().__init__(plain.scale, plain.softcap)
        self.kernels, self.layout, self.group = plain.kernels, layout, group


class GatheredAttention(ContextCore):
    """Attention of own queries to all keys: one all-gather, back one equal reduce-scatter.

    A row's keys and values are T K (H + V) numbers, its latents T (C + R).
    """

    def forward(
        self,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKV: Tensor,
        docs: Documents,
        latents: MultiHeadLatentAttention | None = None,
    ) -> Tensor:
        """Return the output `[B, t, N, V]` of this rank's queries over the keys of whole rows.

        Args:
            q_BtNH: queries of this rank's tokens.
            k_BtKH: their keys, or normed latents `[B, t, C]` with `latents`.
            v_BtKV: their values, or rotated shared keys `[B, t, R]` with `latents`.
            docs: documents of this rank's tokens.
            latents: expands latents to keys and values; None: there are none.
        """
        k_BTKH, v_BTKV = of_all_ranks((k_BtKH, v_BtKV), self.group)
        if latents is not None:
            k_BTKH, v_BTKV = latents.keys_values(k_BTKH, v_BTKV)
        keys = chunk_documents(docs, self.layout, self.layout.gathered_chunks())
        return self.attend(q_BtNH, k_BTKH, v_BTKV, docs, keys)


class RingAttention(ContextCore):
    """Attention of own queries to passing blocks of keys, t K (H + V) numbers a row each.

    Latents come by as t (C + R) numbers a row and are expanded at every stop, in backward again.
    """

    def forward(
        self,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKV: Tensor,
        docs: Documents,
        latents: MultiHeadLatentAttention | None = None,
    ) -> Tensor:
        """Return the output `[B, t, N, V]` of this rank's queries over the keys of whole rows.

        Args:
            q_BtNH: queries of this rank's tokens.
            k_BtKH: their keys, or normed latents `[B, t, C]` with `latents`.
            v_BtKV: their values, or rotated shared keys `[B, t, R]` with `latents`.
            docs: documents of this rank's tokens.
            latents: expands latents to keys and values; None: there are none.
        """
        heads, dims = k_BtKH.shape[2:-1], (k_BtKH.shape[-1], v_BtKV.shape[-1])

        def expand(block_BSX: Tensor, *weight_XC: Tensor) -> tuple[Tensor, Tensor]:
            if latents is None:
                k_BSKH, v_BSKV = block_BSX.unflatten(-1, (*heads, -1)).split(dims, -1)
                return k_BSKH, v_BSKV
            c_BSC, k_pe_BSR = block_BSX.to(weight_XC[0].dtype).split(dims, -1)
            return latents.expand_kv(c_BSC, k_pe_BSR, *weight_XC)

        scores = Scores(self.scale, self.softcap)
        flash = self.kernels.attention == "merged"
        ring = Ring(self.layout, self.group, docs, expand, scores, self.observe, flash)
        block_BtX = torch.cat((k_BtKH, v_BtKV), -1).flatten(2)
        weight_XC = () if latents is None else (latents.expansion,)
        return ring_attention(q_BtNH, block_BtX, ring, weight_XC)


class AttentionByHeads(ContextCore):
    """Attention over whole rows of the rank's heads: one all-to-all there and one back.

    Latents, which heads share, are gathered and expanded for the rank's heads alone.
    """

    def forward(
        self,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKV: Tensor,
        docs: Documents,
        latents: MultiHeadLatentAttention | None = None,
    ) -> Tensor:
        """Return the output `[B, t, N, V]`, computed for whole rows of some heads.

        Args:
            q_BtNH: queries of this rank's tokens.
            k_BtKH: their keys, or normed latents `[B, t, C]` with `latents`.
            v_BtKV: their values, or rotated shared keys `[B, t, R]` with `latents`.
            docs: documents of this rank's tokens.
            latents: expands latents to keys and values; None: there are none.
        """
        layout, group, row = self.layout, self.group, row_of(docs, self.layout)
        if latents is not None:
            (q,) = to_heads((q_BtNH,), layout, group)
            c_BTC, k_pe_BTR = to_rows((k_BtKH, v_BtKV), layout, group)
            k, v = latents.keys_values(c_BTC, k_pe_BTR, own_heads(q_BtNH.shape[2], layout))
        else:
            # query heads behind their key head
            q_BtKX = q_BtNH.unflatten(2, (k_BtKH.shape[2], -1)).flatten(3)
            q, k, v = to_heads((q_BtKX, k_BtKH, v_BtKV), layout, group)
            q = q.unflatten(3, (-1, q_BtNH.shape[-1])).flatten(2, 3)
        o_BTnV = self.attend(q, k, v, row, share=(layout.rank, layout.degree))
        return from_heads(o_BTnV, layout, group)


class KeysOfRows(nn.Module):
    """Keys of all ranks for a sparse mixer, in the order of the row: one all-gather.

    Not in the order of the ranks: which of two keys of equal score is chosen depends on it, and a
    relu makes many of them. Their gradient comes back in the reduce-scatter.
    """

    def __init__(self, layout: ContextLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layout, self.group = layout, group

    def forward(
        self, parts: Sequence[Tensor], docs: Documents
    ) -> tuple[tuple[Tensor, ...], Documents]:
        """Return each `[B, t, ...]` as `[B, T, ...]`, and their documents."""
        gathered = of_all_ranks([x.flatten(2) for x in parts], self.group)
        in_row = [in_order_of_row(x, self.layout) for x in gathered]
        whole = (x.unflatten(2, y.shape[2:]) for x, y in zip(in_row, parts, strict=True))
        return tuple(whole), row_of(docs, self.layout)


def in_order_of_row(x_BTX: Tensor, layout: ContextLayout) -> Tensor:
    """Reorder what an all-gather returned: chunk after chunk of the row."""
    order = layout.gathered_chunks()
    if order == sorted(order):
        return x_BTX
    chunks = x_BTX.chunk(layout.num_chunks, dim=1)
    return torch.cat([chunks[order.index(c)] for c in range(layout.num_chunks)], dim=1)


def of_all_ranks(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return each `[B, t, ..., X]` as `[B, T, ..., X]` in rank order: one all-gather.

    They are joined along X with tokens in front, so that neither the all-gather nor the
    reduce-scatter of backward copies what it moves.
    """
    own_tBX = torch.cat([x.transpose(0, 1) for x in parts], -1)
    all_BTX = gather(own_tBX, 0, group).transpose(0, 1)
    return all_BTX.split([x.shape[-1] for x in parts], -1)
