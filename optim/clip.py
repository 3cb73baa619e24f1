"""Clip by the global gradient norm over local shards, with one all-reduce on any mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.torch_extras import dtensors, local_parts, region

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@region("clip")
@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter],
    max_norm: float,
    copies: Iterable[nn.Parameter] = (),
    along: Tensor | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. A
    non-finite norm leaves the gradients unchanged; the caller skips the step.

    Args:
        params: of this rank's part of the model; each pipeline stage passes its own.
        max_norm: 0 measures only.
        copies: parameters that another rank counts already (the tied weight on the second of two
            pipeline stages, whose gradient is the same sum): scaled, but not counted.
        along: `[N]` fp64 numbers of this rank, summed over the ranks in place by the same
            all-reduce.
        loss_scale: factor of the loss; the gradients are divided by it as well.

    Returns:
        The norm before clipping, divided by `loss_scale`: 0-d fp64, the same on every rank.
    """
    params = list(params)
    group = dist.group.WORLD if dtensors(params) else None
    grads = [p.grad for p in params if p.grad is not None]
    ids = {id(p) for p in copies}
    counted = [p.grad for p in params if p.grad is not None and id(p) not in ids]
    device = params[0].device if params else None
    norm = gradient_norm(counted, group, device, along) / loss_scale
    if not grads or (not max_norm and loss_scale == 1.0):
        return norm
    if loss_scale == 1.0 and not norm.is_cuda and norm.item() + 1e-6 <= max_norm:
        return norm  # the factor is 1; on a GPU testing it would wait for the device
    limit = max_norm or torch.inf
    factor = (limit / (norm + 1e-6)).clamp_(max=1.0).where(norm.isfinite(), 1.0) / loss_scale
    local = local_parts(grads)
    for dtype in dict.fromkeys(g.dtype for g in local):
        # foreach is fast with a factor of the tensors' own dtype
        torch._foreach_mul_([g for g in local if g.dtype == dtype], factor.to(dtype))
    return norm


@torch.no_grad()
def gradient_norm(
    grads: list[Tensor],
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    along: Tensor | None = None,
) -> Tensor:
    """Return the 2-norm over all elements of all gradients, each counted once on any mesh.

    Elements that several ranks store count on each of them by a share, so that a non-finite value
    is detected on whichever rank has it. A DTensor is replicated along every axis of its own mesh
    that doesn't shard it; meshes may differ between gradients and between ranks. A plain tensor is
    assumed to be on all ranks of `group`. Norms of single tensors are computed in fp32 or wider;
    their squares and sums in fp64.

    Args:
        grads: gradients of any shapes.
        group: ranks that take part in the all-reduce; None: this process alone.
        device: device of the result if there is no gradient.
        along: `[N]` further fp64 numbers that the same all-reduce sums, in place.
    """
    assert group is not None or not dtensors(grads), "shards need a group"
    ranks = 1 if group is None else dist.get_world_size(group)
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for g, local in zip(grads, local_parts(grads), strict=True):
        copies = ranks if local is g else _copies(g)  # type: ignore[arg-type]
        alike.setdefault((copies, g.dtype), []).append(local)
    square = torch.zeros(1, dtype=torch.float64, device=grads[0].device if grads else device)
    for (copies, dtype), same in alike.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=wide)).double()
        square += norms.square().sum() / copies
    if group is None:
        return square[0].sqrt()
    numbers = square if along is None else torch.cat([square, along])
    dist.all_reduce(numbers, group=group)
    if along is not None:
        along.copy_(numbers[1:])
    return numbers[0].sqrt()


def _copies(g: DTensor) -> int:
    """Return the number of ranks of the gradient's mesh that hold the same shard."""
    mesh, placements = g.device_mesh, g.placements
    assert not any(p.is_partial() for p in placements), f"an unreduced gradient: {placements}"
    # `is_shard` says no to the strided shards that FSDP2 makes over tp (no thread known).
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())
