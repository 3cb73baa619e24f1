"""The layers of a rank, put together of what each kind keeps, needs and moves; no torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megacpp.memory.forms.activation_share import Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.parts import OUTER, forms_of
from megacpp.memory.forms.units import PartUnits, Unit
from megacpp.memory.forms.walk import Layer
from megacpp.memory.forms.working import first_attention
from megacpp.memory.forms.working_attention import masks
from megacpp.model.stages import stage_parts

NO_UNIT = Unit(1, 0, 0, 0, 0, 0)
NO_UNITS = PartUnits(NO_UNIT, NO_UNIT, NO_UNIT)


def layers_of(
    own: Share,
    stages: Sequence[Sequence[str]],
    units: Mapping[str, PartUnits],
    sharded: bool,
) -> list[list[Layer]]:
    """The parts of each stage of a rank, in order."""
    config = own.config
    model = config.model
    depth = model.depth
    number = iter(stage_layers(own))
    named = [[(kind, -1 if kind in OUTER else next(number)) for kind in part] for part in stages]
    forms = forms_of(own, tuple(sorted({name_of(*p, depth) for part in named for p in part})))
    stream = own.stream * model.dim * own.residual
    found = []
    for part in named:
        ends = {kind for kind, _ in part}
        layers: list[Layer] = []
        made = making_masks(own) if any(kind[0] == "A" for kind in ends) else ()
        for kind, number in part:
            form = forms[name_of(kind, number, depth)]
            mine, waits = units.get(kind, NO_UNITS), 0
            if kind == "head" and model.tie_embeddings and "embed" in ends:
                waits = units["embed"].block.moved * (own.compute if sharded else own.wide)
                block = replace(units["embed"].block, moved=0, cast=units["embed"].block.whole)
                mine = NO_UNITS if sharded else PartUnits(block, NO_UNIT, NO_UNIT)
            layers.append(
                Layer(
                    kind if number < 0 else f"layer {number} ({kind})",
                    kind,
                    mine,
                    form.forward + (made if kind[0] == "A" else ()),
                    form.backward,
                    form.kept,
                    form.copies,
                    stream,
                    own.stream * model.dim * own.compute if kind == "norm" else 0,
                    waits,
                    kind == "embed" and model.tie_embeddings and "head" in ends,
                )
            )
            made = () if kind[0] == "A" else made
        found.append(layers)
    return found


def making_masks(own: Share) -> tuple[Moment, ...]:
    """What the first A block of a microbatch has alive beside the masks, which are the batch's.

    Of its two comparisons one stays, and is inverted while the narrow mask is there.
    """
    return tuple(replace(m, tensors=m.tensors - masks(own) // 2) for m in first_attention(own))


def name_of(kind: str, number: int, depth: int) -> str:
    """Of a part: the last layer runs nothing again."""
    return f"{kind} last" if number == depth - 1 else kind


def stage_layers(own: Share) -> list[int]:
    """Numbers of this rank's layers."""
    config = own.config
    if config.mesh.pp == 1:
        return list(range(config.model.depth))
    return [i for part in stage_parts(config.model, config.mesh, own.stage) for i in part.layers]


def root_unit(stages: Sequence[Sequence[Layer]]) -> Unit:
    """All fp32-contract parameters of a rank."""
    wide = [layer.units.wide for layers in stages for layer in layers if layer.units.wide.whole]
    shards = max((unit.shards for unit in wide), default=1)
    return Unit(shards, sum(u.own for u in wide), sum(u.whole for u in wide), 0, 0, 0)
