"""Parameters of each kind of block, counted from the configuration; no torch import here.

What needs a model's weight before torch is loaded (pipeline cuts, rules) asks here; the meta model
of megacpp/model/count.py is the other way to know, and tests/model/test_stages.py holds the two
together.
"""

from __future__ import annotations

from megacpp.blocks.engram.sizes import engram_parameters
from megacpp.blocks.mtp.plan import block_model, num_blocks
from megacpp.config.schema import ModelConfig, NgramConfig
from megacpp.model.pattern import layer_kinds
from megacpp.model.primes import primes_from

NGRAM_ROWS = 256  # rows of the stacked n-gram tables are a multiple of so many


def layer_parameters(config: ModelConfig) -> list[int]:
    """Parameters of every layer, its norm and hyper-connection included."""
    kinds = {"A": _attention, "M": _mamba3, "E": _moe, "R": _m2rnn, "F": _mlp}
    layers = layer_kinds(config)
    beside = config.dim + _connection(config)
    by_kind = {
        kind: beside
        + kinds[kind[0]](config)
        + ("A.index" in kind and indexer(config))
        + ("+engram" in kind and engram_parameters(config))
        for kind in sorted(set(layers))
    }
    return [by_kind[kind] for kind in layers]


def embedding_parameters(config: ModelConfig) -> int:
    """Parameters in front of the first layer."""
    ngram = config.ngram
    hashed = ngram_rows(ngram) * ngram.dim + ngram_width(ngram) * config.dim if ngram.heads else 0
    return config.vocab_size * config.dim + hashed


def head_parameters(config: ModelConfig) -> int:
    """Parameters behind the last layer: its norm, blocks of multi-token prediction, and the heads,
    of which one may share the embedding's."""
    unembeddings = 2 if config.top.loss else 1
    return config.dim + mtp_parameters(config) + unembeddings * config.vocab_size * config.dim


def copied_parameters(config: ModelConfig) -> int:
    """Parameters that a last stage of several has beside its own: what it looks tokens up in."""
    copied = config.mtp.depths > 0 and not config.tie_embeddings
    return config.vocab_size * config.dim * copied


def mtp_parameters(config: ModelConfig) -> int:
    """Parameters of multi-token prediction: norms and projection of two halves, A and F blocks."""
    if not config.mtp.depths:
        return 0
    plain, d = block_model(config), config.dim
    own = 3 * d + 2 * d * d
    return num_blocks(config.mtp) * (own + (d + _attention(plain)) + (d + _mlp(plain)))


def ngram_primes(ngram: NgramConfig) -> tuple[int, ...]:
    """Rows of each n-gram table: all of order 2, then all of order 3, ..."""
    return primes_from(ngram.table_size, ngram.heads * (ngram.max_order - 1))


def ngram_rows(ngram: NgramConfig) -> int:
    """Of all n-gram tables together, and a few more: any usual number of ranks shares them."""
    return -(-sum(ngram_primes(ngram)) // NGRAM_ROWS) * NGRAM_ROWS


def ngram_width(ngram: NgramConfig) -> int:
    """Numbers that all n-gram tables have for a token."""
    return ngram.heads * (ngram.max_order - 1) * ngram.dim


def m2rnn_heads(config: ModelConfig) -> int:
    """Heads of an R block."""
    r = config.m2rnn
    return r.num_heads or max(1, config.dim // (r.key_dim + r.value_dim))


def _connection(config: ModelConfig) -> int:
    """Of hyper-connections, around every layer."""
    n = config.mhc.streams
    return (n * n + 2 * n) * (n * config.dim + 1) + 3 if n > 1 else 0


def _attention(config: ModelConfig) -> int:
    a, d = config.attention, config.dim
    if a.kind == "gqa":
        norms = 2 * a.head_dim if a.qk_norm else 0
        return 2 * d * a.head_dim * (a.num_heads + a.num_kv_heads) + norms
    qk, n = a.qk_nope_head_dim + a.qk_rope_head_dim, a.num_heads
    q = a.q_lora_rank * (d + 1 + n * qk) if a.q_lora_rank else d * n * qk
    kv = d * (a.kv_lora_rank + a.qk_rope_head_dim) + a.kv_lora_rank
    expand = a.kv_lora_rank * n * (a.qk_nope_head_dim + a.v_head_dim)
    return q + kv + expand + n * a.v_head_dim * d


def indexer(config: ModelConfig) -> int:
    """Queries of all heads, one key with its norm, and a weight of each head."""
    a, sparse, d = config.attention, config.attention.sparse, config.dim
    into = (a.q_lora_rank or d) if a.kind == "mla" else d
    return sparse.head_dim * (into * sparse.num_heads + d + 2) + sparse.num_heads * d


def _mamba3(config: ModelConfig) -> int:
    m, d = config.mamba3, config.dim
    inner = m.expand * d
    heads, rank = inner // m.headdim, m.mimo_rank
    angles = int(m.d_state * m.rope_fraction) // 2
    groups = 2 * m.ngroups * m.d_state * rank
    projections = d * (2 * inner + groups + 3 * heads + angles) + inner * d
    per_head = 2 + 2 * rank * m.d_state + (3 * rank * m.headdim if rank > 1 else 0)
    norms = 2 * m.d_state + (inner if m.out_norm else 0)
    return projections + (inner + groups) * m.conv_kernel + heads * per_head + norms


def _moe(config: ModelConfig) -> int:
    e, d = config.moe, config.dim
    routed = e.num_experts * (3 if e.activation == "swiglu" else 2) * d * e.hidden_dim
    shared = 3 * d * e.shared_hidden_dim * e.num_shared + d * (e.shared_gate and e.num_shared > 0)
    return d * e.num_experts + routed + shared


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of experts that a token doesn't visit, of all layers."""
    e, layers = config.moe, sum(kind[0] == "E" for kind in layer_kinds(config))
    each = (3 if e.activation == "swiglu" else 2) * config.dim * e.hidden_dim
    return layers * (e.num_experts - e.top_k) * each


def _m2rnn(config: ModelConfig) -> int:
    r, d = config.m2rnn, config.dim
    heads = m2rnn_heads(config)
    qk, v = (r.num_q_heads + r.num_k_heads) * r.key_dim, heads * r.value_dim
    projections = d * (qk + 2 * v + heads) + v * d
    return projections + (qk + v) * r.conv_kernel + heads * (2 + r.value_dim**2) + 2 * v


def _mlp(config: ModelConfig) -> int:
    f = config.mlp
    return (3 if f.activation == "swiglu" else 2) * config.dim * f.hidden_dim
