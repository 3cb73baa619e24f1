"""AdamW by torch's fused kernel on the local shards of parameters.

The update is elementwise, so shards exchange nothing. Bypassing DTensor's dispatch and torch's
per-parameter bookkeeping leaves little more than the kernel, which matters for small or many
parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.torch_extras import local_parts
from optim.cautious import cautious_adamw


@torch.no_grad()
def adamw_update(
    group: dict[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
) -> None:
    """Update parameters that all have a gradient; equals `torch.optim.AdamW(fused=True)`.

    Args:
        group: `lr` (float or 0-d tensor), `betas`, `eps`, `weight_decay`, and `cautious`: weights
            decay only where the update shrinks them too (`cautious_adamw`).
        params: parameters with gradients.
        states: `new_state` of each parameter (optim/initial_state.py), of any kind, with `step`, a
            0-d fp32 tensor on the parameter's device that the caller has incremented already.
    """
    kinds: dict[Any, list[tuple[Tensor, dict[str, Tensor]]]] = {}
    moments = local_parts(state["exp_avg"] for state in states)
    for p, state, moment in zip(params, states, moments, strict=True):
        update = _fused_update
        if hasattr(moment, "codes"):  # 8 or 4 bit
            from optim.low_bit import low_bit_update

            update = low_bit_update
        elif moment.device != p.device:
            from optim.offload import offloaded_update

            update = offloaded_update
        kinds.setdefault((update, p.dtype), []).append((p, state))
    for (update, _), members in kinds.items():
        update(group, [p for p, _ in members], [state for _, state in members])


def _fused_update(
    group: dict[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
) -> None:
    """Update all parameters of one dtype by one kernel call, with moments of the same dtype."""
    adamw_kernel(
        group,
        local_parts(params),
        local_parts(p.grad for p in params if p.grad is not None),
        local_parts(state["exp_avg"] for state in states),
        local_parts(state["exp_avg_sq"] for state in states),
        [state["step"] for state in states],
    )


def adamw_kernel(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update tensors of one dtype and device in place.

    torch 2.13's kernel rejects weights, gradients and moments of different dtypes, on a CPU and on
    a GPU alike (pytorch#147653 would take fp32 weights with bf16 moments).

    Args:
        group: settings, as in `adamw_update`.
        weights: any shape; updated.
        grads: gradients of the weights' shapes.
        exp_avgs: first moments; updated.
        exp_avg_sqs: second moments; updated.
        steps: 0-d step counters, incremented already.
    """
    if group.get("cautious") and group["weight_decay"]:
        cautious_adamw(group, weights, grads, exp_avgs, exp_avg_sqs, steps)
        return
    torch._fused_adamw_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],  # max_exp_avg_sqs, for amsgrad only
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
