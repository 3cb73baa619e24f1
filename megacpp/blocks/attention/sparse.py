"""Sparse A blocks: queries attend to the keys that an indexer chose for them (DSA, IndexCache).

An `A.index` block has an indexer, chooses and leaves its choice with the documents of the batch; an
`A.share` block has none and takes the choice of the last `A.index` before it. In the warm-up
(`sparse.stage=dense`) nothing is chosen: all blocks attend to all keys, and the indexers alone are
trained to resemble that. Source: DeepSeek-V3.2 (arXiv 2512.02556).

Legend: B rows, T tokens, S key tokens, D model, N query heads, K key/value heads, H query/key head
dim, V value head dim, X indexer head dim, C chosen keys of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megacpp.blocks.attention.config import SparseAttentionConfig
from megacpp.blocks.attention.gqa import CoreAttention, GroupedQueryAttention
from megacpp.blocks.attention.indexer import Index, Indexer
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.attention.rope import rotary_table
from megacpp.config.schema import ModelConfig
from megacpp.kernels.sparse_attention.indexer import choose_keys
from megacpp.kernels.sparse_attention.indexer_loss import HeadShard, Target
from megacpp.kernels.sparse_attention.reference import sparse_attention
from megacpp.model.documents import Documents, documents_of
from megacpp.model.init import Rule
from megacpp.model.pattern import choosing_layer, layer_kinds
from megacpp.model.token_cache import TokenCache

Gather = Callable[[Sequence[Tensor], Documents], tuple[tuple[Tensor, ...], Documents]]


class SparseCore(CoreAttention):
    """Attention to chosen keys, and the indexer's loss by its probabilities.

    A recorder of logits is shown all keys, chosen or not: a bound for those that were.

    Attributes:
        source: the layer whose indexer chooses.
        gather: what a process has of its keys `[B, T, ...]`, and their documents, as it needs them:
            of whole rows. Context parallelism replaces it.
        heads: of the model, where this process has some of them.
    """

    def __init__(self, dense: CoreAttention, config: SparseAttentionConfig, source: int) -> None:
        super().__init__(dense.scale, dense.softcap)
        self.sparse, self.source = config, source
        self.gather: Gather = KeysHere()
        self.heads: HeadShard | None = None

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKV: Tensor,
        docs: Documents,
        latents: MultiHeadLatentAttention | None = None,
        indexer: Indexer | None = None,
        index: Index | None = None,
    ) -> Tensor:
        """Output `[B, T, N, V]`.

        Args:
            latents: as `CoreAttention.forward`.
            indexer: of this layer, and what it made of the tokens; else the choice is another's.
        """
        (k_BSKH, v_BSKV), index, keys = self._of_rows((k_BTKH, v_BTKV), index, docs)
        if latents is not None:
            k_BSKH, v_BSKV = latents.keys_values(k_BSKH, v_BSKV)
        parts, chosen = (q_BTNH, k_BSKH, v_BSKV), None
        if self.sparse.stage == "dense":
            o_BTNV = self.attend(*parts, docs, None if keys is docs else keys)
        else:
            self.observe(q_BTNH, k_BSKH, docs, keys)
            chosen = self.choice(index, docs, keys)
            given = (*parts, chosen, docs, keys, self.scale, self.softcap)
            o_BTNV = self.recompute("core_attn", sparse_attention, *given)
        if indexer is None or index is None or not indexer.learns:
            return o_BTNV
        seen = q_BTNH.detach(), k_BSKH.detach(), self.scale, self.softcap
        return indexer.attach(o_BTNV, index, Target(*seen, docs, keys, chosen, self.heads))

    def choice(self, index: Index | None, queries: Documents, keys: Documents) -> Tensor:
        """Keys of each query, int32 `[B, T, C]`: chosen here, or by the layer `source`.

        What runs again attends to the same ones.
        """
        if index is None:
            return noted_choice(queries, self.source)
        top_k = self.sparse.top_k
        chosen = self.recompute.keep(choose_keys, *index.detached(), queries, keys, top_k)
        note_choice(queries, self.source, chosen)
        return chosen

    def _of_rows(
        self, parts: Sequence[Tensor], index: Index | None, docs: Documents
    ) -> tuple[tuple[Tensor, ...], Index | None, Documents]:
        """Return the parts of keys, the index and the documents of keys, gathered to whole rows."""
        if index is None:
            of_rows, keys = self.gather(parts, docs)
            return of_rows, None, keys
        (*of_rows, k_BSX), keys = self.gather((*parts, index.k_BSX), docs)
        return tuple(of_rows), index._replace(k_BSX=k_BSX), keys


@dataclass(frozen=True)
class SparseCache:
    """Decoding state of a sparse block.

    Attributes:
        tokens: keys and values, or latents, of the tokens so far.
        keys: keys of the indexer; None: it has none.
        chosen: what the last token attended to, or, before a step of a block that shares, what the
            token is to attend to.
    """

    tokens: TokenCache
    keys: TokenCache | None
    chosen: Tensor | None = None


class SparseLatentAttention(MultiHeadLatentAttention):
    """Multi-head latent attention to chosen keys."""

    inner: SparseCore

    def __init__(self, config: ModelConfig, kind: str, layer: int) -> None:
        super().__init__(config)
        a = config.attention
        source = choosing_layer(layer_kinds(config), layer)
        self.inner = SparseCore(self.inner, a.sparse, source)
        self.indexer = Indexer(config, a.q_lora_rank or config.dim) if chooses(kind) else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; positions restart at every document."""
        docs = documents_of(x_BTD, docs)
        table_BTP2 = rotary_table(docs, self.rope_dim, self.config.attention, x_BTD.dtype)
        latent = self.query_latent(x_BTD)
        q_BTNH = self.recompute("mla_q_upproj", self._joined_queries, latent, table_BTP2)
        index = self.indexer(x_BTD, self._normed(latent), docs) if self.indexer else None
        here = self.latent(x_BTD, table_BTP2)
        o_BTNV = self.inner(q_BTNH, *here, docs, self, self.indexer, index)
        return self.wo(o_BTNV.flatten(2)).to(x_BTD.dtype)

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return empty caches of `batch_size` rows."""
        tokens = super().init_state(batch_size, device, dtype)
        return SparseCache(tokens, no_keys(self.indexer, batch_size, device, dtype))

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, Any]:
        """Return the output `[B, T, D]` of rows of one document each, and the caches."""
        table_BTP2 = rotary_table(docs, self.rope_dim, self.config.attention, x_BTD.dtype)
        latent = self.query_latent(x_BTD)
        index = self.indexer(x_BTD, self._normed(latent), docs) if self.indexer else None
        here = self.latent(x_BTD, table_BTP2)
        q_BTNH = self._joined_queries(latent, table_BTP2)
        o_BTNV = self.inner(q_BTNH, *here, docs, self, self.indexer, index)
        tokens = TokenCache.filled(torch.cat(here, dim=-1))
        return self.wo(o_BTNV.flatten(2)).to(x_BTD.dtype), filled_caches(tokens, index)

    def step(self, x_BD: Tensor, state: Any, chosen: Tensor | None = None) -> tuple[Tensor, Any]:
        """Decode one token after those in the caches: return its output and the longer caches.

        Args:
            x_BD: the token.
            state: caches of the tokens before it, and the choice for this token.
            chosen: `[B, 1, C]`, not used: the choice is in the state.
        """
        if self.indexer is not None:
            latent = self._normed(self.query_latent(x_BD[:, None]))
            state = chosen_next(self.indexer, x_BD[:, None], latent, state)
        dense = self.inner.sparse.stage == "dense"
        y_BD, tokens = super().step(x_BD, state.tokens, None if dense else state.chosen)
        return y_BD, replace(state, tokens=tokens)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the mixer."""
        return super().init_rules() | rules_of(self.indexer)

    def _normed(self, latent: Tensor) -> Tensor:
        """Return the input of the indexer's queries: the normed latent, without gradient."""
        with torch.no_grad():
            return self.q_norm(latent) if self.config.attention.q_lora_rank else latent


