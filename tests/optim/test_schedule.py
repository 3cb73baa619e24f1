"""Learning-rate multipliers at the points where they turn, by hand, and the scheduler of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from megacpp.config.schema import OptimConfig
from optim.schedule import (
    build_scheduler,
    lr_multiplier,
    warmup_constant,
    warmup_cosine,
    warmup_stable_decay,
)


def test_warmup_starts_above_zero_and_ends_at_one() -> None:
    assert [warmup_constant(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_constant(0, 0) == 1


def test_cosine_by_hand() -> None:
    """4 of warmup, then 8 from 1 to 0.1: halfway, at step 8, it is (1 + 0.1) / 2."""
    at = [warmup_cosine(step, 4, 12, 0.1) for step in range(13)]
    assert at[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert at[8] == pytest.approx(0.55, abs=1e-15)
    assert at[6] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)), abs=1e-15)
    assert at[12] == pytest.approx(0.1, abs=1e-15)
    assert all(a > b for a, b in pairwise(at[4:]))
    assert warmup_cosine(99, 4, 12, 0.1) == at[12]


def test_stable_decay_by_hand() -> None:
    at = [warmup_stable_decay(step, 2, 4, 10, 0.2) for step in range(11)]
    assert at[:7] == [0.5, 1, 1, 1, 1, 1, 1]
    assert at[7:] == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=1e-15)
    assert warmup_stable_decay(99, 2, 4, 10, 0.2) == pytest.approx(0.2, abs=1e-15)


def test_all_warmup_and_no_steps() -> None:
    assert warmup_cosine(4, 5, 5, 0.1) == 1
    assert warmup_stable_decay(4, 5, 3, 5, 0.1) == 1
    assert warmup_cosine(0, 0, 0, 0.1) == 1


@pytest.mark.parametrize(
    "config, expected",
    [
        # 100 updates: a warmup of 3 (0.03 of them), seen at updates 0, 2, 50 and 100.
        (OptimConfig(schedule="constant"), [1 / 3, 1, 1, 1]),
        (OptimConfig(schedule="cosine"), [1 / 3, 1, None, 0.1]),
        (OptimConfig(schedule="wsd"), [1 / 3, 1, 1, 0.1]),
        (OptimConfig(schedule="wsd", warmup_steps=10), [0.1, 0.3, 1, 0.1]),
        (OptimConfig(schedule="wsd", decay_ratio=1.0, final_lr_ratio=0.0), [1 / 3, 1, None, 0]),
    ],
)
def test_a_configuration_picks_its_schedule(
    config: OptimConfig, expected: list[float | None]
) -> None:
    for step, want in zip((0, 2, 50, 100), expected, strict=True):
        got = lr_multiplier(step, 100, config)
        assert 0.1 < got < 0.6 if want is None else got == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_scheduler_resumes_to_the_bit(name: Any, tensor: bool) -> None:
    """Built after k updates it gives the rate of k steps, and goes on in the same way."""
    config = OptimConfig(schedule=name, warmup_steps=4)

    def optimizer() -> torch.optim.Optimizer:
        rates = [torch.tensor(r, dtype=torch.float64) if tensor else r for r in (0.3, 0.02)]
        groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates]
        return torch.optim.SGD(groups)

    def lrs(of: torch.optim.Optimizer) -> list[float]:
        return [float(group["lr"]) for group in of.param_groups]

    straight = optimizer()
    scheduler = build_scheduler(straight, config, 20)
    for k in range(25):
        factor = lr_multiplier(k, 20, config)
        assert lrs(straight) == [0.3 * factor, 0.02 * factor]
        resumed = optimizer()
        again = build_scheduler(resumed, config, 20, updates_done=k)
        assert lrs(resumed) == lrs(straight)
        straight.step()
        scheduler.step()
        resumed.step()
        again.step()
        assert lrs(resumed) == lrs(straight)
        # A loaded optimizer brings the rate of then, but also its peak.
        build_scheduler(resumed, config, 20, updates_done=3)
        assert lrs(resumed) == [lr * lr_multiplier(3, 20, config) for lr in (0.3, 0.02)]
