"""Layout of every parameter of a model on a mesh, in the letters of parallel/plans.py.

Placements are those of the DTensors that the plan and FSDP2 made on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megacpp.config.checks.fp8 import fp8_weights
from megacpp.config.schema import Config
from megacpp.model.hybrid import HybridLM
from megacpp.torch_extras import is_dtensor
from parallel.local_shapes import own_shape, shards_of
from parallel.plans import row_of
from parallel.simulate.drawing import Drawn, draw, gathers_again
from parallel.simulate.dry_run import count_all
from parallel.simulate.fake import as_trained, fake_world, planned_model, whole_model

OUTSIDE = "-"  # letter of parameters outside of blocks


@dataclass(frozen=True)
class ParameterLine:
    """Parameter with its layout and bytes.

    Attributes:
        letter: kind of the block that it is in (`layer_kinds`), or OUTSIDE.
        block: its layer, or None.
        shape, local_shape: of the whole, and of the part on this rank.
        brackets: `[Q_tp·fsdp, D]`: after `_` the axes that shard a dim, the first one first.
        bytes: stored on this rank.
        fp8: multiplied in FP8.
    """

    name: str
    letter: str
    block: int | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    brackets: str
    bytes: int
    fp8: bool = False


def parameter_lines(
    model: HybridLM, fp8: Mapping[int, frozenset[str]] | None = None
) -> list[ParameterLine]:
    """Every parameter of a rank's (planned) model.

    Args:
        fp8: what layers multiply in FP8 (megacpp/config/checks/fp8.py).
    """
    found = []
    for name, p in model.named_parameters():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else None
        letter = OUTSIDE if block is None else model.kinds[block]
        local = own_shape(p)
        narrow = () if fp8 is None or block is None else fp8.get(block, ())
        found.append(
            ParameterLine(
                name,
                letter,
                block,
                tuple(p.shape),
                local,
                brackets(p, row_of(model, name).dims),
                math.prod(local) * p.itemsize,
                any(f".mixer.{n}." in name for n in narrow),
            )
        )
    return found


def brackets(p: Tensor, letters: Sequence[str]) -> str:
    """Return the layout of a parameter by its placements, on all axes of more than one rank.

    Args:
        p: any shape; plain or DTensor.
        letters: of its dims.
    """
    cutting: list[list[str]] = [[] for _ in letters]
    if is_dtensor(p):
        mesh = p.device_mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        for axis, dim in shards_of(p.placements):
            if mesh.size(axis) > 1:
                cutting[dim].append(names[axis])
    dims = (
        letter + (f"_{'·'.join(axes)}" if axes else "")
        for letter, axes in zip(letters, cutting, strict=True)
    )
    return f"[{', '.join(dims)}]"


@dataclass(frozen=True)
class Explanation:
    """Model on a mesh, seen from one rank.

    Attributes:
        parameters: of this rank, in the model's order.
        all_ranks: their bytes on all ranks, each element counted once.
        model_bytes: of the model before any mesh.
        drawn: collectives by kind of block.
        coordinates: of the rank, by axis.
    """

    parameters: list[ParameterLine]
    all_ranks: int
    model_bytes: int
    drawn: dict[str, list[Drawn]]
    coordinates: dict[str, int]


def explain(config: Config, size: int, rank: int = 0) -> Explanation:
    """Return the model as rank `rank` of `size` holds it; `config` is resolved for that many."""
    config = as_trained(config)
    with fake_world(config, size, rank) as world:
        model = planned_model(config, world)
        again = gathers_again(model, config)
        lines = parameter_lines(model, fp8_weights(config))
        coordinates = {a: world.coordinate(a) for a in world.degrees}
    return Explanation(
        lines,
        count_all(config, size).once,
        sum(p.numel() * p.itemsize for p in whole_model(config).parameters()),
        draw(config, size, rank, again),
        coordinates,
    )
