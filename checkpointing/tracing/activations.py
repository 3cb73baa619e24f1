"""Bytes that a forward saves, added up by kind of block and by tensor, for a model of any depth.

Layers of a kind save the same tensors, so one layer of each kind (`one_of_each`) is metered and
counted as often as the model has it. The last layer is apart: it is never recomputed.
(Activation memory.)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from checkpointing.tracing.meter import Allocation, Meter, Phase
from megacpp.blocks.features import entrance, exit_parts
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds, with_kinds

Standing = tuple[str, str]  # a metered part, and the name of the part that it represents


@dataclass(frozen=True)
class Kept:
    """Tensors alike: operator that made them, module below the block, number, bytes together."""

    operator: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Part:
    """All layers of a kind together; FLOPs are those of matrix products.

    Attributes:
        name: a letter, a letter with ` last`, `embed`, `norm` or `head`.
        replayed: FLOPs of the backward that the forward had done before.
    """

    name: str
    layers: int
    kept: tuple[Kept, ...]
    forward: int
    backward: int
    replayed: int

    @property
    def bytes(self) -> int:
        """Bytes that all layers of the part save."""
        return sum(kept.bytes for kept in self.kept)

    def repeated(self, plain: Part) -> int:
        """FLOPs of the backward beyond those of `plain`, the same part without recomputation.

        They include what a kernel recomputes by itself, inside its own backward.
        """
        return self.backward + self.replayed - plain.backward - plain.replayed


@dataclass(frozen=True)
class Activations:
    """Tensors that one microbatch saves from its forward to its backward, on one rank.

    Attributes:
        parts: in the order in which a token passes through them.
        weights: made of parameters alone: gathered ones, casts.
        batch: shared by all layers: ids, masks and positions of documents, the loss.
        host: in the host's memory; of no part.
        forward_peak, backward_peak: most bytes alive at once, without weights and gradients of
            parameters.
    """

    parts: tuple[Part, ...]
    weights: tuple[Kept, ...]
    batch: tuple[Kept, ...]
    host: tuple[Kept, ...]
    forward_peak: int
    backward_peak: int

    @property
    def bytes(self) -> int:
        """Bytes that all parts save; without `weights` and `batch`."""
        return sum(part.bytes for part in self.parts)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(kept.bytes for kept in self.host)

    def flops(self, phase: Phase) -> int:
        """FLOPs of all parts in `phase`."""
        return sum(getattr(part, phase) for part in self.parts)

    def repeated(self, plain: Activations) -> int:
        """FLOPs of the backward beyond those of `plain`, over all parts (see `Part.repeated`)."""
        own, other = (a.flops("backward") + a.flops("replayed") for a in (self, plain))
        return own - other

    def as_dict(self) -> dict[str, Any]:
        """Return the content as a dict for JSON; sizes in bytes."""
        content = dataclasses.asdict(self)
        for entry, part in zip(content["parts"], self.parts, strict=True):
            entry["bytes"] = part.bytes
        totals = {"weights": self.weights, "batch": self.batch, "host": self.host}
        return {
            "bytes": self.bytes,
            **{f"{name}_bytes": sum(k.bytes for k in kept) for name, kept in totals.items()},
            "forward_flops": self.flops("forward"),
            "backward_flops": self.flops("backward"),
            "replayed_flops": self.flops("replayed"),
            **content,
        }


def one_of_each(model: ModelConfig) -> ModelConfig:
    """Return `model` with one layer of each kind, followed by its last layer."""
    kinds = layer_kinds(model)
    return with_kinds(model, [*dict.fromkeys(kinds[:-1]), kinds[-1]])


def standing_for(traced: ModelConfig, model: ModelConfig) -> list[Standing]:
    """Return, for each part of `model`, the part of `traced` that represents it, and a name.

    `traced` is the model itself or `one_of_each` of it.
    """
    few, kinds = (layer_kinds(m) for m in (traced, model))
    same, last = few == kinds, len(kinds) - 1
    found: list[Standing] = [(name, name) for name in entrance(model)]
    for i, kind in enumerate(kinds[:-1]):
        found.append((f"blocks.{i if same else few.index(kind)}", kind))
    found.append((f"blocks.{last if same else len(few) - 1}", f"{kinds[-1]} last"))
    return [*found, *((name, name) for name in exit_parts(model))]


def activations(meter: Meter, standing: Sequence[Standing]) -> Activations:
    """Return a model's activations, whose parts are `standing`, from one metered microbatch."""
    times = Counter(part for part, _ in standing)
    own: dict[str, list[Allocation]] = {}
    weights: list[tuple[Allocation, int]] = []
    batch: list[tuple[Allocation, int]] = []
    host: list[tuple[Allocation, int]] = []
    for alloc in meter.kept:
        if alloc.host:
            host.append((alloc, times.get(alloc.part, 1)))
        elif alloc.weight and not alloc.batch:
            weights.append((alloc, times.get(alloc.part, 1)))
        elif alloc.batch or alloc.part not in times:
            batch.append((alloc, 1))
        else:
            own.setdefault(alloc.part, []).append(alloc)
    kept_bytes = {
        part: sum(alloc.bytes for alloc in allocations) for part, allocations in own.items()
    }
    names: dict[str, list[str]] = {}
    for part, name in standing:
        names.setdefault(name, []).append(part)
    return Activations(
        tuple(_part(meter, name, parts, own) for name, parts in names.items()),
        _alike(weights),
        _alike(batch),
        _alike(host),
        _peak(meter, standing, kept_bytes, backward=False),
        _peak(meter, standing, kept_bytes, backward=True),
    )


def _part(meter: Meter, name: str, parts: Sequence[str], own: dict[str, list[Allocation]]) -> Part:
    flops: Counter[Phase] = Counter()
    for phase in ("forward", "backward", "replayed"):
        flops[phase] = sum(meter.flops[part, phase] for part in parts)
    return Part(
        name,
        len(parts),
        _alike((alloc, 1) for part in parts for alloc in own.get(part, [])),
        flops["forward"],
        flops["backward"],
        flops["replayed"],
    )


def _alike(allocations: Iterable[tuple[Allocation, int]]) -> tuple[Kept, ...]:
    """Return equal allocations merged, each counted as often as given; the largest first."""
    found: dict[Any, Kept] = {}
    for alloc, times in allocations:
        dtype = str(alloc.dtype).removeprefix("torch.")
        key = alloc.operator, alloc.path, alloc.shape, dtype
        before = found.get(key, Kept(alloc.operator, alloc.path, alloc.shape, dtype, 0, 0))
        found[key] = dataclasses.replace(
            before, count=before.count + times, bytes=before.bytes + times * alloc.bytes
        )
    return tuple(sorted(found.values(), key=lambda kept: -kept.bytes))


def _peak(meter: Meter, standing: Sequence[Standing], kept: dict[str, int], backward: bool) -> int:
    """Most bytes at once: those saved by all parts before one, and the most that it has besides."""
    traced = [part for part in dict.fromkeys(part for part, _ in standing)]
    below = dict(zip(traced, accumulate((kept.get(p, 0) for p in traced), initial=0), strict=False))
    most: Counter[str] = Counter()
    for part, size in meter.alive_by_part(backward):
        if part in below:
            most[part] = max(most[part], size - below[part])
    peak = before = 0
    for part, _ in standing:
        peak = max(peak, before + most[part])
        before += kept.get(part, 0)
    return peak
