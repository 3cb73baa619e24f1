"""Settings of attention blocks (A): `model.attention`; no torch import here."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal

from megacpp.config.settings import MANY, WIDEST, setting


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension as DeepSeek-V3 uses it (arXiv 2309.00071), or Llama 3's.

    Any flag turns it on.
    """

    original_seq_len: int = setting(4096, "Row length that is not extended.", "tokens", at_least=1)
    factor: float = setting(40.0, "Factor by which the context grows.", above=0)
    beta_fast: int = setting(
        32, "Rotations above which a frequency stays as it is.", "rotations", at_least=1
    )
    beta_slow: int = setting(
        1, "Rotations below which a frequency is divided by the factor.", "rotations", at_least=1
    )
    mscale: float = setting(1.0, "Strength of the softmax temperature.", at_least=0)
    ramp: Literal["pairs", "turns"] = setting(
        "pairs", "What frequencies between the two betas go by: YaRN's pairs, Llama 3's turns."
    )


@dataclass(frozen=True)
class SparseAttentionConfig:
    """DSA: queries of some A blocks attend to the keys that an indexer chooses (2512.02556)."""

    layers: str = setting(
        "", 'Sparse A blocks by rank among A blocks: "1,2,3", "every:2" or "all" (empty: none).'
    )
    top_k: int = setting(256, "Keys that a query attends to.", "keys", at_least=1, at_most=WIDEST)
    num_heads: int = setting(8, "Heads of the indexer.", "heads", at_least=1, at_most=MANY)
    head_dim: int = setting(
        64, "Width of a head of the indexer; even.", "dims", at_least=2, at_most=MANY
    )
    share: int = setting(
        1, "Sparse blocks that use one choice of keys: the first chooses it.", "blocks", at_least=1
    )
    own: str = setting("", 'Ranks of further A blocks that choose for themselves: "4,7".')
    stage: Literal["sparse", "dense"] = setting(
        "sparse", "dense: all keys are attended to and only the indexers are trained."
    )
    loss: float = setting(
        1e-3, "Weight of the divergence between attention and the indexer's choice.", above=0
    )


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of A blocks: grouped-query, or DeepSeek's multi-head latent attention."""

    kind: Literal["gqa", "mla"] = setting("gqa", "Grouped-query or multi-head latent attention.")
    num_heads: int = setting(8, "Query heads of attention.", "heads", at_least=1, at_most=MANY)
    num_kv_heads: int = setting(
        2, "Key and value heads of gqa; divides num_heads.", "heads", at_least=1, at_most=MANY
    )
    head_dim: int = setting(64, "Width of a head of gqa; even.", "dims", at_least=2, at_most=MANY)
    rope_theta: float = setting(500_000.0, "Base of the rotary frequencies.", above=0)
    rope_fraction: float = setting(
        1.0, "Rotated part of a query or key head of gqa; the first dims.", above=0, at_most=1
    )
    qk_norm: bool = setting(False, "Normalise queries and keys of gqa.")
    qk_norm_wide: bool = setting(False, "Normalise over all heads at once; with qk_norm.")
    qkv_bias: bool = setting(False, "Add a bias to queries, keys and values of gqa.")
    window: int = setting(
        0,
        "Tokens that a query of gqa sees, itself included (0: all of its document).",
        "tokens",
        at_least=0,
        at_most=WIDEST,
    )
    full_layers: str = setting(
        "",
        'A blocks without the window, by rank: "3,7", "every:4" or "all"; yarn is theirs alone.',
    )
    output_gate: bool = setting(
        False, "Multiply what heads of gqa return by the sigmoid of a projection."
    )
    softcap: float | None = setting(
        None, "Soft cap (tanh) on attention logits of gqa (none: off).", above=0
    )
    q_lora_rank: int = setting(
        0,
        "Width of the query latent of mla (0: queries are projected directly).",
        "dims",
        at_least=0,
        at_most=WIDEST,
    )
    kv_lora_rank: int = setting(
        64, "Width of the key and value latent of mla.", "dims", at_least=1, at_most=WIDEST
    )
    qk_nope_head_dim: int = setting(
        64,
        "Width of a query or key head of mla without rotation.",
        "dims",
        at_least=1,
        at_most=MANY,
    )
    qk_rope_head_dim: int = setting(
        64, "Rotated width of a query or key head of mla; even.", "dims", at_least=2, at_most=MANY
    )
    v_head_dim: int = setting(64, "Width of a value head of mla.", "dims", at_least=1, at_most=MANY)
    yarn: YarnConfig | None = None
    max_seq_len: int = setting(
        4096, "Longest row; YaRN applies beyond yarn.original_seq_len.", "tokens", at_least=1
    )
    sparse: SparseAttentionConfig = field(default_factory=SparseAttentionConfig)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dims of queries and keys, and of values."""
        if self.kind == "gqa":
            return self.head_dim, self.head_dim
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values: MLA has one for each query head."""
        return self.num_kv_heads if self.kind == "gqa" else self.num_heads


def layer_settings(attention: AttentionConfig, kind: str) -> AttentionConfig:
    """Return the settings of a layer: a full one has no window, and others then have no YaRN.

    Args:
        attention: of the model.
        kind: of the layer (`layer_kinds`).
    """
    if not attention.full_layers:
        return attention
    own = copy.copy(attention)  # `replace` takes dataclasses, which exported folders have none of
    vars(own).update({"window": 0} if "+full" in kind else {"yarn": None})
    return own
