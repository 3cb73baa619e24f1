"""FSDP2 over a hybrid model: one unit per block, contract parameters gathered in fp32 by the root.

Mixed precision casts a whole unit to one dtype, so the fp32-contract parameters (norms, `dt_bias`,
`D`, router, ...) can't share a unit with bf16 matrices. They stay where upstream names put them;
the root unit, made *first* and told to ignore everything else, owns all of them, and the block
units ignore them. So they travel in one all-gather and one reduce-scatter per step for the whole
model, in fp32, and no forward ever casts or copies one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, whole

RESHARD_ABOVE_BYTES = 1 << 30


def shard_model(
    model: HybridLM, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard: str = "always"
) -> None:
    """Shards every parameter over the data axes of `mesh`, in place.

    With `reshard` (`always`, or `auto` for a model above 1 GiB of gathered parameters) a block's
    parameters are shards again after its forward and gathered a second time for its backward;
    otherwise they stay whole from forward to backward. The head, whose backward comes at once,
    and the embedding, whose backward needs no weights, are never gathered twice.

    Gradients are summed, never averaged: the loss is divided once, by the accumulation boundary.
    Parameters keep their dtype (fp32 master); units compute in `compute_dtype`.
    """
    others = set(model.parameters()) - {p for _, p in contract_parameters(model)}
    stored = next(iter(others)).dtype
    wide = MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == stored else compute_dtype,
        reduce_dtype=None if compute_dtype == stored else torch.float32,
        cast_forward_inputs=False,
    )
    gathered_bytes = sum(p.numel() for p in others) * compute_dtype.itemsize
    again = reshard == "always" or (reshard == "auto" and gathered_bytes > RESHARD_ABOVE_BYTES)
    fully_shard(model, mesh=mesh, mp_policy=wide, ignored_params=others)
    contract = {p for _, p in contract_parameters(model)}  # sharding made new objects of them
    if model.config.tie_embeddings:
        # One parameter in two modules is one unit, whole from the embedding to the loss.
        fully_shard(
            [model.embed, model.head],
            mesh=mesh,
            mp_policy=narrow,
            ignored_params=contract,
            reshard_after_forward=False,
        )
        units: list[nn.Module] = list(model.blocks.values())
    else:
        units = [model.embed, *model.blocks.values(), model.head]
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=narrow,
            ignored_params=contract,
            reshard_after_forward=again and unit is not model.head,
        )
    if not model.config.tie_embeddings and again:
        embedding = model.embed
        assert isinstance(embedding, FSDPModule)
        embedding.set_unshard_in_backward(False)
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of a model, root first; empty for an unsharded one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_slice(t: Tensor) -> Slice:
    """What this rank stores of a parameter or buffer, for `megacpp.model.init.initialise`."""
    if not isinstance(t, DTensor):
        return whole(t)
    _, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return Slice(t.to_local(), tuple(t.shape), tuple(offset))
