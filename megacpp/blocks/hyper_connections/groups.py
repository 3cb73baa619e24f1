"""Groups of layers whose hyper-connections are recomputed together; no torch here.

Of a group only the streams at its entry are kept, and what each mixer returned, one stream wide.
In the backward the last layer of a group asks for its streams; then those of all its layers are
mixed again, from the entry on, without a mixer (arXiv 2512.24880, section 4.3.2). So of L layers in
groups of G there are once

    n D (L / G)     entries, kept                   n D G + D G    mixed again, of one group

numbers of a token, fewest with G = sqrt(n L / (n + 1)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megacpp.config.schema import Config
from megacpp.model.pattern import layer_kinds
from megacpp.model.stages import num_stages, split_layers


@dataclass(frozen=True)
class InGroup:
    """Position of a layer in its group.

    Attributes:
        place: layers of the group in front of it; 0: its input streams are saved.
        closes: its output streams are saved: another group begins, or a stage ends.
    """

    place: int
    closes: bool


def places_in_groups(config: Config) -> list[InGroup | None]:
    """Return the position of every layer in its group; None: it recomputes no streams."""
    found: list[InGroup | None] = [None] * config.model.depth
    for group in stream_groups(config):
        for place, layer in enumerate(group):
            found[layer] = InGroup(place, layer == group[-1])
    return found


def stream_groups(config: Config) -> list[range]:
    """Return groups in layer order, within pipeline stages; never with the last layer of the model.

    A layer with an Engram is the last of its group: what it adds to the streams takes weights to
    make again, which FSDP may have freed when a later layer asks. There are no groups without
    hyper-connections, where the policy turns them off, and where the compiler or Transformer Engine
    decides what a block saves.
    """
    model, size = config.model, config.recompute.mhc_group_size
    decided = config.train.compile != "off" or config.precision.fp8 == "te"
    if model.mhc.streams == 1 or size < 0 or decided:
        return []
    mesh, kinds, found = config.mesh, layer_kinds(model), list[range]()
    stages = num_stages(mesh.pp_schedule, mesh.pp) if mesh.pp > 1 else 1
    for stage in split_layers(model, stages):
        layers = range(stage.start, min(stage.stop, model.depth - 1))
        step, first = size or group_size(model.mhc.streams, len(layers)), layers.start
        for end in range(layers.start + 1, layers.stop + 1):
            if end in (first + step, layers.stop) or "+engram" in kinds[end - 1]:
                found.append(range(first, end))
                first = end
    return found


def group_size(streams: int, layers: int) -> int:
    """Layers of a group, for the fewest numbers at once."""
    return max(1, round(math.sqrt(streams * layers / (streams + 1))))
