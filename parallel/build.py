"""Construction of a model on its mesh, of which no rank ever holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.kernels.backend import set_kernels
from megacpp.kernels.chosen import chosen_kernels
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, initialise, whole
from megacpp.model.precision import compute_dtype, storage_dtype
from parallel.mesh import World

if TYPE_CHECKING:
    from parallel.stages import Stage


def build_model(
    config: Config, world: World, prepare: Callable[[HybridLM], object] | None = None
) -> HybridLM:
    """Build on meta, parallelize, prepare, shard, materialise, initialise: in this order.

    Initial values are a pure function of (run.seed, parameter name, global index), so every mesh
    starts from the same weights.

    Raises:
        ConfigError: a kernel that is asked for by name can't run here.
    """
    kernels = chosen_kernels(config, world.device)

    def prepared(model: HybridLM) -> None:
        set_kernels(model, kernels)  # first: compiled code depends on them
        if prepare is not None:
            prepare(model)

    model = plan_model(config, world, prepared)
    model.to_empty(device=world.device)
    initialise(model, model.init_rules(), config.run.seed, local_part(world))
    return model.train()


def local_part(world: World) -> Callable[[Tensor], Slice]:
    """Return the function from a tensor of a model to what this rank stores of it."""
    if not world.parallel:
        return whole
    from parallel.fsdp import shard_slice

    return shard_slice


def load_first_weights(model: HybridLM, config: Config, world: World) -> list[str]:
    """Fill a model with the weights of `checkpoint.init`, if that is set; every rank calls it.

    Returns:
        Lines for the header.

    Raises:
        CheckpointError: the folder is damaged.
    """
    if not config.checkpoint.init:
        return []
    from megacpp.interop.start import start_from  # imports every map of names

    return start_from(model, config, local_part(world))


def plan_model(
    config: Config,
    world: World,
    prepare: Callable[[HybridLM], object] | None = None,
    balanced: bool = False,
) -> HybridLM:
    """Return the model on the meta device, parallelized: shapes of the parts that this rank holds.

    Args:
        config: resolved for the world.
        world: of the rank.
        prepare: called with the model after `tp`, `cp` and `ep`, before FSDP2 shards the rest
            (checkpointing/apply.py).
        balanced: see `parallelize` (parallel/apply.py).
    """
    with torch.device("meta"):
        model = HybridLM(config.model).to(storage_dtype(config.precision))
    if world.parallel:
        from parallel.apply import parallelize  # one process never imports FSDP2

        stages = parallelize(model, config, world, prepare, balanced)
        vars(model)["stages"] = stages  # not a submodule: their modules are the model's own
    elif prepare is not None:
        prepare(model)
    return model


def stages_of(model: HybridLM) -> list[Stage]:
    """Return this rank's pipeline stages of a built model; none without a pipeline."""
    return vars(model).get("stages", [])


def autocast_dtype(config: Config, world: World) -> torch.dtype | None:
    """Return the dtype for autocast where no FSDP policy casts: one process below fp32."""
    dtype = compute_dtype(config.precision, world.device)
    narrow = dtype in (torch.bfloat16, torch.float16)
    return dtype if narrow and not world.parallel else None
