"""Every parameter of every kind of block with its dims, its cut, its optimizer; no torch import.

The tables of parallel/plans.py and optim/groups.py, read once for shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megacpp.blocks.engram.sizes import engram_shapes
from megacpp.config.schema import ModelConfig
from megacpp.memory.forms.compress import projected_width
from megacpp.memory.forms.mtp import mtp_weights
from megacpp.model.sizes import m2rnn_heads, ngram_rows, ngram_width

Shape = tuple[int, ...]
COPY = "copy"  # of the embedding, in a last stage that looks tokens up


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a model.

    Attributes:
        name: below the mixer of a block, or of the whole name.
        tp: the dim that is cut over `tp`; None: whole on each of its ranks.
        muon: hidden matrices are moved by Muon, if it is used.
        wide: of the fp32 contract, so of the root unit.
        heights: rows of the matrices that it holds; empty: one matrix, or one for each expert.
        latent: moves in place of another weight (`recompute.compress`); `folded`: that other one.
    """

    name: str
    shape: Shape
    tp: int | None = None
    muon: bool = False
    wide: bool = False
    experts: bool = False
    heights: tuple[int, ...] = ()
    latent: bool = False
    folded: bool = False


@lru_cache(maxsize=256)
def weights(model: ModelConfig, kind: str, compress: float = 0.0) -> tuple[Weight, ...]:
    """Parameters of one layer of a kind, or of `embed`, `norm` or `head`."""
    if kind in ("embed", "head", COPY):
        return (Weight(f"{kind}.weight", (model.vocab_size, model.dim), 0),)
    if kind == "top":
        return (Weight("top.unembed.weight", (model.vocab_size, model.dim), 0),)
    if kind == "ngram":
        width = ngram_width(model.ngram)
        return (
            Weight("ngram.tables.weight", (ngram_rows(model.ngram), model.ngram.dim), 0),
            Weight("ngram.proj.weight", (model.dim, width), muon=True),
        )
    norm = Weight("norm.weight", (model.dim,), wide=True)
    if kind in ("spread", "collapse"):
        return ()
    if kind == "norm":
        return (norm,)
    if kind == "mtp":
        return tuple(mtp_weights(model, weights))
    mixer = {"A": _attention, "M": _mamba3, "E": _moe, "R": _m2rnn, "F": _mlp}[kind[0]](model)
    memory = engram_shapes(model) if "+engram" in kind else ()
    found = [norm, *(Weight(*shape) for shape in memory)]
    for w in mixer:
        if compress and w.name in READERS.get(kind[0], ()):
            width = projected_width(model.dim, compress)
            found += [
                Weight(w.name, w.shape, w.tp, folded=True),
                Weight(f"{w.name}.latent", (w.shape[0], width), w.tp, latent=True),
            ]
        else:
            found.append(w)
    return (*found, *(_indexer(model) if "A.index" in kind else ()), *_connection(model))


def _connection(model: ModelConfig) -> Iterator[Weight]:
    """Of hyper-connections, in every layer."""
    n = model.mhc.streams
    if n > 1:
        coefficients = n * n + 2 * n
        yield Weight("connection.phi", (coefficients, n * model.dim), wide=True)
        yield Weight("connection.scale", (3,), wide=True)
        yield Weight("connection.bias", (coefficients,), wide=True)


# Layers that keep a projection of their input where `recompute.compress` is set.
READERS = {"A": ("wq", "wq_a", "wk", "wv", "wkv_a"), "F": ("w1", "w3")}


def _wide(*named: tuple[str, Shape, int | None]) -> Iterator[Weight]:
    for name, shape, tp in named:
        yield Weight(name, shape, tp, wide=True)


def _muon(*named: tuple[str, Shape, int | None]) -> Iterator[Weight]:
    for name, shape, tp in named:
        yield Weight(name, shape, tp, muon=True)


def _attention(model: ModelConfig) -> Iterator[Weight]:
    a, d = model.attention, model.dim
    if a.kind == "gqa":
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        yield from _muon(("wq", (q, d), 0), ("wk", (k, d), 0), ("wv", (k, d), 0))
        yield from _muon(("wo", (d, q), 1))
        if a.qk_norm:
            yield from _wide(("q_norm", (a.head_dim,), None), ("k_norm", (a.head_dim,), None))
        return
    n, latent, rope = a.num_heads, a.kv_lora_rank, a.qk_rope_head_dim
    q = n * (a.qk_nope_head_dim + rope)
    if a.q_lora_rank:
        yield from _muon(("wq_a", (a.q_lora_rank, d), None), ("wq_b", (q, a.q_lora_rank), 0))
        yield from _wide(("q_norm", (a.q_lora_rank,), None))
    else:
        yield from _muon(("wq", (q, d), 0))
    yield Weight("wkv_a", (latent + rope, d), muon=True, heights=(latent, rope))
    yield from _wide(("kv_norm", (latent,), None))
    heights = (a.qk_nope_head_dim, a.v_head_dim) * n
    yield Weight("wkv_b", (sum(heights), latent), 0, muon=True, heights=heights)
    yield from _muon(("wo", (d, n * a.v_head_dim), 1))


