"""What the model is, as frozen dataclasses: `config.model`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megacpp.config.settings import setting

# Most of a size: beyond them nothing can be trained, and rules and reports count one by one.
WIDEST = 1 << 24  # dims: 256 times the width of the widest model
MANY = 1 << 16  # heads, and dims of one


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension as DeepSeek-V3 uses it (arXiv 2309.00071); any flag turns it on."""

    original_seq_len: int = setting(4096, "Row length that is not extended.", "tokens", at_least=1)
    factor: float = setting(40.0, "Factor by which the context grows.", above=0)
    beta_fast: int = setting(
        32, "Rotations above which a frequency stays as it is.", "rotations", at_least=1
    )
    beta_slow: int = setting(
        1, "Rotations below which a frequency is divided by the factor.", "rotations", at_least=1
    )
    mscale: float = setting(1.0, "Strength of the softmax temperature.", at_least=0)


@dataclass(frozen=True)
class SparseAttentionConfig:
    """DSA: queries of some A blocks attend to the keys that an indexer chooses (2512.02556)."""

    layers: str = setting(
        "", 'Sparse A blocks by their rank among A blocks: "1,2,3" or "all" (empty: none).'
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
    """A blocks: grouped-query attention or DeepSeek's multi-head latent attention."""

    kind: Literal["gqa", "mla"] = setting("gqa", "Grouped-query or multi-head latent attention.")
    num_heads: int = setting(8, "Query heads of attention.", "heads", at_least=1, at_most=MANY)
    num_kv_heads: int = setting(
        2, "Key and value heads of gqa; divides num_heads.", "heads", at_least=1, at_most=MANY
    )
    head_dim: int = setting(64, "Width of a head of gqa; even.", "dims", at_least=2, at_most=MANY)
    rope_theta: float = setting(500_000.0, "Base of the rotary frequencies.", above=0)
    qk_norm: bool = setting(False, "Normalise queries and keys of gqa.")
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


@dataclass(frozen=True)
class Mamba3Config:
    """M blocks: Mamba-3 (arXiv 2603.15569), SISO when mimo_rank is 1."""

    d_state: int = setting(64, "State size; a multiple of 4.", "dims", at_least=4, at_most=MANY)
    expand: int = setting(2, "Inner width over the model's width.", at_least=1, at_most=64)
    headdim: int = setting(
        64, "Width of a head; divides expand * dim.", "dims", at_least=1, at_most=WIDEST
    )
    ngroups: int = setting(
        1,
        "Groups of heads with B and C in common; divides the heads.",
        "groups",
        at_least=1,
        at_most=MANY,
    )
    mimo_rank: int = setting(1, "Rank of the MIMO update (1: SISO).", at_least=1, at_most=256)
    rope_fraction: float = setting(0.5, "Rotated part of the state: 0.5 or 1.", above=0, at_most=1)
    a_activation: Literal["heavy_tail", "softplus"] = setting(
        "heavy_tail", "Function that makes the decay A from its projection."
    )
    a_floor: float = setting(1e-4, "Smallest absolute value of A.", above=0)
    out_norm: bool = setting(False, "Normalise the output before its projection.")
    conv_kernel: int = setting(
        0,
        "Taps of a short convolution on x, B and C (0: none, as in the paper).",
        "taps",
        at_least=0,
        at_most=256,
    )
    chunk_size: int = setting(
        64, "Tokens of a chunk of the scan.", "tokens", at_least=1, at_most=1 << 20
    )
    dt_min: float = setting(1e-3, "Smallest step size at the start; at most dt_max.", above=0)
    dt_max: float = setting(0.1, "Largest step size at the start.", above=0)
    dt_init_floor: float = setting(1e-4, "Floor of step sizes at the start.", above=0)


@dataclass(frozen=True)
class M2RNNConfig:
    """R blocks: M2RNN (arXiv 2603.14360)."""

    num_heads: int = setting(
        0, "Heads (0: dim // (key_dim + value_dim), at least 1).", "heads", at_least=0, at_most=MANY
    )
    num_q_heads: int = setting(
        1, "Query heads; divides the heads.", "heads", at_least=1, at_most=MANY
    )
    num_k_heads: int = setting(
        1, "Key heads; divides the heads.", "heads", at_least=1, at_most=MANY
    )
    key_dim: int = setting(
        64, "Width of a key, the rows of a state.", "dims", at_least=1, at_most=MANY
    )
    value_dim: int = setting(
        16, "Width of a value, the columns of a state.", "dims", at_least=1, at_most=MANY
    )
    conv_kernel: int = setting(4, "Taps of the short convolution.", "taps", at_least=1, at_most=256)
    gradient_clip: float | None = setting(
        1.0, "Bound on each entry of the state's gradient (none: off).", above=0
    )
    clip_mode: Literal["total", "carried"] = setting(
        "carried", "Clip the carried gradient, or the total one as upstream's torch code does."
    )
    chunk_size: int = setting(
        64, "Tokens of a chunk of the recurrence.", "tokens", at_least=1, at_most=1 << 20
    )


@dataclass(frozen=True)
class MoEConfig:
    """E blocks: token-choice mixture of experts with optional shared experts."""

    num_experts: int = setting(8, "Routed experts of a layer.", "experts", at_least=1, at_most=MANY)
    top_k: int = setting(2, "Experts that a token visits.", "experts", at_least=1)
    hidden_dim: int = setting(
        256, "Hidden width of a routed expert.", "dims", at_least=1, at_most=WIDEST
    )
    activation: Literal["swiglu", "relu2"] = setting("swiglu", "Activation of routed experts.")
    num_shared: int = setting(
        1, "Shared experts, which every token visits.", "experts", at_least=0, at_most=1024
    )
    shared_hidden_dim: int = setting(
        256, "Hidden width of a shared expert, always SwiGLU.", "dims", at_least=1, at_most=WIDEST
    )
    shared_gate: bool = setting(False, "Put a sigmoid gate on the output of shared experts.")
    score: Literal["sigmoid", "softmax"] = setting("sigmoid", "Function of the router's logits.")
    softmax_order: Literal["pre", "post"] = setting(
        "post", "Softmax before or after the choice of top_k experts."
    )
    route_scale: float = setting(1.0, "Factor on the weights of chosen experts.", above=0)
    num_groups: int = setting(
        1, "Groups of experts, as the nodes that hold them.", "groups", at_least=1
    )
    top_k_groups: int = setting(1, "Groups that a token visits.", "groups", at_least=1)
    null_rho: float = setting(
        1.0,
        "Part of the chosen slots that real experts get (1: no null experts).",
        above=0,
        at_most=1,
    )
    load_warning: float = setting(
        4.0, "Busiest expert over its layer's mean from which a warning is printed.", at_least=1
    )
    bias_update_rate: float = setting(
        1e-3,
        "Rate of the bias that balances experts with sigmoid scores (0: no bias).",
        at_least=0,
    )
    capacity_factor: float | None = setting(
        None, "Tokens of an expert over the mean; the rest is dropped (none: dropless).", above=0
    )
    balance_loss: float = setting(
        0.0, "Weight of the Switch balance loss of a microbatch (0: off).", at_least=0
    )
    sequence_loss: float = setting(
        0.0, "Weight of the balance loss of each document (0: off).", at_least=0
    )
    z_loss: float = setting(0.0, "Weight of the router's z-loss (0: off).", at_least=0)


@dataclass(frozen=True)
class MLPConfig:
    """F blocks: a dense feed-forward."""

    hidden_dim: int = setting(1024, "Hidden width of F blocks.", "dims", at_least=1, at_most=WIDEST)
    activation: Literal["swiglu", "relu2"] = setting("swiglu", "Activation of F blocks.")


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: further tokens from the last hidden states (2412.19437)."""

    depths: int = setting(
        0, "Tokens predicted beyond the next (0: off).", "tokens", at_least=0, at_most=64
    )
    shared: bool = setting(True, "Use one block for all depths (FastMTP, 2509.18362).")
    loss: float = setting(0.3, "Weight of the mean over depths.", at_least=0)
    loss_final: float = setting(0.3, "Weight after `switch`.", at_least=0)
    switch: float = setting(
        1.0, "Part of run.steps after which loss_final takes over.", at_least=0, at_most=1
    )
    beta: float = setting(0.6, "Depth k weighs beta^k, normalised (1: all alike).", above=0)
    order: Literal["embedding_hidden", "hidden_embedding"] = setting(
        "embedding_hidden", "Order of the two halves that a depth projects."
    )
    hidden: Literal["pre_norm", "post_norm"] = setting(
        "pre_norm", "Hidden states of trunk and depths, before or after their norm."
    )
    hidden_dim: int = setting(
        0,
        "Hidden width of the block's feed-forward (0: 4 * dim, two thirds with SwiGLU).",
        "dims",
        at_least=0,
        at_most=WIDEST,
    )
    detach_trunk: bool = setting(False, "Send no gradient of this loss into the trunk.")
    detach_head: bool = setting(False, "Send no gradient of this loss into the head.")


@dataclass(frozen=True)
class TOPConfig:
    """Token order prediction: which tokens come sooner (2508.19228)."""

    loss: float = setting(0.0, "Weight of the token order loss (0: off).", at_least=0)
    window: int = setting(
        2048, "Tokens ahead that are ordered.", "tokens", at_least=1, at_most=WIDEST
    )


@dataclass(frozen=True)
class NgramConfig:
    """Hashed n-grams, looked up and added to the token embedding; zero at the start."""

    heads: int = setting(0, "Tables of each order (0: off).", "tables", at_least=0, at_most=64)
    max_order: int = setting(
        3, "Longest n-gram; orders are 2 to this one.", "tokens", at_least=2, at_most=16
    )
    table_size: int = setting(
        500_000,
        "Rows of a table: the next prime that no other table has.",
        "rows",
        at_least=2,
        at_most=1 << 31,
    )
    dim: int = setting(16, "Width of a row of a table.", "dims", at_least=1, at_most=MANY)
    lr_factor: float = setting(
        5.0, "Learning rate of the tables over that of the embedding.", at_least=0
    )


@dataclass(frozen=True)
class EngramConfig:
    """Engram: gated memories of hashed n-grams in front of some A blocks (2601.07372)."""

    layers: str = setting(
        "", 'A blocks with a memory, by rank among A blocks: "0,4" or "all" (empty: none).'
    )
    heads: int = setting(8, "Tables of each order.", "tables", at_least=1, at_most=64)
    max_order: int = setting(
        3, "Longest n-gram; orders are 2 to this one.", "tokens", at_least=2, at_most=16
    )
    table_size: int = setting(
        100_000,
        "Rows of a table: the next prime that no other table has.",
        "rows",
        at_least=2,
        at_most=1 << 31,
    )
    dim: int = setting(
        256, "Width of all tables of one order together.", "dims", at_least=1, at_most=WIDEST
    )
    conv_kernel: int = setting(
        4, "Taps of the convolution, max_order tokens apart.", "taps", at_least=1, at_most=256
    )
    seed: int = setting(0, "Seed of the hashes, which the weights depend on.", at_least=0)
    lr_factor: float = setting(
        5.0, "Learning rate of the tables over that of the embedding.", at_least=0
    )


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: several residual streams (mHC, 2512.24880)."""

    streams: int = setting(1, "Residual streams (1: off).", "streams", at_least=1, at_most=64)
    ordering: Literal["paper", "deepseek_v4", "megatron"] = setting(
        "paper", "Source whose order of operations is followed."
    )
    iterations: int = setting(
        20,
        "Sinkhorn iterations that make rows and columns sum to one.",
        "iterations",
        at_least=1,
        at_most=1000,
    )
    init: Literal["plain", "published"] = setting(
        "plain", "plain: step 0 computes the model without streams; published: as the source."
    )
    collapse: Literal["mean", "sum"] = setting(
        "mean", "How streams become one behind the last block."
    )


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid: `pattern` letters (A M E R F) tiled to `depth`; `|` marks pipeline cuts."""

    dim: int = setting(256, "Width of the model.", "dims", at_least=1, at_most=1 << 20)
    depth: int = setting(
        12, "Number of layers, one block each.", "layers", at_least=1, at_most=1024
    )
    pattern: str = setting(
        "AEMEAEMEAEMR", "Block letters A M E R F, tiled to the depth; | cuts pipeline stages."
    )
    vocab_size: int = setting(
        4096, "Rows of the embedding and of the head.", "ids", at_least=2, at_most=WIDEST
    )
    tie_embeddings: bool = setting(False, "Use one matrix for embedding and head.")
    norm_eps: float = setting(1e-5, "Epsilon of every RMS norm.", above=0)
    logit_softcap: float | None = setting(
        None, "Soft cap (tanh) on the head's logits (none: off).", above=0
    )
    z_loss: float = setting(0.0, "Weight of the head's z-loss (0: off).", at_least=0)
    init_std: float = setting(0.02, "Standard deviation of initial weights.", at_least=0)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mamba3: Mamba3Config = field(default_factory=Mamba3Config)
    m2rnn: M2RNNConfig = field(default_factory=M2RNNConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    top: TOPConfig = field(default_factory=TOPConfig)
    ngram: NgramConfig = field(default_factory=NgramConfig)
    engram: EngramConfig = field(default_factory=EngramConfig)
    mhc: HyperConnectionConfig = field(default_factory=HyperConnectionConfig)

    @property
    def needs_full_row(self) -> bool:
        """Something reads tokens of a row beside its own."""
        return bool(self.mtp.depths or self.top.loss or self.ngram.heads or self.engram.layers)
