"""Application of every axis to a model on the meta device, in the one order that composes.

pp      keep the layers of this rank's stages
cp      exchanges by which each mixer sees the tokens of other ranks
tp      parameters and activation layouts of the plan; routers whose tokens lie on several ranks
ep      whole experts, and the exchange of tokens with them
        here the caller prepares the blocks: recomputation, compilation
fsdp    the remaining part of each parameter, by block
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config, MeshConfig
from megacpp.model.hybrid import HybridLM
from megacpp.model.precision import compute_dtype
from megacpp.model.short_conv import Convolve
from megacpp.model.stages import stage_parts
from parallel.context.attention import ContextAttention
from parallel.context.convolution import ContextConv
from parallel.context.layout import ContextLayout
from parallel.context.scan import ContextScan, heads_if_divisible
from parallel.expert.parallel import expert_plan, router_plan
from parallel.fsdp import shard_model
from parallel.mesh import World
from parallel.stages import Stage, keep_parts, make_stages
from parallel.tensor import shard_heads_and_rows


def parallelize(
    model: HybridLM,
    config: Config,
    world: World,
    prepare: Callable[[HybridLM], object] | None = None,
    balanced: bool = False,
) -> list[Stage]:
    """Apply all axes of `world`, in place.

    Args:
        model: on the meta device.
        config: resolved for the world.
        world: of the rank.
        prepare: called with the model after `tp`, `cp` and `ep`, before FSDP2 shards the rest.
        balanced: experts are chosen evenly instead of by the router, so that no size depends on a
            value: for a run without peers or without values (parallel/simulate/dry_run.py).

    Returns:
        This rank's pipeline stages; none without a pipeline, when the model itself is run.
    """
    mesh = config.mesh
    parts = (
        stage_parts(config.model, mesh, world.coordinate("pp")) if world.degree("pp") > 1 else []
    )
    if parts:
        keep_parts(model, parts)
    parallelize_blocks(model, config, world, balanced)
    if prepare is not None:
        prepare(model)
    stages = make_stages(model, parts)
    dtype = compute_dtype(config.precision, world.device)
    reshard = "never" if config.train.gradient_sync == "resident" else mesh.reshard
    for root in stages or [model]:
        shard_model(root, world, dtype, reshard)
    model.tie()
    return stages


def parallelize_blocks(
    model: HybridLM, config: Config, world: World, balanced: bool = False
) -> None:
    """Apply the axes that shard tokens, heads and experts, in place; FSDP2 isn't applied.

    Args:
        model: on the meta device.
        config: resolved for the world.
        world: of the rank; on one process nothing changes.
        balanced: see `parallelize`.
    """
    mesh, degree = config.mesh, world.degree
    if degree("cp") > 1:
        layout = ContextLayout.for_rank(mesh.cp_order, world.coordinate("cp"), degree("cp"))
        parallelize_module(model, world.meshes["cp"], context_plan(model, mesh, layout))
    if degree("tp") > 1:
        shard_heads_and_rows(model, world.meshes["tp"])
    if degree("stage") > 1:
        routers = router_plan(model, world.meshes["row"])
        parallelize_module(model, world.meshes["stage"], routers)
    if degree("ep") > 1 or balanced:
        parallelize_module(model, world.meshes["ep"], expert_plan(model, mesh, balanced))


def context_plan(
    model: HybridLM, mesh: MeshConfig, layout: ContextLayout
) -> dict[str, ParallelStyle]:
    """Return styles by mixer: exchanges with the ranks that hold other tokens of its rows."""
    plan: dict[str, ParallelStyle] = {}
    for name, (letter, mixer) in model.mixers().items():
        exchange = KINDS[letter].context
        if exchange is not None and hasattr(mixer, "scan"):
            heads = exchange.heads(model.config)[1] // mesh.tp
            wanted = getattr(mesh, exchange.setting)
            plan[name] = ContextScan(heads_if_divisible(wanted, heads, layout.degree), layout)
        elif hasattr(mixer, "wo"):
            plan[name] = ContextAttention(mesh.cp_attention, layout)
    for name, module in model.named_modules():  # convolutions beside the mixers
        if name not in plan and isinstance(getattr(module, "convolve", None), Convolve):
            plan[name] = ContextConv(layout)
    return plan
