"""The arithmetic of AdamW on plain tensors: torch's fused kernel, and the form with cautious decay.

Lists run in parallel over parameters. A group is a mapping with `lr` (float or 0-d tensor),
`betas`, `eps`, `weight_decay` and, if it is to be on, `cautious`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adamw_kernel(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """One update in place, of tensors that share a dtype and a device; `steps` are counted.

    Weights, gradients and moments must agree in dtype: torch 2.13's kernel refuses a mixture, on
    a CPU and on a GPU alike (pytorch#147653 would take fp32 weights with bf16 moments).
    """
    if group.get("cautious") and group["weight_decay"]:
        cautious_adamw(group, weights, grads, exp_avgs, exp_avg_sqs, steps)
        return
    torch._fused_adamw_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],  # of amsgrad
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def cautious_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """w <- w - lr (u + weight_decay * [u w >= 0] * w), with u the bias-corrected Adam update.

    Decay acts only where u and w have the same sign, so that both of them shrink the entry, and
    where u is zero, so that nothing is worked against (Chen et al., 2510.12402, algorithm 1: the
    sign is that of the update, not of the gradient). Temporaries: two lists of the weights' size.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    counts_P = torch.stack(steps).double()  # P parameters; no value of it leaves the device
    corrections1 = list((1 - beta1**counts_P).unbind())
    roots2 = list((1 - beta2**counts_P).sqrt().unbind())
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_div_(denominators, roots2)
    torch._foreach_add_(denominators, group["eps"])
    updates = list(torch._foreach_div(exp_avgs, denominators))
    torch._foreach_div_(updates, corrections1)
    for weight, update, denominator in zip(weights, updates, denominators, strict=True):
        decay = denominator.copy_(weight).mul_(group["weight_decay"])  # its memory is free by now
        update.add_(decay.mul_(update * weight >= 0))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(weights, updates)
    else:
        torch._foreach_sub_(weights, updates, alpha=lr)
