"""Warnings about norms and losses: what is reported, what may enter an average, exact resume."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from megacpp.run.health import Health

NOT_FINITE = [math.nan, math.inf, -math.inf]


def steady(health: Health, steps: int, norm: float = 1.0) -> None:
    """Losses of 2.9 and 3.1 in turn: mean 3, deviation 0.1."""
    for step in range(steps):
        assert health.observe(step, 2.9 if step % 2 else 3.1, norm) == []


@pytest.mark.parametrize(
    ("norm", "word"),
    [(9.9, ""), (10.0, "warning"), (99.0, "warning"), (100.0, "CRITICAL"), (1e9, "CRITICAL")],
)
def test_a_norm_against_the_average_before_it(norm: float, word: str) -> None:
    """Check the order: an average with the spike would be 100.99 / 2 of it after one step."""
    for steps in (1, 50):
        health = Health()
        steady(health, steps)
        lines = health.observe(steps, 3.0, norm)
        assert health.figures()["grad_norm_ratio"] == pytest.approx(norm, rel=1e-12)
        assert len(lines) == bool(word)
        for line in lines:
            assert line.startswith(f"step {steps + 1}: {word}: gradient norm {norm:.4g} is ")
            assert "times its average 1 (limit 1" in line and "\n" not in line


def test_the_first_norm_has_nothing_to_compare_with() -> None:
    health = Health()
    assert health.observe(0, 3.0, 1e6) == []
    assert health.figures() == {"grad_norm_ratio": None, "loss_sigma": None}
    silent = Health()
    assert silent.observe(0, 3.0, 0.0) == silent.observe(1, 3.0, 5.0) == []
    assert silent.figures()["grad_norm_ratio"] is None  # of an average of 0


def test_the_average_weighs_as_an_exponential_one_without_its_start() -> None:
    """Sum of (1 - alpha)^age x over the sum of those weights, at any age."""
    health, alpha, noise = Health(alpha=0.05, warn=1e9, critical=1e9), 0.05, random.Random(1)
    norms = [noise.lognormvariate(0, 1) for _ in range(400)]
    for step, norm in enumerate(norms):
        health.observe(step, 3.0, norm)
        if step:
            weights = [(1 - alpha) ** (step - 1 - i) for i in range(step)]
            average = sum(w * x for w, x in zip(weights, norms, strict=False)) / math.fsum(weights)
            ratio = health.figures()["grad_norm_ratio"]
            assert ratio == pytest.approx(norm / average, rel=1e-12)


def test_a_loss_against_mean_and_deviation_of_the_window() -> None:
    noise, health = random.Random(2), Health(window=40, least=20)
    losses = [noise.gauss(3.0, 0.2) for _ in range(100)]
    for step, loss in enumerate(losses):
        assert health.observe(step, loss, 1.0) == []
        sigma, window = health.figures()["loss_sigma"], losses[max(0, step - 40) : step]
        if step < 20:
            assert sigma is None
            continue
        mean, deviation = statistics.fmean(window), statistics.stdev(window)
        assert sigma == pytest.approx((loss - mean) / deviation, rel=1e-9)


@pytest.mark.parametrize("seen", [31, 32, 128, 500])
def test_a_loss_spike(seen: int) -> None:
    health = Health()
    steady(health, seen)
    deviation = statistics.stdev([2.9 if i % 2 else 3.1 for i in range(min(seen, 128))])
    fine = Health()
    fine.restore(health.state())
    assert fine.observe(seen, 3.0 + 5.99 * deviation, 1.0) == []
    lines = health.observe(seen, 3.0 + 6.01 * deviation, 1.0)
    if seen < 32:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"step {seen + 1}: warning: loss 3.6")
        assert f"is 6.0 sigma above the mean 3.0000 of the last {min(seen, 128)} steps" in line
    assert health.observe(seen + 1, 0.0, 1.0) == []  # a fall is no spike


def test_equal_losses_and_their_rounding_are_no_spike() -> None:
    for noise in (0.0, 1e-9):
        health = Health()
        for step in range(60):
            assert health.observe(step, 3.0 + noise * (step % 2), 1.0) == []
        assert health.observe(60, 3.0 + 1.7e-5, 1.0) == []
        fresh = Health()
        fresh.restore({**health.state(), "losses": health.state()["losses"][:60]})
        assert len(fresh.observe(60, 3.0 + 1.9e-5, 1.0)) == 1
    zero = Health()
    for step in range(60):
        assert zero.observe(step, 0.0, 1.0) == []
    assert zero.figures()["loss_sigma"] is None


def test_large_norms_in_a_row_are_spikes_in_a_row() -> None:
    """The average takes ten times itself of each, so that it doesn't hide the next one."""
    health = Health()
    steady(health, 40)
    for step in range(40, 60):
        assert len(health.observe(step, 3.0, 1000.0)) == 1
    assert health.spikes == 20
    assert health.observe(60, 3.0, 1.0) == [] and health.spikes == 0
    for step in range(61, 400):
        health.observe(step, 3.0, 1000.0)
    assert health.spikes == 0, "a level that stays is taken in"
    young = Health()
    steady(young, 31)
    for spikes in (0, 1):
        assert young.observe(31 + spikes, 3.0, 1000.0) and young.spikes == spikes


