"""FSDP2 units of each part of a model, in elements of one rank; no torch import here.

A block is a unit; its routed experts are another one if their ranks differ. The parameters of all
parts that stay in fp32 are together the root's (parallel/fsdp.py). A gathered unit exists twice for
a while: flat, as it arrived, and as parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from types import MappingProxyType

from megacpp.config.schema import Config, ModelConfig, OptimConfig
from megacpp.memory.forms.muon import MIB
from megacpp.memory.forms.optimizer_step import optimizer_bytes
from megacpp.memory.forms.parameters import (
    Place,
    RankBytes,
    Storage,
    buffer_bytes,
    held,
    parameters_of,
    sums_of,
)
from megacpp.memory.forms.weights import Weight, weights
from megacpp.model.pattern import warms_up
from megacpp.versions import minor

TORCH = minor(version("torch"))  # without importing it
# FSDP2 of torch 2.15 and later takes gradients of parameters that tp replicates in the dtype of
# their reduction (`may_reduce_grad_outside_dp`); of earlier ones, all are narrow until then.
UPCASTS = TORCH >= (2, 15)


@dataclass(frozen=True, slots=True)
class Unit:
    """Elements of the parameters that are gathered together.

    Attributes:
        shards: number of ranks that share them.
        own: in this rank's shards, as FSDP2 pads them.
        whole: gathered, as products read them.
        moved: gathered, of parameters with gradients only.
        last: in the last parameter, whose gradient lives until its reduction returns.
        across: cut inside of their rows, so copied once more when they are gathered.
        upcast: gathered, of parameters whose gradients are at once as wide as their reduction.
        still: in this rank's shards of parameters without a gradient.
    """

    shards: int
    own: int
    whole: int
    moved: int
    last: int
    across: int
    upcast: int = 0
    still: int = 0

    @property
    def reduced(self) -> int:
        """Elements of this rank's shards of parameters with a gradient."""
        return self.own - self.still

    @property
    def gathered(self) -> int:
        """Elements of all shards, padding included."""
        return self.own * self.shards

    @property
    def flat(self) -> int:
        """Elements that arrive in a gather; 0 on one rank, which gathers nothing."""
        return self.gathered if self.shards > 1 else 0


@dataclass(frozen=True, slots=True)
class PartUnits:
    """Units of one layer, or of `embed`, `norm` or `head`.

    Attributes:
        block: the part's own unit.
        experts: routed experts, if they are a unit of their own.
        wide: its share of the root unit.
    """

    block: Unit
    experts: Unit
    wide: Unit


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that a rank stores, and units that it gathers.

    Attributes:
        sums: bytes by class.
        units: by kind of part.
        parameters: bytes as FSDP2 stores them, every shard as long as the longest, and buffers.
        state: bytes of optimizer state.
        transient: bytes of the optimizer step's temporaries, expected and at most.
        partial: bytes of the gradients that are summed over `tp`.
    """

    sums: RankBytes
    units: Mapping[str, PartUnits]
    parameters: int
    state: int
    transient: tuple[int, int]
    partial: int


def stored_of(config: Config, size: int, rank: int) -> Stored:
    """Return the bytes and units that rank `rank` of `size` stores."""
    counts = parameters_of(config, size, rank)
    return _stored(
        config.model,
        config.recompute.compress,
        config.optim,
        Storage.in_run(config),
        Place.on_rank(config, size, rank),
        tuple(counts.items()),
        config.train.device,
    )


@lru_cache(maxsize=1024)
def _stored(
    model: ModelConfig,
    compress: float,
    optim: OptimConfig,
    storage: Storage,
    place: Place,
    counts: tuple[tuple[str, int], ...],
    device: str,
) -> Stored:
    found = [(w, n) for kind, n in counts for w in weights(model, kind, compress)]
    buffers = buffer_bytes(model, dict(counts), storage.store)
    sums = sums_of(found, place, storage, optim, buffers)
    still = warms_up(model)
    units = {kind: part_units(weights(model, kind, compress), place, still) for kind, _ in counts}
    padded = sum(
        n * (units[kind].block.own + units[kind].experts.own + units[kind].wide.own)
        for kind, n in counts
    )
    found = [(w, n) for w, n in found if trained(w, still)]
    whole = [(w, n) for w, n in found if replicated(w, place)]

    def work(batch_mib: int) -> int:
        on_cpu = device == "cpu"
        return optimizer_bytes(found, optim, storage, place, on_cpu, batch_mib * MIB)

    return Stored(
        sums,
        MappingProxyType(units),
        padded * storage.store + buffers,
        sum(sum(of.values()) for of in sums.state.values()),
        (work(64 if device == "cuda" else 1), work(1 if device == "cpu" else 64)),
        sum(n * held(w, place).own for w, n in whole) * storage.store,
    )


def trained(weight: Weight, still: bool) -> bool:
    """Return whether a weight has a gradient; `still`: only those of indexers have."""
    return not weight.folded and (not still or weight.name.startswith("indexer."))


def part_units(found: Sequence[Weight], place: Place, still: bool = False) -> PartUnits:
    """Return the units of a part, from its parameters.

    Args:
        found: parameters.
        place: of the rank.
        still: parameters outside of indexers have no gradient.
    """
    wide = [w for w in found if w.wide]
    apart = [w for w in found if w.experts and place.apart]
    rest = [w for w in found if not w.wide and w not in apart]
    return PartUnits(
        unit_of(rest, place, place.shards, still),
        unit_of(apart, place, place.expert_shards, still),
        unit_of(wide, place, place.shards, still),
    )


def unit_of(found: Sequence[Weight], place: Place, shards: int, still: bool = False) -> Unit:
    """Return the unit of all these parameters together.

    Args:
        found: parameters.
        place: of the rank.
        shards: ranks that share them.
        still: parameters outside of indexers have no gradient.
    """
    sizes = [held(w, place) for w in found]
    pairs = list(zip(found, sizes, strict=True))
    across = sum(x.padded * shards for w, x in pairs if w.experts and x.across)
    return Unit(
        shards,
        sum(x.padded for x in sizes),
        sum(x.whole for x in sizes),
        sum(x.whole for w, x in pairs if trained(w, still)),
        sizes[-1].whole if sizes and (trained(found[-1], still) or not still) else 0,
        across,
        sum(x.whole for w, x in pairs if UPCASTS and replicated(w, place) and trained(w, still)),
        sum(x.padded for w, x in pairs if still and not trained(w, still)),
    )


def replicated(weight: Weight, place: Place) -> bool:
    """Return whether each rank of tp has the whole weight."""
    return place.tp > 1 and weight.tp is None and not weight.experts
