"""Attention in a compiled block: whether it can be one graph, and what such a graph is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megacpp.blocks.attention.gqa import CoreAttention, GroupedQueryAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.attention.rope import rotary_table
from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.kernels.attention.causal import VARLEN, attention_mask
from megacpp.model.documents import Documents
from megacpp.torch_extras import autocast_dtype

Attention = GroupedQueryAttention | MultiHeadLatentAttention
CHOSEN = "its keys are chosen, or were by another block"
CONTEXT = "keys come from other ranks"


def why_eager(mixer: nn.Module) -> str | None:
    """Return the reason why a block can't be one graph, or None."""
    if isinstance(mixer, SparseAttention):
        return CHOSEN
    return None if type(mixer.inner) is CoreAttention else CONTEXT


def graph_inputs(mixer: Attention, docs: Documents, x_BTD: Tensor) -> Documents:
    """Return the documents with only the cached values that attention needs; computed once a batch.

    Other cached values differ between layers, and each difference would be another graph. A value
    that a graph computed and cached itself would be one more, because the next layer would find it.

    Args:
        mixer: attention module.
        docs: documents of the batch.
        x_BTD: input, for its dtype.
    """
    latent = isinstance(mixer, MultiHeadLatentAttention)
    dim, config = mixer.rope_dim if latent else mixer.head_dim, mixer.attention
    backend, dtype, docs = mixer.inner.kernels.attention, x_BTD.dtype, docs.within(config.window)
    of_queries = autocast_dtype(x_BTD) or dtype

    def make() -> Documents:
        read = Documents(docs.ids_BT, docs.positions_BT, docs.whole)
        read = replace(read, boundaries=docs.boundaries, window=docs.window)
        rotary_table(read, dim, config, dtype)
        if backend == "flex":
            from megacpp.kernels.attention.flex import block_mask

            block_mask(read, read)
        elif backend in VARLEN:
            bounds = read.cu_seqlens
            if not read.whole:  # its length is the number of documents
                torch._dynamo.mark_dynamic(bounds, 0)
        elif backend == "torch" and not (read.whole and not read.window):
            attention_mask(read, read, of_queries, config.softcap)
        return read

    return docs.memo(("compiled attention", dim, config, dtype, of_queries, backend), make)
