"""Narrow numbers end to end: rounding and nothing else, the loss scale at work, twenty steps.

The long comparison is bench/precision.py (docs/34-precision.md).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointing.apply import ActivationCheckpointing
from megacpp.blocks.dense.config import MLPConfig
from megacpp.config.schema import (
    Config,
    DataConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megacpp.data.batches import Batch
from megacpp.kernels.backend import Kernels
from megacpp.model.hybrid import HybridLM
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import autocast_dtype, build_model
from parallel.mesh import World
from tests.checkpointing.fp8_cases import changed
from tests.differences import largest
from tests.model.small import SMALL_MOE, small
from tests.synthetic import ragged_batch

CPU = torch.device("cpu")
ROWS, T, WORDS = 4, 32, 48
FP8 = {"dtype": "bf16", "fp8": "torchao", "fp8_ends": 0}


def config_of(pattern: str, seed: int = 1, **precision: Any) -> Config:
    moe = SMALL_MOE | {"hidden_dim": 32, "shared_hidden_dim": 48}
    model = small(pattern, dim=32, vocab_size=WORDS, mlp=MLPConfig(hidden_dim=48))
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, **moe))  # type: ignore[arg-type]
    config = Config(
        model=model,
        run=RunConfig(seed=seed, steps=20),
        data=DataConfig(seq_len=T),
        train=TrainConfig(device_batch_size=ROWS, device="cpu"),
        optim=OptimConfig(name="adamw", lr=3e-3, schedule="constant"),
    )
    return changed(config, precision=precision)


@dataclasses.dataclass
class Trained:
    losses: list[float]
    scales: list[float]
    skipped: int
    gradients: dict[str, Tensor]  # of the first step that was taken


def train(config: Config, steps: int, first: int = 0) -> Trained:
    """Train on one process as train.py does, from the rows of step `first` on."""
    world = World(0, 1, CPU)
    model = build_model(config, world, ActivationCheckpointing(config, CPU))
    optimizer = build_optimizer(model, config, world.holders)
    boundary = AccumulationBoundary(model, world, config)
    found = Trained([], [], 0, {})
    for step in range(steps):
        scale = boundary.loss_scale.value
        sums = boundary.accumulate([batch_of(first + step)], step)
        norm = clip_gradients(model.parameters(), 1.0, copies=boundary.copies, loss_scale=scale)
        status = boundary.check_step(sums, norm)
        if status.healthy:
            if not found.gradients:
                named = model.named_parameters()
                found.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
            optimizer.step()
        optimizer.zero_grad()
        boundary.finish_step(status)
        found.losses.append(status.loss)
        found.scales.append(scale)
        found.skipped += not status.healthy
    return found


def batch_of(step: int) -> Batch:
    """Few different rows, so that twenty steps learn something."""
    return ragged_batch(range(step % 4 * ROWS, (step % 4 + 1) * ROWS), T, WORDS)


def gradients_of(dtype: str) -> dict[str, Tensor]:
    """Return the gradients of four first steps, each of other rows, side by side."""
    each = [train(config_of("AMRF", dtype=dtype), 1, first).gradients for first in range(4)]
    return {n: torch.stack([gradients[n].double() for gradients in each]) for n in each[0]}


def test_gradients_differ_by_roundings_and_nothing_else() -> None:
    """fp16 has three bits more than bf16, so it errs by an eighth: a wrong formula wouldn't.

    A gradient passes through four blocks and back, some ten roundings in each, two of them of the
    residual stream: of 80 independent ones, 2^-8 (2^-11) at most, nine add up. The gradients of
    four batches together, since in one the terms of a sum may cancel. Blocks without experts,
    where a rounding may change a choice.
    """
    exact, wrong = gradients_of("fp64"), dict[str, list[float]]()
    for dtype, bits in (("bf16", 8), ("fp16", 11)):
        found = gradients_of(dtype)
        wrong[dtype] = [float((found[n] - g).norm() / g.norm()) for n, g in exact.items()]
        assert largest(wrong[dtype]) <= 9 * 2.0**-bits
    ratios = [a / b for a, b in zip(wrong["bf16"], wrong["fp16"], strict=True)]
    assert 6 <= statistics.median(ratios) <= 11


def test_operations_are_cast_by_autocast_where_no_fsdp_does() -> None:
    config = Config(precision=PrecisionConfig("bf16"))
    alone, of_two = World(0, 1, CPU), World(0, 2, CPU, {"world": None})  # type: ignore[dict-item]
    assert autocast_dtype(config, alone) == torch.bfloat16
    assert autocast_dtype(config, of_two) is None
    assert autocast_dtype(Config(precision=PrecisionConfig("fp32")), alone) is None


def test_a_model_has_its_kernels_when_it_is_prepared() -> None:
    """`prepare` compiles blocks, and compiled code depends on their kernels."""
    config = changed(config_of("A"), kernels={"attention": "reference"})
    seen: set[str] = set()

    def prepare(model: HybridLM) -> None:
        found = (getattr(module, "kernels", None) for module in model.modules())
        seen.update(kernels.attention for kernels in found if isinstance(kernels, Kernels))

    build_model(config, World(0, 1, CPU), prepare)
    assert seen == {"reference"}


def test_fp16_finds_its_loss_scale() -> None:
    """Halved until gradients fit into fp16, and doubled again after so many good steps."""
    run = train(config_of("AEF", dtype="fp16", loss_scale=2.0**32, loss_scale_growth=4), 24)
    assert run.scales[:10] == [2.0 ** (32 - i) for i in range(10)] and run.skipped < 20
    for before, after in zip(run.scales, run.scales[1:], strict=False):
        assert after in (before / 2, before, before * 2)
    assert any(b == 2 * a for a, b in zip(run.scales, run.scales[1:], strict=False)), "grows"
    usual = train(config_of("AEF", dtype="fp16"), 4)
    assert usual.skipped == 0 and usual.scales == [65536.0] * 4


@functools.lru_cache
def last_losses(seed: int, **precision: Any) -> float:
    return statistics.mean(train(config_of("AEMFE", seed, **precision), 20).losses[-4:])


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "fp8": FP8,
    "fp8 rowwise": FP8 | {"fp8_recipe": "rowwise"},
    "fp8 everywhere": FP8 | {"fp8_layers": "AEFMR"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_twenty_steps_end_where_fp32_does(name: str) -> None:
    """Within twice the standard deviation of fp32 runs from three other first weights."""
    seeds = [last_losses(seed, dtype="fp32") for seed in (1, 2, 3)]
    learned = train(config_of("AEMFE", dtype="fp32"), 1).losses[0] - seeds[0]
    bound = 2 * statistics.stdev(seeds)
    difference = abs(last_losses(1, **VARIANTS[name]) - seeds[0])
    assert 0 < difference <= bound < learned / 4, (difference, bound, learned)