def _indexer(model: ModelConfig) -> Iterator[Weight]:
    """Of a sparse layer that chooses: whole on each rank of `tp`, and AdamW's."""
    sparse, d = model.attention.sparse, model.dim
    into = (model.attention.q_lora_rank or d) if model.attention.kind == "mla" else d
    yield Weight("indexer.wq_b", (sparse.num_heads * sparse.head_dim, into))
    yield Weight("indexer.wk", (sparse.head_dim, d))
    norm = (sparse.head_dim,), None
    yield from _wide(("indexer.k_norm.weight", *norm), ("indexer.k_norm.bias", *norm))
    yield from _wide(("indexer.weights_proj", (sparse.num_heads, d), None))


def _mamba3(model: ModelConfig) -> Iterator[Weight]:
    m, d = model.mamba3, model.dim
    inner, bc = m.expand * d, m.mimo_rank * m.ngroups * m.d_state
    heads, rank, taps = inner // m.headdim, m.mimo_rank, m.conv_kernel
    angles = int(m.d_state * m.rope_fraction) // 2
    yield from _muon(("in_z", (inner, d), 0), ("in_x", (inner, d), 0))
    yield from _muon(("in_B", (bc, d), None), ("in_C", (bc, d), None))
    for name in ("in_dt", "in_A", "in_trap"):
        yield Weight(name, (heads, d), 0)
    yield Weight("in_angles", (angles, d))
    if taps:
        yield Weight("conv_x", (inner, 1, taps), 0)
        yield Weight("conv_B", (bc, 1, taps))
        yield Weight("conv_C", (bc, 1, taps))
    yield from _wide(("dt_bias", (heads,), 0), ("D", (heads,), 0))
    yield from _wide(*((f"{x}_bias", (heads, rank, m.d_state), 0) for x in "BC"))
    yield from _wide(("B_norm", (m.d_state,), None), ("C_norm", (m.d_state,), None))
    if rank > 1:
        yield from _wide(*((f"mimo_{x}", (heads, rank, m.headdim), 0) for x in "xzo"))
    if m.out_norm:
        yield from _wide(("norm", (inner,), 0))
    yield from _muon(("out_proj", (d, inner), 1))


def _moe(model: ModelConfig) -> Iterator[Weight]:
    e, d = model.moe, model.dim
    into, out = (e.num_experts, e.hidden_dim, d), (e.num_experts, d, e.hidden_dim)
    yield from _wide(("router", (e.num_experts, d), None))
    yield Weight("w1", into, muon=True, experts=True)
    if e.activation == "swiglu":
        yield Weight("w3", into, muon=True, experts=True)
    yield Weight("w2", out, muon=True, experts=True)
    if e.num_shared:
        hidden = e.num_shared * e.shared_hidden_dim
        yield from _muon(("shared.w1", (hidden, d), 0), ("shared.w3", (hidden, d), 0))
        yield from _muon(("shared.w2", (d, hidden), 1))
        if e.shared_gate:
            yield Weight("shared.gate", (1, d))


def _m2rnn(model: ModelConfig) -> Iterator[Weight]:
    r, d, heads = model.m2rnn, model.dim, m2rnn_heads(model)
    width, taps = heads * r.value_dim, r.conv_kernel
    cuts: dict[str, int | None] = {"v": 0}
    rows = {"v": width}
    for name, number in (("q", r.num_q_heads), ("k", r.num_k_heads)):
        cuts[name], rows[name] = (0 if number > 1 else None), number * r.key_dim
        by_head = (r.key_dim,) * number
        yield Weight(f"in_{name}", (rows[name], d), cuts[name], muon=True, heights=by_head)
    yield Weight("in_v", (width, d), 0, muon=True, heights=(r.value_dim,) * heads)
    yield Weight("in_forget", (heads, d), 0)
    yield from _muon(("in_gate", (width, d), 0))
    for name, cut in cuts.items():
        yield Weight(f"conv_{name}", (rows[name], 1, taps), cut)
    yield from _wide(("A_log", (heads,), 0), ("decay.dt_bias", (heads,), 0))
    yield from _wide(("state_weight", (heads, r.value_dim, r.value_dim), 0))
    yield from _wide(("D", (heads, r.value_dim), 0), ("g_norm", (width,), 0))
    yield from _muon(("output_projection", (d, width), 1))


def _mlp(model: ModelConfig) -> Iterator[Weight]:
    f, d = model.mlp, model.dim
    into = ("w1", "w3") if f.activation == "swiglu" else ("w1",)
    yield from _muon(*((name, (f.hidden_dim, d), 0) for name in into))
    yield from _muon(("w2", (d, f.hidden_dim), 1))
