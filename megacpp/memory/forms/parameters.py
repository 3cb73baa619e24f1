"""Parameters, gradients and optimizer state that one rank stores, in closed form; no torch import.

They are sums over the weights of its layers (weights.py); tests/memory/test_parameters.py compares
them with a dry run, byte for byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megacpp.blocks.features import FEATURES, entrance, exit_parts
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.optimizer import adamw_layers, layer_of
from megacpp.config.schema import Config, MeshConfig, ModelConfig, OptimConfig
from megacpp.memory.forms.weights import COPY, LEFT_ALONE, Weight, weights
from megacpp.model.pattern import layer_kinds
from megacpp.model.sizes import copied_parameters
from megacpp.model.stages import stage_parts

Class = Literal["dense", "replicated", "experts"]
Mover = Literal["muon", "adamw", "none"]


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank on the axes that cut parameters.

    Attributes:
        tp, tp_rank: degree of the axis tp, and the rank's coordinate on it.
        ep: degree of the axis ep.
        shards, shard: number of FSDP2 shards of dense parameters, and this rank's.
        expert_shards, expert_shard: the same for routed experts.
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
        """Number of ranks that together hold one copy of every matrix."""
        return self.expert_shards * self.ep if self.apart else self.shards

    @staticmethod
    def on_rank(config: Config, size: int, rank: int) -> Place:
        """Return the place of `rank`; the axes are those of parallel/mesh.py."""
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
        own: of its shard.
        padded: of its shard as FSDP2 stores it, equal on all ranks.
        whole: gathered for a product: cut over `tp` and `ep` alone.
        across: the cut is inside of experts, not between them.
    """

    own: int
    padded: int
    whole: int
    across: bool = False


@lru_cache(maxsize=1 << 14)
def held(weight: Weight, place: Place) -> Held:
    """Return a rank's elements of a parameter; cuts are `torch.chunk`'s, `tp` and `ep` first."""
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
    """Return the class of a dry run: routed `experts`; `replicated` over `tp`; else `dense`."""
    if weight.experts:
        return "experts"
    return "replicated" if place.tp > 1 and weight.tp is None else "dense"


def mover(weight: Weight, optim: OptimConfig) -> Mover:
    """Return the optimizer of a weight; `none` for one that is updated through its latent."""
    if weight.folded:
        return "none"
    named = layer_of(weight.name) in adamw_layers(optim.adamw_layers)
    return "muon" if weight.muon and optim.name == "muon_adamw" and not named else "adamw"


