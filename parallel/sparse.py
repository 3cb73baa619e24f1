"""Sparse A blocks on a mesh: what an indexer and its choice need of other ranks.

`tp`   Every rank has all of the indexer and all tokens, so all make the same choice and the same
       gradient, of which each gives its share. Attention heads are spread: what the scores are to
       resemble, a sum over heads, is added up block by block.
`cp`   Queries stay, and the indexer's keys travel with the keys or latents of the attention, in the
       same all-gather; their gradient comes back in its reduce-scatter.

Legend: B rows, T tokens of a row, t this rank's tokens of it, X numbers of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.kernels.sparse_attention.indexer_loss import HeadShard
from megacpp.model.documents import Documents
from parallel.collectives import all_sum_plain
from parallel.context.attention import of_all_ranks
from parallel.context.layout import ContextLayout
from parallel.context.segments import row_of


def spread_heads(mixer: SparseAttention, group: dist.ProcessGroup) -> None:
    """For a mixer with some of the heads, in place."""
    heads = mixer.config.attention.num_heads
    mixer.inner.heads = HeadShard(heads, partial(all_sum_plain, group=group))
    if mixer.indexer is not None:
        mixer.indexer.gradient_share = mixer.indexer.record_share = 1 / group.size()


class ContextSparse(ParallelStyle):
    """A sparse A mixer with some of the tokens of its rows, on the 1-D context mesh."""

    def __init__(self, layout: ContextLayout) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, SparseAttention)
        module.inner.gather = partial(keys_of_all, self.layout, device_mesh.get_group())
        return module


def keys_of_all(
    layout: ContextLayout, group: dist.ProcessGroup, parts: Sequence[Tensor], docs: Documents
) -> tuple[tuple[Tensor, ...], Documents]:
    """Each `[B, t, ...]` as `[B, T, ...]`, and their documents: one all-gather.

    In the order of the row, not of the ranks: which of two keys of equal score is chosen depends on
    it, and a relu makes many of them.
    """
    gathered = of_all_ranks([x.flatten(2) for x in parts], group)
    in_row = [in_order_of_row(x, layout) for x in gathered]
    whole = (x.unflatten(2, y.shape[2:]) for x, y in zip(in_row, parts, strict=True))
    return tuple(whole), row_of(docs, layout)


def in_order_of_row(x_BTX: Tensor, layout: ContextLayout) -> Tensor:
    """What an all-gather returned, chunk after chunk of the row."""
    order = layout.gathered_chunks()
    if order == sorted(order):
        return x_BTX
    chunks = x_BTX.chunk(layout.num_chunks, dim=1)
    return torch.cat([chunks[order.index(c)] for c in range(layout.num_chunks)], dim=1)
