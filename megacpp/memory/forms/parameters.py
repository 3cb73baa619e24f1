"""Parameters, gradients and optimizer state that one rank stores, in closed form; no torch import.

Every parameter of every kind of block with its dims, its cut over `tp` and `ep`, its optimizer and
whether it is of the fp32 contract: the tables of parallel/plans.py and optim/groups.py, read once
for shapes. tests/memory/test_parameters.py holds the sums against a dry run, byte for byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megacpp.config import Config, MeshConfig, ModelConfig, OptimConfig
from megacpp.memory.forms.compress import projected_width
from megacpp.model.pattern import entrance, exit_parts, layer_kinds
from megacpp.model.sizes import m2rnn_heads
from megacpp.model.stages import stage_parts

Shape = tuple[int, ...]
Class = Literal["dense", "replicated", "experts"]
Mover = Literal["muon", "adamw", "none"]


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is on the axes that cut parameters.

    Attributes:
        shards, shard: over which FSDP2 cuts dense parameters, and which of them this rank is.
        expert_shards, expert_shard: the same of routed experts.
        apart: routed experts are a unit of their own.
        sharded: FSDP2 is used at all.
    """

    tp: int
    tp_rank: int
    ep: int
    shards: int
    shard: int
    expert_shards: int
    expert_shard: int
    apart: bool
    sharded: bool

    @property
    def holders(self) -> int:
        """Ranks that together hold one copy of every matrix."""
        return self.expert_shards * self.ep if self.apart else self.shards

    @staticmethod
    def of(config: Config, size: int, rank: int) -> Place:
        """Of `rank`; the axes are those of parallel/mesh.py."""
        m = config.mesh
        folded = m.dp_shard * m.cp * m.tp
        replica = rank // folded % m.dp_replicate
        shards, shard = m.dp_shard * m.cp, rank // m.tp % (m.dp_shard * m.cp)
        expert_shards, expert_shard = folded // m.ep, rank % folded // m.ep
        if shards == 1:
            shards, shard = m.dp_replicate, replica
        if expert_shards == 1:
            expert_shards, expert_shard = m.dp_replicate, replica
        apart = m.ep > 1 or m.tp > 1
        if not apart:
            expert_shards, expert_shard = shards, shard
        return Place(
            m.tp, rank % m.tp, m.ep, shards, shard, expert_shards, expert_shard, apart, size > 1
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter on one rank.

    Attributes:
        own: of its shard; `padded`: as FSDP2 stores it, all shards alike.
        whole: of what is gathered for a product: cut over `tp` and `ep` alone.
        across: the cut is inside of experts, not between them.
    """

    own: int
    padded: int
    whole: int
    across: bool = False


@lru_cache(maxsize=256)
def weights(model: ModelConfig, kind: str, compress: float = 0.0) -> tuple[Weight, ...]:
    """Parameters of one layer of a kind, or of `embed`, `norm` or `head`."""
    if kind in ("embed", "head"):
        return (Weight(f"{kind}.weight", (model.vocab_size, model.dim), 0),)
    norm = Weight("norm.weight", (model.dim,), wide=True)
    if kind == "norm":
        return (norm,)
    mixer = {"A": _attention, "M": _mamba3, "E": _moe, "R": _m2rnn, "F": _mlp}[kind[0]](model)
    found = [norm]
    for w in mixer:
        if compress and w.name in READERS.get(kind[0], ()):
            width = projected_width(model.dim, compress)
            found += [
                Weight(w.name, w.shape, w.tp, folded=True),
                Weight(f"{w.name}.latent", (w.shape[0], width), w.tp, latent=True),
            ]
        else:
            found.append(w)
    return tuple(found)


# Layers that keep a projection of their input where `recompute.compress` is set.
READERS = {"A": ("wq", "wq_a", "wk", "wv", "wkv_a"), "F": ("w1", "w3")}


def held(weight: Weight, place: Place) -> Held:
    """What a rank has of a parameter: cuts are those of `torch.chunk`, `tp` and `ep` first."""
    shape = list(weight.shape)
    if weight.experts:
        shape[0] //= place.ep
        whole = math.prod(shape)
        if not place.sharded:
            return Held(whole, whole, whole)
        shards, shard = place.expert_shards, place.expert_shard
        dim = 1 if place.apart and shape[0] < shards and shape[1] % shards == 0 else 0
    else:
        if weight.tp is not None and place.tp > 1:
            shape[weight.tp] = _part(shape[weight.tp], place.tp, place.tp_rank)
        whole = math.prod(shape)
        if not place.sharded:
            return Held(whole, whole, whole)
        shards, shard, dim = place.shards, place.shard, 0
    row = whole // shape[dim] if shape[dim] else 0
    most = -(-shape[dim] // shards)
    return Held(_part(shape[dim], shards, shard) * row, most * row, whole, dim > 0)


def shard_class(weight: Weight, place: Place) -> Class:
    """As a dry run says: routed `experts`; `replicated` over `tp`; `dense`, all others."""
    if weight.experts:
        return "experts"
    return "replicated" if place.tp > 1 and weight.tp is None else "dense"


def mover(weight: Weight, optim: OptimConfig) -> Mover:
    """Who moves a weight: `none` for one that moves through its latent."""
    if weight.folded:
        return "none"
    return "muon" if weight.muon and optim.name == "muon_adamw" else "adamw"


def kinds_of(config: Config, size: int, rank: int) -> tuple[tuple[str, ...], ...]:
    """Of each stage of a rank, its parts in order: `embed`, kinds of layers, `norm`, `head`, ..."""
    mesh = config.mesh
    stage = rank // (size // mesh.pp)
    return _kinds(config.model, mesh.pp, mesh.pp_schedule, stage)


@lru_cache(maxsize=1024)
def _kinds(model: ModelConfig, pp: int, schedule: str, stage: int) -> tuple[tuple[str, ...], ...]:
    kinds = layer_kinds(model)
    if pp == 1:
        return ((*entrance(model), *kinds, *exit_parts(model)),)
    found = []
    for part in stage_parts(model, MeshConfig(pp=pp, pp_schedule=schedule), stage):  # type: ignore[arg-type]
        parts = [*entrance(model)] if part.first else []
        parts += [kinds[i] for i in part.layers]
        parts += exit_parts(model) if part.last else []
        found.append(tuple(parts))
    return tuple(found)


def parameters_of(config: Config, size: int, rank: int) -> Counter[str]:
    """Parts of a rank with parameters of their own, and how many; a tied head has none."""
    found = Counter(kind for stage in kinds_of(config, size, rank) for kind in stage)
    if config.model.tie_embeddings and found["embed"]:
        del found["head"]
    return found


@dataclass(frozen=True)
class RankBytes:
    """What a rank stores from one step to the next, and at the end of a backward.

    Attributes:
        parameters, gradients: by class.
        state: by algorithm and class.
        by_mover: parameters by algorithm, as (algorithm, class).
        buffers: of routers.
    """

    parameters: dict[str, int]
    gradients: dict[str, int]
    state: dict[str, dict[str, int]]
    by_mover: dict[tuple[str, str], int]
    buffers: int


def rank_bytes(config: Config, size: int, rank: int) -> RankBytes:
    """Bytes of a rank by class: those of `megacpp dry-run`."""
    found = [
        (w, layers)
        for kind, layers in parameters_of(config, size, rank).items()
        for w in weights(config.model, kind, config.recompute.compress)
    ]
    place, storage = Place.of(config, size, rank), Storage.of(config)
    routers = parameters_of(config, size, rank)["E"]
    buffers = routers * router_buffers(config.model, storage.store)
    return sums_of(found, place, storage, config.optim, buffers)


def sums_of(
    found: Iterable[tuple[Weight, int]],
    place: Place,
    storage: Storage,
    optim: OptimConfig,
    buffers: int,
) -> RankBytes:
    """Bytes by class of weights, each with the number of layers that have it."""
    parameters: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    by_mover: Counter[tuple[str, str]] = Counter()
    state: dict[str, Counter[str]] = {}
    for w, layers in found:
        own, group, by = held(w, place).own, shard_class(w, place), mover(w, optim)
        parameters[group] += layers * own * storage.store
        by_mover[by, group] += layers * own * storage.store
        if by == "none":
            continue
        gradients[group] += layers * own * storage.store
        of_class = state.setdefault(by, Counter())
        of_class[group] += layers * state_bytes(storage, optim, by, own)
    states = {by: dict(of_class) for by, of_class in state.items()}
    return RankBytes(dict(parameters), dict(gradients), states, dict(by_mover), buffers)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of a number in master parameters, gradients and AdamW's moments; of Muon's momentum."""

    store: int
    momentum: int

    @staticmethod
    def of(config: Config) -> Storage:
        wide, width = config.precision.dtype == "fp64", config.optim.muon_momentum_dtype
        if wide and width == "auto":
            return Storage(8, 8)
        return Storage(8 if wide else 4, 4 if width == "fp32" else 2)


def state_bytes(storage: Storage, optim: OptimConfig, by: Mover, numel: int) -> int:
    """Optimizer state of a parameter of which a rank has `numel` elements."""
    if by == "none":
        return 0
    if by == "muon":
        return numel * storage.momentum
    step, kind = 4, optim.adamw_state
    if kind == "cpu_offload":
        return step  # the moments wait in the memory of the host
    block = {"8bit": 256, "4bit": 128}.get(kind, 0)
    if not block or numel < PACKED_MIN or numel % block:
        return step + 2 * numel * storage.store
    codes, table = (numel, 256) if kind == "8bit" else (numel // 2, 16)
    return step + 2 * (codes + 4 * (numel // block) + 4 * table)


PACKED_MIN = 4096  # entries of moments in 8 or 4 bits at least (optim/low_bit.py)


def router_buffers(model: ModelConfig, store: int = 4) -> int:
    """Bias and counts of experts, the scale of losses, and their sums for the record."""
    return model.moe.num_experts * (store + 8) + (1 + 6 + 2) * store


def _part(length: int, parts: int, index: int) -> int:
    each = -(-length // parts)
    return max(0, min(each, length - index * each))


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
