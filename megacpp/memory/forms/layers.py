"""Compose the layers of a rank from saved, needed and moved bytes of each kind; no torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megacpp.config.schema import ModelConfig
from megacpp.memory.forms.activation_share import INDEX, Share
from megacpp.memory.forms.parts import OUTER, forms_of
from megacpp.memory.forms.streams import Layered, layer_names, stream_bytes
from megacpp.memory.forms.units import PartUnits, Unit
from megacpp.memory.forms.walk import Layer
from megacpp.memory.forms.working import first_attention
from megacpp.model.regions import layer_regions
from megacpp.model.stages import stage_parts

NO_UNIT = Unit(1, 0, 0, 0, 0, 0)
NO_UNITS = PartUnits(NO_UNIT, NO_UNIT, NO_UNIT)


def layers_of(
    own: Share,
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
    number = iter(stage_layers(own))
    named = [[(kind, -1 if kind in OUTER else next(number)) for kind in part] for part in stages]
    names = layer_names(config)
    called = {part: name_of(*part, names) for parts in named for part in parts}
    forms = forms_of(own, tuple(sorted(set(called.values()))))
    stream = stream_bytes(own)
    again = layer_regions(config.recompute, model)
    found = []
    for part in named:
        ends = {kind for kind, _ in part}
        layers: list[Layer] = []
        to_make = True
        for kind, number in part:
            name = called[kind, number]
            form = forms[name]
            mine, waits = units.get(kind, NO_UNITS), 0
            if kind == "head" and model.tie_embeddings and "embed" in ends:
                waits = units["embed"].block.moved * (own.compute if sharded else own.wide)
                block = replace(units["embed"].block, moved=0, cast=units["embed"].block.whole)
                mine = NO_UNITS if sharded else PartUnits(block, NO_UNIT, NO_UNIT)
            if number >= 0 and not again[number] & {"expert_gemm", "block"}:
                cast = mine.block.cast + mine.block.cast_once
                mine = replace(mine, block=replace(mine.block, cast=cast))
            if kind == "ngram" and sharded:
                waits = mine.block.moved * own.compute
            if kind == "mtp" and "embed" in ends and looks_up_more(model):
                waits = units["embed"].block.moved * (own.compute if sharded else own.wide)
            makes = to_make and (masked(kind) or kind == "mtp")
            to_make = to_make and not makes
            layers.append(
                Layer(
                    kind if number < 0 else f"layer {number} ({kind})",
                    kind,
                    mine,
                    form.forward + (first_attention(own, name) if makes else ()),
                    form.backward,
                    form.kept,
                    form.copies,
                    stream,
                    passed_on(own, name),
                    waits,
                    kind == "embed" and model.tie_embeddings and "head" in ends,
                )
            )
        found.append(layers)
    return found


def looks_up_more(model: ModelConfig) -> bool:
    """Return whether the embedding gets a gradient before its own backward; False if it is tied.

    Multi-token prediction looks up tokens a second time; a tied head's gradient is counted with it.
    """
    return not model.tie_embeddings and model.mtp.depths > 0 and not model.mtp.detach_trunk


def passed_on(own: Share, name: str) -> int:
    """Return bytes that a part hands to the next one and doesn't save itself.

    For multi-token prediction these include the labels of all depths and their weights.
    """
    model, layer = own.config.model, Layered.of(name)
    normed = own.stream * model.dim * own.compute
    if name in ("norm", "top"):
        return normed
    if name == "mtp":
        depths = model.mtp.depths
        return (1 + depths) * normed + depths * own.tokens * (INDEX + own.wide)
    several = model.mhc.streams > 1
    if name in ("embed", "ngram"):
        reads_anew = several or (name == "embed" and model.ngram.heads > 0)
        return own.stream * model.dim * own.residual * reads_anew
    inside = layer.group is not None and not layer.group.closes
    return stream_bytes(own) if several and (inside or layer.last) else 0


def masked(kind: str) -> bool:
    """Return whether a layer attends to all keys; sparse layers make masks of their own."""
    return kind.partition("+")[0] == "A"


def name_of(kind: str, number: int, names: Sequence[str]) -> str:
    """Return the name of a part; a layer's name includes its place."""
    return kind if number < 0 else names[number]


def stage_layers(own: Share) -> list[int]:
    """Return the numbers of this rank's layers."""
    config = own.config
    if config.mesh.pp == 1:
        return list(range(config.model.depth))
    return [i for part in stage_parts(config.model, config.mesh, own.stage) for i in part.layers]


def root_unit(stages: Sequence[Sequence[Layer]]) -> Unit:
    """Return the root unit: all parameters of a rank that stay in fp32."""
    wide = [layer.units.wide for layers in stages for layer in layers if layer.units.wide.whole]
    shards = max((unit.shards for unit in wide), default=1)
    return Unit(shards, sum(u.own for u in wide), sum(u.whole for u in wide), 0, 0, 0)
