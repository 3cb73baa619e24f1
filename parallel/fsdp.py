"""FSDP2 over a hybrid model: one unit per block, contract parameters gathered in fp32 by the root.

Mixed precision casts a whole unit to one dtype, so the fp32-contract parameters (norms, `dt_bias`,
`D`, router, ...) can't share a unit with bf16 matrices (pytorch#156784; pytorch#196626 would give
each parameter a dtype of its own). They stay where upstream names put them; the root unit, made
*first* with all other parameters ignored, owns all of them, and the block units ignore them. So
they travel in one all-gather and one reduce-scatter per step for the whole model, in fp32, and no
forward ever casts or copies one.

Routed experts are a unit of their own where their ranks differ from those of the block: whole
experts lie along `ep`, so only the `efsdp` ranks share the storage of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megacpp.model.fp32 import contract_parameters
from megacpp.model.init import Slice, whole
from parallel.mesh import World
from parallel.plans import spread_modules

RESHARD_ABOVE_BYTES = 1 << 30


def shard_model(
    root: nn.Module, world: World, compute_dtype: torch.dtype, reshard: str = "always"
) -> None:
    """Shard every parameter over the data axes of `world`, in place.

    With `reshard` (`always`, or `auto` for a model above 1 GiB of gathered parameters) a block's
    parameters are shards again after its forward and gathered a second time for its backward;
    with `never` they stay whole from forward to backward, or as long as the accumulation boundary
    says. The head, whose backward comes at once, and
    the embedding, whose backward needs no weights, are never gathered twice.

    Gradients are summed, never averaged: the loss is divided once, by the accumulation boundary.
    Parameters keep their dtype (fp32 master); units compute in `compute_dtype`.

    Args:
        root: a HybridLM, or a pipeline stage of one: what it has of `embed`, `blocks`, `head`, ...
    """
    mesh = world.meshes["shard"]
    others = set(root.parameters()) - {p for _, p in contract_parameters(root)}
    wide = MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow = _policy(others, compute_dtype)
    gathered_bytes = sum(_local_numel(p) for p in others) * compute_dtype.itemsize
    again = reshard == "always" or (reshard == "auto" and gathered_bytes > RESHARD_ABOVE_BYTES)
    fully_shard(root, mesh=mesh, mp_policy=wide, ignored_params=others)
    contract = {p for _, p in contract_parameters(root)}  # sharding made new objects of them

    for unit in units_of(root, apart=world.degree("ep") > 1 or world.degree("tp") > 1):
        over = world.meshes["expert_shard"] if unit.experts else mesh
        fully_shard(
            unit.modules if len(unit.modules) > 1 else unit.modules[0],
            mesh=over,
            mp_policy=narrow,
            ignored_params=None if unit.experts else contract,
            shard_placement_fn=_expert_dim(over.shape[-1]) if unit.experts else None,
            reshard_after_forward=again and unit.reshard,
        )
        if again and not unit.in_backward:
            (module,) = unit.modules
            assert isinstance(module, FSDPModule)
            module.set_unshard_in_backward(False)
    for block in _blocks(root):
        if experts := [unit for m in spread_modules(block) for unit in fsdp_units(m)]:
            assert isinstance(block, FSDPModule)
            # Their weights travel while the block's router works.
            block.set_modules_to_forward_prefetch(experts)
    in_fp8 = any(hasattr(_local(p), "fsdp_pre_all_gather") for p in root.parameters())
    for module in fsdp_units(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if in_fp8:
            module.set_custom_all_gather(_as_bytes())


@dataclass(frozen=True)
class FsdpUnit:
    """Modules whose parameters are gathered together.

    Attributes:
        reshard: shards again after the forward, where blocks are.
        in_backward: the backward reads their weights, so it gathers them again.
        experts: routed experts, sharded over `efsdp`.
    """

    modules: list[nn.Module]
    reshard: bool = True
    in_backward: bool = True
    experts: bool = False


def units_of(root: nn.Module, apart: bool) -> list[FsdpUnit]:
    """FSDP units of a model or a pipeline stage, in the order in which they are made.

    Args:
        apart: the ranks that share an expert's storage are others than those of its block.
    """
    own = dict(root.named_children())  # not what a stage borrows of another one
    embed, head, ngram, mtp, top = map(own.get, ("embed", "head", "ngram", "mtp", "top"))
    found: list[FsdpUnit] = []
    if embed is not None and head is not None and _weight(embed) is _weight(head):
        # One parameter in two modules is one unit, whole from the embedding to the loss.
        found += [FsdpUnit([embed, head], reshard=False)]
    else:
        # The backward of a table needs no weights; that of the head comes at once.
        found += [FsdpUnit([embed], in_backward=False)] if embed is not None else []
        found += [FsdpUnit([head], reshard=False)] if head is not None else []
    if ngram is not None:
        found += [FsdpUnit([ngram.get_submodule("tables")], in_backward=False)]
        # its projection, which is small, and which the backward reads
        found += [FsdpUnit([ngram], reshard=False)]
    found += [FsdpUnit([mtp])] if mtp is not None else []
    # Gradients of `top` are made in the forward.
    found += [FsdpUnit([top], in_backward=False)] if top is not None else []
    for block in _blocks(root):
        found += [FsdpUnit([m], experts=True) for m in spread_modules(block)] if apart else []
        found += [FsdpUnit([block])]
    return found


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return every FSDP unit of a model, root first; none of an unsharded one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard_slice(t: Tensor) -> Slice:
    """Return the part of a tensor that this rank stores, for `megacpp.model.init.initialise`.

    Args:
        t: parameter or buffer of any shape.
    """
    if not isinstance(t, DTensor):
        return whole(t)
    _, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return Slice(t.to_local(), tuple(t.shape), tuple(offset))


def _expert_dim(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a rule: shard rows inside experts if there are fewer than shards, else whole experts.

    FSDP2 shards only the first dim unevenly, so rows must divide; else some ranks hold none.
    """

    def choose(p: nn.Parameter) -> Shard | None:
        num_experts, rows = p.to_local().shape[:2] if isinstance(p, DTensor) else p.shape[:2]
        return Shard(1) if num_experts < shards and rows % shards == 0 else None

    return choose


def _policy(parameters: set[nn.Parameter], compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return the policy: compute in one dtype, reduce in at least fp32."""
    same = all(p.dtype == compute_dtype for p in parameters)
    return MixedPrecisionPolicy(
        param_dtype=None if same else compute_dtype,
        reduce_dtype=None if same else torch.float32,
        cast_forward_inputs=False,
    )


def _as_bytes() -> Any:
    """Return an all-gather that sends FP8 numbers as bytes: gloo has no FP8 type.

    With it a CPU gathers the bytes that a GPU does. FSDP2 itself does so where a unit also has
    other numbers.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class AsBytes(DefaultAllGather):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> Any:
            if input_tensor.itemsize == 1:
                output_tensor, input_tensor = (
                    t.view(torch.uint8) for t in (output_tensor, input_tensor)
                )
            return super().__call__(output_tensor, input_tensor, group, async_op)

    return AsBytes()


def _blocks(root: nn.Module) -> Iterable[nn.Module]:
    return root.get_submodule("blocks").children()


def _weight(module: nn.Module) -> nn.Parameter | None:
    return module._parameters["weight"]


def _local(p: Tensor) -> Tensor:
    return p._local_tensor if isinstance(p, DTensor) else p


def _local_numel(p: nn.Parameter) -> int:
    return _local(p).numel()
