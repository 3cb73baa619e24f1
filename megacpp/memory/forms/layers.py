"""Compose the layers of a rank from saved, needed and moved bytes of each kind; no torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parts import NO_FORM, OUTER, forms_of
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
    config = own.config
    model = config.model
    traced, layers_of_model = outer_parts(model), layer_parts(config)
    number = iter(own.layers)
    named: list[list[tuple[str, int, TracedPart | None, bool]]] = []
    splits = stages_that_split(own)
    for part, split in zip(stages, splits, strict=True):
        made, stage = set[bool](), list[tuple[str, int, TracedPart | None, bool]]()
        for kind in part:
            at = -1 if kind in OUTER else next(number)
            masks = masked(kind, own.warms_up)
            makes = masks and ("+full" in kind) not in made  # a mask of the window, and one of all
            made |= {"+full" in kind} if makes else set()
            runs = traced.get(kind) if at < 0 else replace(layers_of_model[at], split=split)
            stage.append((kind, at, runs, makes))
        named.append(stage)
    asked = {(part, makes): 0 for stage in named for _, _, part, makes in stage if part is not None}
    forms = forms_of(own, tuple(asked))
    stream = own.stream_bytes
    # Then the embedding gets a gradient, to which a tied head's is added, before its own backward.
    looks_up = model.mtp.depths > 0 and not model.mtp.detach_trunk
    read_there = {"head"} if model.tie_embeddings else {"mtp"} if looks_up else set[str]()
    # A last stage has a copy of it, a tied head, or that of the first stage on its rank.
    holder = next((kind for kind in ("embed", COPY, "head") if kind in units), "")
    table = units[holder].block.moved * (own.compute if sharded else own.wide) if holder else 0
    found = []
    for stage in named:
        ends = {kind for kind, *_ in stage}
        shared = "head" in ends and ("embed" in ends or looks_up)  # by parts of the stage
        layers: list[Layer] = []
        for kind, number, part, makes in stage:
            form = NO_FORM if part is None else forms[part, makes]
            mine, waits = units.get(kind, NO_UNITS), 0
            if kind == "head" and model.tie_embeddings and holder == "embed":
                waits = table * (not looks_up)
            if kind == "head" and model.tie_embeddings and "embed" in ends:
                block = replace(units["embed"].block, moved=0)
                mine = NO_UNITS if sharded else PartUnits(block, NO_UNIT, NO_UNIT)
            if kind == "ngram" and sharded:
                ngram = mine.block
                waits = ngram.moved * own.compute + ngram.upcast * (own.wide - own.compute)
            if kind == "mtp":
                waits = table if looks_up else mine.block.moved * own.compute * sharded
            if kind == COPY and not looks_up:
                mine = replace(mine, block=replace(mine.block, moved=0, last=0))
            tied = model.tie_embeddings and kind == holder and shared
            late = tied or kind in ("embed", COPY)
            late |= sharded and (kind == "ngram" or (kind == "mtp" and not looks_up))
            backward = form.backward
            if kind == "embed" and (ends & read_there) and not own.warms_up:
                backward += (PeakPoint("sum of gradients", table, table),)
            unsaved = stream if part is not None and not part.reached else form.takes
            if unsaved and layers:
                layers[-1] = without_output(layers[-1], unsaved)
            layers.append(
                Layer(
                    kind if number < 0 else f"layer {number} ({kind})",
                    kind,
                    mine,
                    form.forward,
                    backward,
                    form.kept,
                    form.copies,
                    stream // model.mhc.streams if kind in AFTER_NORM else stream,
                    stream * (model.mhc.streams > 1 and part is not None and part.last),
                    waits,
                    tied,
                    late,
                    form.away + form.takes,
                    *form.halves,
                )
            )
        found.append(layers)
    return _within(found, int(config.recompute.offload_host_gib * 2**30))


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
