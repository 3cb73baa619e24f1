"""Ablation: its arithmetic, its flags, and the completeness of the record in the book."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from bench.ablate import (
    ALL,
    BASE,
    MIMO,
    RECORD,
    AblationRun,
    curve_of,
    flags_of,
    lines_of,
    model_of,
    table,
    variants,
)
from megacpp.config.arguments import parse_run
from megacpp.config.presets import tiny, tiny_full
from megacpp.model.count import count_parameters

FIGURES = {"parameters": 6_000_000, "active": 4_000_000, "flops_per_token": 9, "peak_bytes": 1}


def record(values: dict[str, list[float]], speeds: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "models": {name: FIGURES for name in values},
        "runs": [
            {"variant": name, "seed": seed, "bits_per_byte": value, "tokens_per_s": speed}
            for name in values
            for seed, (value, speed) in enumerate(zip(values[name], speeds[name], strict=True), 1)
        ],
    }


@pytest.mark.parametrize("variant", [*variants(), MIMO])
def test_the_flags_of_a_run_make_its_model(variant: str) -> None:
    run = AblationRun(variant, 2, 10, 8)
    config = parse_run(run.command()[2:], 1).config
    assert config.model == model_of(variant)
    same = dataclasses.replace(tiny().optim, warmup_steps=config.optim.warmup_steps)
    assert config.optim == same and config.run.seed == 2 and config.run.steps == 10
    assert (variant == BASE) == (not flags_of(variant))


def test_all_features_are_the_preset() -> None:
    assert model_of(ALL) == tiny_full().model
    for variant in set(variants()) - {BASE, ALL}:
        assert flags_of(variant).items() <= flags_of(ALL).items(), variant


def test_differences_are_taken_seed_by_seed() -> None:
    """Seeds differ by far more than variants: of 0.02, 0.03 and 0.04 less the interval is
    4.303 * 0.01 / sqrt(3)."""
    values = {BASE: [2.0, 3.0, 4.0], "mtp": [1.98, 2.97, 3.96], "mhc": [2.01, 2.99, 4.0]}
    speeds = {BASE: [100.0, 50.0, 80.0], "mtp": [50.0, 20.0, 48.0], "mhc": [99.0, 50.0, 81.0]}
    base, mtp, mhc = lines_of(record(values, speeds))
    assert base.within is None and base.difference == 0 and base.speed == (1, 1, 1)
    assert math.isclose(mtp.difference, -0.03) and mtp.verdict == "better"
    assert mtp.within is not None and math.isclose(mtp.within, 4.303 * 0.01 / 3**0.5, rel_tol=1e-9)
    assert mtp.speed == (0.5, 0.4, 0.6)
    assert math.isclose(mhc.difference, 0.0, abs_tol=1e-12) and mhc.verdict == "within noise"
    assert "| mtp | 6.00M | 2.9700 | -0.0300 ± 0.0248 | better | 0.50 (0.40 to 0.60) |" in table(
        record(values, speeds)
    )


def test_one_seed_has_no_error_bar() -> None:
    lines = lines_of(record({BASE: [2.0], "top": [1.0]}, {BASE: [1.0], "top": [1.0]}))
    assert [line.within for line in lines] == [None, None] and lines[1].verdict == ""


def test_the_record_is_whole() -> None:
    """Every variant with every seed, the same tokens, no step left out."""
    found = json.loads(RECORD.read_text())
    runs = {(run["variant"], run["seed"]): run for run in found["runs"]}
    assert set(runs) == {(variant, seed) for variant in variants() for seed in (1, 2, 3)}
    assert {run["tokens"] for run in runs.values()} == {found["tokens"]}
    assert not any(run["skipped"] for run in runs.values())


def test_the_curve_is_the_mean_of_each_tenth() -> None:
    losses = [float(step) for step in range(25)]
    found = curve_of(losses)
    assert len(found) == 10 and found[:2] == [0.5, 3.0] and found[-1] == 23.0
    assert curve_of([2.0, 1.0]) == [2.0, 1.0]


def test_mimo_was_trained_against_siso_at_equal_parameters() -> None:
    found = json.loads((RECORD.parent / "mimo.json").read_text())
    runs = {run["variant"]: run for run in found["runs"]}
    assert list(runs) == [BASE, MIMO] and found["steps"] == 200
    assert {run["tokens"] for run in runs.values()} == {found["tokens"]}
    assert not any(run["skipped"] for run in runs.values())
    siso, mimo = (count_parameters(model_of(v)) for v in (BASE, MIMO))
    assert found["models"][MIMO]["parameters"] == mimo.total
    for a, b in ((siso.total, mimo.total), (siso.active, mimo.active)):
        assert abs(a / b - 1) < 1e-3
    for run in runs.values():
        assert len(run["losses"]) == 10 and min(run["losses"]) == run["losses"][-1] < 4
