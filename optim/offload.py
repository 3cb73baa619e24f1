"""AdamW with moments in host memory, for parameters on a GPU.

A step copies gradients and weights to the host, runs the CPU's fused kernel and copies the new
weights back: 12 bytes a parameter over the bus, to save 8 bytes a parameter of device memory. The
host holds 16 bytes a parameter meanwhile. Weights are fetched rather than kept on the host, because
other code writes to them too, such as checkpoint loading.

Muon has no such form: its momentum is read where matrices are orthogonalised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.errors import config_error
from megacpp.torch_extras import local_part
from optim.adamw import adamw_kernel
from optim.low_bit import like


def new_offloaded_state(parameter: Tensor, force: bool = False) -> dict[str, Tensor]:
    """Return zero moments `exp_avg` and `exp_avg_sq` in pinned host memory.

    Args:
        parameter: any shape.
        force: accept parameters on the host too.

    Raises:
        ConfigError: the parameter is on the host already.
    """
    local = local_part(parameter)
    if not (local.is_cuda or force):
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "parameters are in the memory of the host already, so nothing can be offloaded",
            "--optim.adamw_state fp32, or --train.device cuda",
        )
    return {
        name: like(parameter, _host_buffer(local).zero_()) for name in ("exp_avg", "exp_avg_sq")
    }


@torch.no_grad()
def offloaded_update(
    group: dict[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
) -> None:
    """Run `adamw_update` on the host; the CPU works while copies of later parameters arrive."""
    if not params:
        return
    lr = group["lr"]
    group = {**group, "lr": lr.cpu() if isinstance(lr, Tensor) else lr}
    arriving = []
    for p in params:
        assert p.grad is not None
        here = _to_host(local_part(p)), _to_host(local_part(p.grad))
        arriving.append((*here, _mark(local_part(p))))
    steps = torch.stack([state["step"] for state in states]).cpu().unbind()
    for p, state, step, copies in zip(params, states, steps, arriving, strict=True):
        weight, grad, arrived = copies
        if arrived is not None:
            arrived.synchronize()
        moments = [local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        adamw_kernel(group, [weight], [grad], [moments[0]], [moments[1]], [step])
        # torch's pinned allocator doesn't reuse `weight` before the copy has ended.
        local_part(p).copy_(weight, non_blocking=True)


def _host_buffer(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)


def _to_host(t: Tensor) -> Tensor:
    return _host_buffer(t).copy_(t, non_blocking=True)


def _mark(t: Tensor) -> torch.cuda.Event | None:
    """Record an event after the work queued so far on the tensor's device; None on a CPU."""
    if not t.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(t.device))
    return event
