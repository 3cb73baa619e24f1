"""Compose the layers of a rank from saved, needed and moved bytes of each kind; no torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megacpp.blocks.features import ahead_blocks
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parts import NO_FORM, OUTER, Form, forms_of
from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.memory.forms.simulation import AFTER_NORM, Layer
from megacpp.memory.forms.traced import TracedPart, layer_parts, outer_parts
from megacpp.memory.forms.units import TORCH, PartUnits, Unit
from megacpp.memory.forms.weights import COPY
from megacpp.model.pattern import masked
from megacpp.model.stages import SPLIT_BACKWARD, walks_once

WALKS_APART = (2, 13)  # torch from which on a backward is split: parallel/pipeline.py
NO_UNIT = Unit(1, 0, 0, 0, 0, 0)
NO_UNITS = PartUnits(NO_UNIT, NO_UNIT, NO_UNIT)


@dataclass(frozen=True)
class PlacedPart:
    """Part in its place on a rank.

    Attributes:
        kind: of the part.
        number: of the layer in the model; -1: no layer.
        part: what is traced; None: nothing.
        makes_mask: it is the first of its stage that needs a mask.
    """

    kind: str
    number: int
    part: TracedPart | None
    makes_mask: bool

    @property
    def name(self) -> str:
        """Return the part's name in tables."""
        return self.kind if self.number < 0 else f"layer {self.number} ({self.kind})"


@dataclass(frozen=True)
class EmbeddingTable:
    """Embedding table of a rank, which several parts may read.

    Attributes:
        holder: part with its weights: the embedding, a last stage's copy, or a tied head, of the
            first stage on its rank; empty: none.
        bytes: of the gathered weights.
        looks_up: blocks for tokens further ahead look some up in it, and train it.
        readers: parts whose gradient of it is there before the embedding's own, which adds to it.
        tied: the head multiplies by it.
    """

    holder: str
    bytes: int
    looks_up: bool
    readers: frozenset[str]
    tied: bool


def layers_of(
    own: LocalShapes,
    stages: Sequence[Sequence[str]],
    units: Mapping[str, PartUnits],
    sharded: bool,
) -> list[list[Layer]]:
    """Return the parts of each stage of a rank, in order.

    Args:
        own: sizes of the rank.
        stages: kinds of the parts of each stage.
        units: FSDP2 units by kind of part.
        sharded: FSDP2 shards the model.
    """
    placed = _places(own, stages)
    asked = {(x.part, x.makes_mask): 0 for stage in placed for x in stage if x.part is not None}
    forms = forms_of(own, tuple(asked))
    table = _table(own, units, sharded)
    found = []
    for stage in placed:
        ends, layers = {place.kind for place in stage}, list[Layer]()
        for place in stage:
            part = place.part
            form = NO_FORM if part is None else forms[part, place.makes_mask]
            unsaved = own.stream_bytes if part is not None and not part.reached else form.takes
            if unsaved and layers:
                layers[-1] = without_output(layers[-1], unsaved)
            mine, waits = _units(own, place.kind, ends, units, table, sharded)
            layers.append(_layer(own, place, form, ends, table, sharded, mine, waits))
        found.append(layers)
    return _within(found, int(own.config.recompute.offload_host_gib * 2**30))


def _places(own: LocalShapes, stages: Sequence[Sequence[str]]) -> list[list[PlacedPart]]:
    """Return the parts of each stage in their places."""
    config, number = own.config, iter(own.layers)
    outer, layers = outer_parts(config.model), layer_parts(config)
    found = []
    for kinds, split in zip(stages, stages_that_split(own), strict=True):
        made, stage = set[bool](), list[PlacedPart]()
        for kind in kinds:
            at = -1 if kind in OUTER else next(number)
            sees_all = "+full" in kind  # a mask of the window is another one
            makes = masked(kind, own.warms_up) and sees_all not in made
            made |= {sees_all} if makes else set()
            part = outer.get(kind) if at < 0 else replace(layers[at], split=split)
            stage.append(PlacedPart(kind, at, part, makes))
        found.append(stage)
    return found


def _table(own: LocalShapes, units: Mapping[str, PartUnits], sharded: bool) -> EmbeddingTable:
    model = own.config.model
    looks_up = any(blocks.trains_embedding for blocks in ahead_blocks(model))
    readers = {"head"} if model.tie_embeddings else {"mtp"} if looks_up else set[str]()
    holder = next((kind for kind in ("embed", COPY, "head") if kind in units), "")
    itemsize = own.compute if sharded else own.wide
    size = units[holder].block.moved * itemsize if holder else 0
    return EmbeddingTable(holder, size, looks_up, frozenset(readers), model.tie_embeddings)