def test_a_higher_level_is_reported_and_then_taken_in() -> None:
    health = Health()
    steady(health, 128)
    reported = [bool(health.observe(step, 6.0, 1.0)) for step in range(128, 256)]
    assert reported[0] and not any(reported[8:])


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("what", ["loss", "norm", "both"])
def test_what_is_not_finite_leaves_no_trace(bad: float, what: str) -> None:
    health, clean = Health(), Health()
    for h in (health, clean):
        steady(h, 64)
    for step in range(64, 70):
        loss = bad if what in ("loss", "both") else 3.0
        norm = bad if what in ("norm", "both") else 1.0
        assert health.observe(step, loss, norm) == []
        figures = health.figures()
        assert (figures["loss_sigma"] is None) == (what != "norm")
        assert (figures["grad_norm_ratio"] is None) == (what != "loss")
    state, before = health.state(), clean.state()
    if what != "norm":
        assert state["losses"] == before["losses"]
    if what != "loss":
        assert (state["average"], state["weight"]) == (before["average"], before["weight"])
    lines = health.observe(70, 9.0, 50.0)
    assert len(lines) == 2 and "gradient norm 50 is 50.0 times" in lines[0]
    assert "sigma above" in lines[1]


def test_the_largest_floats_do_no_harm() -> None:
    health = Health()
    steady(health, 64)
    for step in range(64, 200):
        health.observe(step, 1.7e308, 1.7e308)
    json.dumps(health.state(), allow_nan=False)
    assert health.observe(200, 3.0, 1.0) == []


@pytest.mark.parametrize("stop", [0, 1, 20, 32, 130, 202, 299])
def test_resumed_is_never_stopped(stop: int) -> None:
    """n steps, saved as JSON and read back, m more: n + m steps to the last bit."""
    noise = random.Random(3)
    steps = [(noise.gauss(3, 0.1), noise.lognormvariate(0, 1.5)) for _ in range(300)]
    steps[50], steps[140], steps[290] = (math.nan, 1.0), (9.0, 500.0), (9.0, math.inf)
    steps[200:203] = [(20.0, 1.0), (50.0, 1.0), (150.0, 1.0)]
    straight, first, second = Health(), Health(), Health()
    expected = [(straight.observe(i, *step), straight.figures()) for i, step in enumerate(steps)]
    found = [(first.observe(i, *steps[i]), first.figures()) for i in range(stop)]
    saved = json.dumps(first.state(), allow_nan=False)
    assert stop != 202 or first.spikes == 2, "stopped within a streak"
    second.restore(json.loads(saved))
    assert second.state() == first.state() and json.dumps(second.state()) == saved
    found += [(second.observe(i, *steps[i]), second.figures()) for i in range(stop, 300)]
    assert found == expected and second.state() == straight.state()
    assert sum(len(lines) for lines, _ in expected) >= 3


def test_a_shorter_window_keeps_the_newest() -> None:
    long, short = Health(), Health(window=40)
    steady(long, 100)
    short.restore(long.state())
    assert short.state()["losses"] == long.state()["losses"][-40:]
