"""AdamW whose weight decay opposes no update (`optim.cautious_weight_decay`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cautious_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update w <- w - lr (u + weight_decay * [u w >= 0] * w), u the bias-corrected update.

    Decay acts only where u and w have the same sign, so that both shrink the entry, and where u is
    zero, so that it opposes no update (Chen et al., 2510.12402, algorithm 1: the sign is that of
    the update, not of the gradient). Temporary memory: two lists of the weights' size.

    Args:
        group: settings, as in `adamw_update`.
        weights: any shape; updated.
        grads: gradients of the weights' shapes.
        exp_avgs: first moments; updated.
        exp_avg_sqs: second moments; updated.
        steps: 0-d step counters, incremented already.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    counts_P = torch.stack(steps).double()  # P parameters; stays on the device
    corrections1 = list((1 - beta1**counts_P).unbind())
    roots2 = list((1 - beta2**counts_P).sqrt().unbind())
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_div_(denominators, roots2)
    torch._foreach_add_(denominators, group["eps"])
    updates = list(torch._foreach_div(exp_avgs, denominators))
    torch._foreach_div_(updates, corrections1)
    for weight, update, denominator in zip(weights, updates, denominators, strict=True):
        decay = denominator.copy_(weight).mul_(group["weight_decay"])  # reuses its memory
        update.add_(decay.mul_(update * weight >= 0))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(weights, updates)
    else:
        torch._foreach_sub_(weights, updates, alpha=lr)