class SparseGroupedQueryAttention(GroupedQueryAttention):
    """Grouped-query attention to chosen keys; its indexer makes queries of x."""

    inner: SparseCore

    def __init__(self, config: ModelConfig, kind: str, layer: int) -> None:
        super().__init__(config)
        source = choosing_layer(layer_kinds(config), layer)
        self.inner = SparseCore(self.inner, config.attention.sparse, source)
        self.indexer = Indexer(config, config.dim) if chooses(kind) else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; positions restart at every document."""
        docs = documents_of(x_BTD, docs)
        table_BTP2 = rotary_table(docs, self.head_dim, self.config.attention, x_BTD.dtype)
        q_BTNH, k_BTKH, v_BTKV = self._qkv(x_BTD, table_BTP2)
        index = self.indexer(x_BTD, x_BTD, docs) if self.indexer else None
        o_BTNV = self.inner(q_BTNH, k_BTKH, v_BTKV, docs, None, self.indexer, index)
        return self._out(o_BTNV, x_BTD)

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return empty caches of `batch_size` rows."""
        tokens = super().init_state(batch_size, device, dtype)
        return SparseCache(tokens, no_keys(self.indexer, batch_size, device, dtype))

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, Any]:
        """Return the output `[B, T, D]` of rows of one document each, and the caches."""
        table_BTP2 = rotary_table(docs, self.head_dim, self.config.attention, x_BTD.dtype)
        q_BTNH, k_BTKH, v_BTKH = self._qkv(x_BTD, table_BTP2)
        index = self.indexer(x_BTD, x_BTD, docs) if self.indexer else None
        o_BTNV = self.inner(q_BTNH, k_BTKH, v_BTKH, docs, None, self.indexer, index)
        tokens = TokenCache.filled(k_BTKH, v_BTKH)
        return self._out(o_BTNV, x_BTD), filled_caches(tokens, index)

    def step(self, x_BD: Tensor, state: Any, chosen: Tensor | None = None) -> tuple[Tensor, Any]:
        """Decode one token after those in the caches: return its output and the longer caches.

        Args:
            x_BD: the token.
            state: caches of the tokens before it, and the choice for this token.
            chosen: `[B, 1, C]`, not used: the choice is in the state.
        """
        if self.indexer is not None:
            state = chosen_next(self.indexer, x_BD[:, None], x_BD[:, None], state)
        dense = self.inner.sparse.stage == "dense"
        y_BD, tokens = super().step(x_BD, state.tokens, None if dense else state.chosen)
        return y_BD, replace(state, tokens=tokens)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the mixer."""
        return super().init_rules() | rules_of(self.indexer)


SparseAttention = SparseLatentAttention | SparseGroupedQueryAttention


def chooses(kind: str) -> bool:
    """Return whether layers of a kind have an indexer."""
    return "A.index" in kind


def note_choice(docs: Documents, layer: int, chosen_BTC: Tensor) -> None:
    """Leave the keys that `layer` chose with the documents of its queries."""
    docs.note(("choice", layer), chosen_BTC)


def noted_choice(docs: Documents, layer: int) -> Tensor:
    """Return the keys that `layer` chose, int32 `[B, T, C]`."""
    return docs.noted(("choice", layer))


class KeysHere(nn.Module):
    """Keys of whole rows, for a process that has them; context parallelism swaps it."""

    def forward(
        self, parts: Sequence[Tensor], docs: Documents
    ) -> tuple[tuple[Tensor, ...], Documents]:
        """Each of `parts`, and the documents of its tokens."""
        return tuple(parts), docs


def chosen_next(
    indexer: Indexer, x_B1D: Tensor, latent_B1L: Tensor, state: SparseCache
) -> SparseCache:
    """Return the state with one more indexer key, and the positions that the new token attends to.

    Args:
        indexer: of the layer.
        x_B1D: the new token.
        latent_B1L: input of the indexer's queries.
        state: caches of the tokens before it.
    """
    assert state.keys is not None
    return SparseCache(state.tokens, *indexer.step(x_B1D, latent_B1L, state.keys))


def filled_caches(tokens: TokenCache, index: Index | None) -> SparseCache:
    """Return the caches behind the tokens of a prompt.

    Args:
        tokens: keys and values, or latents.
        index: what the layer's indexer made of the tokens; None: it has none.
    """
    return SparseCache(tokens, None if index is None else TokenCache.filled(index.k_BSX))


def with_shared_selection(state: Any, chosen: Tensor | None) -> Any:
    """Return a mixer's state before a step; one that shares gets the last block's choice.

    Args:
        state: of any kind of mixer.
        chosen: `[B, 1, C]` positions chosen by the last indexer; None before the first.
    """
    shares = isinstance(state, SparseCache) and state.keys is None
    return replace(state, chosen=chosen) if shares else state


def choice_of(state: Any, before: Tensor | None) -> Tensor | None:
    """Return the choice of the last block that chose for this token.

    Args:
        state: of the mixer that made the last step.
        before: `[B, 1, C]` choice of the blocks before it; None: none yet.
    """
    return state.chosen if isinstance(state, SparseCache) else before


def no_keys(
    indexer: Indexer | None, batch: int, device: torch.device, dtype: torch.dtype
) -> TokenCache | None:
    """Return an empty cache of indexer keys; None without an indexer.

    Args:
        indexer: of the layer.
        batch: rows.
        device: of the cache.
        dtype: of the cache.
    """
    if indexer is None:
        return None
    return TokenCache.empty(
        torch.empty(batch, 0, indexer.sparse.head_dim, device=device, dtype=dtype)
    )


def rules_of(indexer: Indexer | None) -> dict[str, Rule]:
    """Return the rules of an indexer's parameters and buffers, by name in the mixer."""
    found = {} if indexer is None else indexer.init_rules()
    return {f"indexer.{name}": rule for name, rule in found.items()}


def freeze_all_but_indexers(model: nn.Module) -> None:
    """Freeze all parameters outside of indexers, for the warm-up.

    `requires_grad` is a property of the parameters, so parallelism needs no case of its own: a
    parameter without a gradient is neither reduced nor clipped nor stepped nor decayed.
    """
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.requires_grad_(True)
