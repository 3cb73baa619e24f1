"""Units of FSDP2 whose gradients the guard looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megacpp.model.hybrid import HybridLM
from parallel.mesh import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from parallel.stages import Stage

REST = "norms, routers and scalars"  # what the root unit owns


def watched_units(
    model: HybridLM, world: World, stages: Sequence[Stage]
) -> tuple[list[tuple[str, FSDPModule]], Callable[[str], bool]]:
    """Return units that FSDP2 reduce-scatters, with names, and what says if a parameter is in none.

    FSDP2 never calls the reduction of a mesh with one shard (no thread known).

    Args:
        model: this rank's part of the model.
        world: ranks that add up gradients.
        stages: of this rank, where a pipeline has some.
    """
    if not world.parallel:  # and never imports FSDP2
        return [], lambda name: True
    from parallel.fsdp import fsdp_units
    from parallel.plans import spread_modules

    scatters = {mesh: world.meshes[mesh].shape[-1] > 1 for mesh in ("shard", "expert_shard")}
    names = {id(module): name for name, module in model.named_modules() if name}
    units: list[tuple[str, FSDPModule]] = []
    spread = {module for block in model.blocks.values() for module in spread_modules(block)}
    apart: list[str] = []  # of them those that are units of their own
    for root in stages or [model]:
        for unit in fsdp_units(root):
            name = names.get(id(unit), REST)  # a root may be a stage, no module of the model
            if unit is root and len(stages) > 1:
                name = f"{REST} of stage {root.part.index}"
            if unit in spread:
                apart.append(f"{name}.")
            if scatters["expert_shard" if unit in spread else "shard"]:
                units.append((name, unit))

    def unseen(name: str) -> bool:
        return not scatters["expert_shard" if name.startswith(tuple(apart)) else "shard"]

    return units, unseen
