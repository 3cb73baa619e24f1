"""Every axis applied to a model on the meta device, in the one order that composes."""

from __future__ import annotations


from megacpp.config import Config
from megacpp.model.hybrid import HybridLM
from megacpp.run.precision import compute_dtype
from parallel.fsdp import shard_model
from parallel.mesh import World
from parallel.tensor import cut_model


def parallelize(model: HybridLM, config: Config, world: World) -> None:
    """TP+SP, then FSDP2 over what is left of each parameter; in place."""
    for axis in ("pp", "cp", "ep"):
        assert world.degree(axis) == 1, f"{axis} is not applied yet"
    if world.degree("tp") > 1:
        cut_model(model, world.meshes["tp"])
    dtype = compute_dtype(config.precision, world.device)
    shard_model(model, world, dtype, config.mesh.reshard)
