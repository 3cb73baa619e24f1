"""What the model is, as frozen dataclasses: `config.model`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension as DeepSeek-V3 uses it (arXiv 2309.00071)."""

    original_seq_len: int = 4096
    factor: float = 40.0
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0


@dataclass(frozen=True)
class SparseAttentionConfig:
    """DSA: queries of some A blocks attend to the keys that an indexer chooses (2512.02556)."""

    # Which A blocks, by their rank among A blocks: "1,2,3" or "all" (empty: none).
    layers: str = ""
    top_k: int = 256  # keys of a query
    num_heads: int = 8  # of the indexer
    head_dim: int = 64
    # Of every so many sparse blocks the first chooses keys, the others take its choice.
    share: int = 1
    own: str = ""  # ranks that choose for themselves beside those (first of a pipeline stage, ...)
    # dense: all keys are attended to, and nothing but the indexers is trained, on their loss.
    stage: Literal["sparse", "dense"] = "sparse"
    loss: float = 1e-3  # of the divergence between what is attended to and what is chosen


@dataclass(frozen=True)
class AttentionConfig:
    """A blocks. `gqa`: grouped-query; `mla`: DeepSeek multi-head latent attention."""

    kind: Literal["gqa", "mla"] = "gqa"
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    qk_norm: bool = False
    softcap: float | None = None  # tanh soft cap on attention logits (None: off)
    q_lora_rank: int = 0  # MLA only; 0 projects queries directly
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    yarn: YarnConfig | None = None
    max_seq_len: int = 4096  # YaRN applies only beyond yarn.original_seq_len
    sparse: SparseAttentionConfig = field(default_factory=SparseAttentionConfig)


@dataclass(frozen=True)
class Mamba3Config:
    """M blocks: Mamba-3 (arXiv 2603.15569), SISO when mimo_rank is 1."""

    d_state: int = 64
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    mimo_rank: int = 1
    rope_fraction: float = 0.5
    a_activation: Literal["heavy_tail", "softplus"] = "heavy_tail"
    a_floor: float = 1e-4
    out_norm: bool = False
    conv_kernel: int = 0  # 0: none (author Mamba-3); 4: short conv + SiLU on x, B, C
    chunk_size: int = 64
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4


@dataclass(frozen=True)
class M2RNNConfig:
    """R blocks: M2RNN (arXiv 2603.14360). 0 heads: max(1, dim // (key_dim + value_dim))."""

    num_heads: int = 0
    num_q_heads: int = 1
    num_k_heads: int = 1
    key_dim: int = 64
    value_dim: int = 16
    conv_kernel: int = 4
    gradient_clip: float | None = 1.0  # bound on each entry of the state gradient (None: off)
    clip_mode: Literal["total", "carried"] = "carried"  # upstream torch clips the total
    chunk_size: int = 64


@dataclass(frozen=True)
class MoEConfig:
    """E blocks: token-choice mixture of experts with optional shared experts."""

    num_experts: int = 8
    top_k: int = 2
    hidden_dim: int = 256
    activation: Literal["swiglu", "relu2"] = "swiglu"  # routed experts
    num_shared: int = 1
    shared_hidden_dim: int = 256  # per shared expert; always SwiGLU
    shared_gate: bool = False  # sigmoid gate on the shared output
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    softmax_order: Literal["pre", "post"] = "post"  # softmax before or after the top-k choice
    route_scale: float = 1.0
    num_groups: int = 1  # of experts, as the nodes that hold them; a token visits top_k_groups
    top_k_groups: int = 1
    # Part of the chosen slots that go to real experts (1: all); the rest go to null experts, which
    # compute nothing. Then a token chooses top_k / null_rho slots, top_k real ones on average.
    null_rho: float = 1.0
    load_warning: float = 4.0  # busiest expert over the mean of its layer that is worth a warning
    bias_update_rate: float = 1e-3  # selection-only bias, sigmoid scores (0: no bias)
    capacity_factor: float | None = None  # None: dropless
    balance_loss: float = 0.0  # Switch loss over the microbatch
    sequence_loss: float = 0.0  # the same per document
    z_loss: float = 0.0


@dataclass(frozen=True)
class MLPConfig:
    """F blocks: a dense feed-forward."""

    hidden_dim: int = 1024
    activation: Literal["swiglu", "relu2"] = "swiglu"


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: further tokens from the last hidden states (2412.19437)."""

    depths: int = 0  # tokens beyond the next (0: off)
    shared: bool = True  # one block for all depths (FastMTP, 2509.18362), or one for each
    loss: float = 0.3  # of the weighted mean over depths
    loss_final: float = 0.3  # the same after `switch`
    switch: float = 1.0  # part of run.steps after which loss_final takes over
    beta: float = 0.6  # depth k weighs beta^k, normalised (1: all alike)
    order: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    hidden: Literal["pre_norm", "post_norm"] = "pre_norm"  # of trunk and depths, before their norm
    hidden_dim: int = 0  # of the block's feed-forward (0: 4 * dim, that of SwiGLU two thirds)
    detach_trunk: bool = False  # the trunk learns nothing from it
    detach_head: bool = False  # neither does the head


@dataclass(frozen=True)
class TOPConfig:
    """Token order prediction: which tokens come sooner (2508.19228)."""

    loss: float = 0.0  # 0: off
    window: int = 2048  # tokens ahead that count


@dataclass(frozen=True)
class NgramConfig:
    """Hashed n-grams, looked up and added to the token embedding; zero at the start."""

    heads: int = 0  # tables of each order (0: off)
    max_order: int = 3  # orders 2 to this one
    table_size: int = 500_000  # each table has the next prime number of rows that is unused
    dim: int = 16  # of a row
    lr_factor: float = 5.0  # of optim.embed_lr, for the tables


@dataclass(frozen=True)
class EngramConfig:
    """Engram: gated memories of hashed n-grams in front of some A blocks (2601.07372)."""

    layers: str = ""  # by rank among A blocks: "0,4" or "all" (empty: none)
    heads: int = 8  # tables of each order
    max_order: int = 3  # orders 2 to this one
    table_size: int = 100_000
    dim: int = 256  # of all heads of one order together
    conv_kernel: int = 4  # taps max_order tokens apart
    seed: int = 0  # of the hashes, which are part of what is learned
    lr_factor: float = 5.0  # of optim.embed_lr, for the tables


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: several residual streams (mHC, 2512.24880)."""

    streams: int = 1  # 1: off
    ordering: Literal["paper", "deepseek_v4", "megatron"] = "paper"
    iterations: int = 20  # of Sinkhorn
    # plain: the model at step 0 is the one without; published: as in the ordering's source.
    init: Literal["plain", "published"] = "plain"
    collapse: Literal["mean", "sum"] = "mean"  # of the streams behind the last block


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid: `pattern` letters (A M E R F) tiled to `depth`; `|` marks pipeline cuts."""

    dim: int = 256
    depth: int = 12
    pattern: str = "AEMEAEMEAEMR"
    vocab_size: int = 4096
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    logit_softcap: float | None = None
    z_loss: float = 0.0
    init_std: float = 0.02
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
    def looks_around(self) -> bool:
        """Something reads tokens of a row beside its own."""
        return bool(self.mtp.depths or self.top.loss or self.ngram.heads or self.engram.layers)