def _units(
    own: LocalShapes,
    kind: str,
    ends: set[str],
    units: Mapping[str, PartUnits],
    table: EmbeddingTable,
    sharded: bool,
) -> tuple[PartUnits, int]:
    """Return a part's units, and bytes of gradients that wait for the rest of the stage.

    Args:
        own: sizes of the rank.
        kind: of the part.
        ends: kinds of the stage's parts.
        units: by kind of part.
        table: of the embedding.
        sharded: FSDP2 shards the model.
    """
    mine = units.get(kind, NO_UNITS)
    if kind == "head" and table.tied:
        waits = table.bytes if table.holder == "embed" and not table.looks_up else 0
        if "embed" in ends:
            block = replace(units["embed"].block, moved=0)
            mine = NO_UNITS if sharded else PartUnits(block, NO_UNIT, NO_UNIT)
        return mine, waits
    if kind == "ngram" and sharded:
        block = mine.block
        return mine, block.moved * own.compute + block.upcast * (own.wide - own.compute)
    if kind == "mtp":
        return mine, table.bytes if table.looks_up else mine.block.moved * own.compute * sharded
    if kind == COPY and not table.looks_up:
        return replace(mine, block=replace(mine.block, moved=0, last=0)), 0
    return mine, 0


def _layer(
    own: LocalShapes,
    place: PlacedPart,
    form: Form,
    ends: set[str],
    table: EmbeddingTable,
    sharded: bool,
    units: PartUnits,
    waits: int,
) -> Layer:
    """Return a part with its bytes.

    Args:
        own: sizes of the rank.
        place: the part.
        form: its traced bytes.
        ends: kinds of the stage's parts.
        table: of the embedding.
        sharded: FSDP2 shards the model.
        units: of the part.
        waits: bytes of gradients that wait for the rest of the stage.
    """
    kind, part, model = place.kind, place.part, own.config.model
    one_stream = own.stream_bytes * model.dim // model.stream_width
    last = part is not None and part.last
    shared = "head" in ends and ("embed" in ends or table.looks_up)  # by parts of the stage
    tied = table.tied and kind == table.holder and shared
    late = tied or kind in ("embed", COPY)
    late |= sharded and (kind == "ngram" or (kind == "mtp" and not table.looks_up))
    backward = form.backward
    if kind == "embed" and (ends & table.readers) and not own.warms_up:
        backward += (PeakPoint("sum of gradients", table.bytes, table.bytes),)
    inputs, weights, between = form.halves
    return Layer(
        name=place.name,
        kind=kind,
        units=units,
        forward=form.forward,
        backward=backward,
        kept=form.kept,
        copies=form.copies,
        stream=one_stream if kind in AFTER_NORM else own.stream_bytes,
        passes=own.stream_bytes * (last and own.stream_bytes > one_stream),
        waits=waits,
        tied=tied,
        late=late,
        away=form.away + form.takes,
        inputs=inputs,
        weights=weights,
        between=between,
    )


def without_output(layer: Layer, taken: int) -> Layer:
    """Return a layer whose output is passed on, not saved: the next one moves it to the host.

    Or it has no gradient, in the warm-up of sparse attention.
    """
    a, b, c = layer.kept
    kept = (a, b, c - taken) if layer.kind in OUTER else (a - taken, b, c)
    return replace(layer, kept=kept, passes=taken)


def _within(stages: list[list[Layer]], room: int) -> list[list[Layer]]:
    """Return the layers with what has no room on the host back on the device, in order.

    Buffers are of pinned memory, which are powers of two: up to twice as large.
    """
    for layers in stages:
        for at, layer in enumerate(layers):
            leaves = layer.away if 2 * layer.away <= room else 0
            room -= 2 * leaves
            a, b, c = layer.kept
            kept = a + layer.away - leaves, b, c
            layers[at] = replace(layer, away=leaves, kept=kept)
    return stages


def stages_that_split(own: LocalShapes) -> list[bool]:
    """Return, for each stage of a rank, whether its backward is two walks over its layers."""
    model, mesh = own.config.model, own.config.mesh
    if mesh.pp == 1:
        return [False]
    split = mesh.pp_schedule in SPLIT_BACKWARD and TORCH >= WALKS_APART
    return [split and not x.first and not walks_once(model, mesh, x) for x in own.stage_parts]


def root_unit(stages: Sequence[Sequence[Layer]]) -> Unit:
    """Return the root unit: all parameters of a rank that stay in fp32."""
    wide = [layer.units.wide for layers in stages for layer in layers if layer.units.wide.whole]
    shards = max((unit.shards for unit in wide), default=1)
    return Unit(shards, sum(u.own for u in wide), sum(u.whole for u in wide), 0, 0, 0)
