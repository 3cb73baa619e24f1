"""Learning rate schedules: factors are pure functions of the number of updates made so far."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from megacpp.config.schema import OptimConfig


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int, updates_done: int = 0
) -> LambdaLR:
    """Return a scheduler that sets each group's rate to its peak times `lr_multiplier`.

    Step it after each optimizer step. A group's peak is the `initial_lr` that it was loaded with,
    or its current `lr`.

    Args:
        optimizer: optimizer with the groups.
        config: schedule and its settings.
        total_steps: updates of the whole run.
        updates_done: updates made so far; the rates equal those of an uninterrupted run, bit for
            bit.
    """
    for group in optimizer.param_groups:
        lr = group["lr"]
        group.setdefault("initial_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)

    def factor(step: int) -> float:
        return lr_multiplier(step, total_steps, config)

    return LambdaLR(optimizer, factor, last_epoch=updates_done - 1)


def lr_multiplier(step: int, total: int, config: OptimConfig) -> float:
    """Return the factor of every peak learning rate at update `step` (from 0) of `total`.

    Warmup lasts `config.warmup_steps`, or `warmup_ratio` of `total`; the tail of `wsd` is
    `decay_ratio` of `total`. Steps past `total` stay at `final_lr_ratio`.
    """
    warmup = config.warmup_steps or round(config.warmup_ratio * total)
    if config.schedule == "constant":
        return warmup_constant(step, warmup)
    if config.schedule == "cosine":
        return warmup_cosine(step, warmup, total, config.final_lr_ratio)
    decay = round(config.decay_ratio * total)
    return warmup_stable_decay(step, warmup, decay, total, config.final_lr_ratio)


def warmup_constant(step: int, warmup: int) -> float:
    """Return 1 / warmup, 2 / warmup, ..., 1, 1, 1: the first update moves already."""
    return min(1.0, (step + 1) / max(1, warmup))


def warmup_cosine(step: int, warmup: int, total: int, final: float) -> float:
    """Return warmup, then half a cosine from 1 to `final` at `total`, one past the last.

    Args:
        step: update, from 0.
        warmup: number of warmup updates.
        total: number of updates.
        final: factor at `total`.
    """
    if step < warmup:
        return warmup_constant(step, warmup)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_stable_decay(step: int, warmup: int, decay: int, total: int, final: float) -> float:
    """Return warmup, then 1, then a line over the last `decay` updates to `final`.

    Args:
        step: update, from 0.
        warmup: number of warmup updates.
        decay: number of updates of the final decay.
        total: number of updates.
        final: factor at `total`.
    """
    start = max(warmup, total - decay)
    if step < start:
        return warmup_constant(step, warmup)
    done = min(1.0, (step - start) / max(1, total - start))
    return 1.0 + (final - 1.0) * done