def kinds_of(config: Config, size: int, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each stage of a rank in order: `embed`, kinds of layers, `norm`, ..."""
    mesh = config.mesh
    stage = rank // (size // mesh.pp)
    compresses = config.recompute.compress > 0
    return _kinds(config.model, compresses, mesh.pp, mesh.pp_schedule, stage)


@lru_cache(maxsize=1024)
def _kinds(
    model: ModelConfig, compresses: bool, pp: int, schedule: str, stage: int
) -> tuple[tuple[str, ...], ...]:
    kinds = list(layer_kinds(model))
    kinds[-1] += LEFT_ALONE * compresses
    if pp == 1:
        return ((*entrance(model), *kinds, *exit_parts(model)),)
    found = []
    own = stage_parts(model, MeshConfig(pp=pp, pp_schedule=schedule), stage)  # type: ignore[arg-type]
    copies = copied_parameters(model) > 0 and not any(part.first for part in own)
    for part in own:
        parts = [*entrance(model)] if part.first else []
        parts += [kinds[i] for i in part.layers]
        ends = exit_parts(model) if part.last else ()
        parts += [x for end in ends for x in ((COPY, end) if copies and end == "mtp" else (end,))]
        found.append(tuple(parts))
    return tuple(found)


def parameters_of(config: Config, size: int, rank: int) -> Counter[str]:
    """Return how many parts of each kind a rank has; a tied head has no own parameters."""
    found = Counter(kind for stage in kinds_of(config, size, rank) for kind in stage)
    if config.model.tie_embeddings and found["embed"]:
        del found["head"]
    return found


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank stores between steps, and of gradients at the end of a backward.

    Attributes:
        parameters, gradients: by class.
        state: by algorithm and class.
        by_mover: parameters by algorithm, as (algorithm, class).
        buffers: of routers and of multi-token prediction.
    """

    parameters: dict[str, int]
    gradients: dict[str, int]
    state: dict[str, dict[str, int]]
    by_mover: dict[tuple[str, str], int]
    buffers: int


def rank_bytes(config: Config, size: int, rank: int) -> RankBytes:
    """Return the bytes of a rank by class, equal to those of `megacpp dry-run`."""
    found = [
        (w, layers)
        for kind, layers in parameters_of(config, size, rank).items()
        for w in weights(config.model, kind, config.recompute.compress)
    ]
    place, storage = Place.on_rank(config, size, rank), Storage.in_run(config)
    counts = parameters_of(config, size, rank)
    buffers = buffer_bytes(config.model, counts, storage.store)
    return sums_of(found, place, storage, config.optim, buffers)


def sums_of(
    found: Iterable[tuple[Weight, int]],
    place: Place,
    storage: Storage,
    optim: OptimConfig,
    buffers: int,
) -> RankBytes:
    """Return the bytes by class of weights.

    Args:
        found: weights, each with the number of layers that have it.
        place: rank's coordinates on the axes that cut parameters.
        storage: bytes of stored elements.
        optim: optimizer settings.
        buffers: bytes of buffers, handed through.
    """
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
    """Bytes of a stored element.

    Attributes:
        store: of master parameters, gradients and AdamW's moments.
        momentum: of Muon's momentum.
    """

    store: int
    momentum: int

    @staticmethod
    def in_run(config: Config) -> Storage:
        """Return the bytes of stored elements of a configuration."""
        wide, width = config.precision.dtype == "fp64", config.optim.muon_momentum_dtype
        if wide and width == "auto":
            return Storage(8, 8)
        return Storage(8 if wide else 4, 4 if width == "fp32" else 2)


def state_bytes(storage: Storage, optim: OptimConfig, by: Mover, numel: int) -> int:
    """Return bytes of optimizer state on the device, for one parameter.

    Args:
        storage: bytes of stored elements.
        optim: optimizer settings.
        by: optimizer of the parameter.
        numel: elements of it on this rank.
    """
    if by == "none":
        return 0
    if by == "muon":
        return numel * storage.momentum
    step, kind = 4, optim.adamw_state
    if kind == "cpu_offload":
        return step  # the moments wait in the memory of the host
    if not packs(kind, numel):
        return step + 2 * numel * storage.store
    block = PACKED_BLOCKS[kind]
    codes, table = (numel, 256) if kind == "8bit" else (numel // 2, 16)
    return step + 2 * (codes + 4 * (numel // block) + 4 * table)


PACKED_MIN = 4096  # entries of moments in 8 or 4 bits at least (optim/low_bit.py)
PACKED_BLOCKS = {"8bit": 256, "4bit": 128}


def packs(kind: str, numel: int) -> bool:
    """Return whether the moments of `numel` entries are stored in 8 or 4 bits."""
    return kind in PACKED_BLOCKS and numel >= PACKED_MIN and numel % PACKED_BLOCKS[kind] == 0


def buffer_bytes(model: ModelConfig, counts: Mapping[str, int], store: int = 4) -> int:
    """Return bytes of buffers of routers, losses and multi-token prediction.

    Args:
        model: the model.
        counts: number of parts of each kind.
        store: bytes of an element.
    """
    found = 0
    for kind, layers in counts.items():
        owner = KINDS.get(kind[0]) or FEATURES.get(kind)
        numbers, integers = owner.buffer_numbers(model, kind) if owner else (0, 0)
        found += layers * (numbers * store + integers * 8)
    return found


def _part(length: int, parts: int, index: int) -> int:
    each = -(-length // parts)
    return max(0, min(each, length - index * each))
