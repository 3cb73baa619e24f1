"""Comparison of precisions: its arithmetic, its order, its commands; no training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.precision import (
    BASE,
    RECORD,
    TAIL,
    VARIANTS,
    PrecisionRun,
    lines_of,
    measure,
    plan,
    seed_bound,
    table,
)
from megacpp.config.arguments import parse_run


def run_of(variant: str, seed: int, held_out: float, losses: list[float]) -> dict[str, Any]:
    figures = {"variant": variant, "seed": seed, "held_out": held_out, "losses": losses}
    return figures | {"skipped": seed - 1}


def test_a_variant_is_compared_with_its_reference_seed_by_seed() -> None:
    flat, bump = [2.0] * (2 * TAIL), [2.0] * TAIL + [2.5] * TAIL
    runs = [run_of(BASE, seed, loss, flat) for seed, loss in ((1, 3.0), (2, 3.2), (3, 3.4))]
    runs += [run_of("bf16", 1, 3.5, flat), run_of("fp8", 1, 3.45, bump)]
    record = {"runs": runs}
    assert seed_bound(record) == pytest.approx(0.4)
    lines = {line.variant: line for line in lines_of(record)}
    assert lines[BASE].difference is None and lines[BASE].verdict == ""
    assert lines["bf16"].difference == pytest.approx(0.5) and lines["bf16"].verdict == "apart"
    assert lines["fp8"].difference == pytest.approx(-0.05) and lines["fp8"].verdict == "parity"
    assert lines["fp8"].apart == pytest.approx(0.5) and lines[BASE].skipped == 3
    assert len(table(record).splitlines()) == 5


def test_the_base_comes_first() -> None:
    options = argparse.Namespace(seeds=2, steps=3, only=None)
    order = [(run.variant, run.seed) for run in plan(options)]
    assert order[:2] == [(BASE, 1), (BASE, 2)] and len(order) == 2 * len(VARIANTS)
    options.only = ["fp8"]
    assert {run.variant for run in plan(options)} == {BASE, "bf16", "fp8"}


def test_what_is_stored_stays_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add a requested part to the record; another number of steps begins a new one."""
    ran: list[tuple[str, int]] = []

    def trained(run: PrecisionRun) -> dict[str, Any]:
        ran.append((run.variant, run.seed))
        return run_of(run.variant, run.seed, 3.0 + run.seed, [2.0]) | {"tokens": 4, "wall_s": 1}

    monkeypatch.setattr("bench.variant_runs.train", trained)
    options = argparse.Namespace(seeds=2, steps=3, only=["fp16"], again=False)
    options.record = tmp_path / "precision.json"
    measure(options)
    assert sorted(ran) == [("fp16", 1), ("fp16", 2), (BASE, 1), (BASE, 2)]
    ran.clear()
    options.only = ["bf16"]
    measure(options)
    assert sorted(ran) == [("bf16", 1), ("bf16", 2)]
    runs = json.loads(options.record.read_text())["runs"]
    assert [(r["variant"], r["seed"]) for r in runs] == [
        (v, seed) for v in (BASE, "bf16", "fp16") for seed in (1, 2)
    ]
    ran.clear()
    measure(argparse.Namespace(**(vars(options) | {"again": True})))
    assert len(ran) == 4
    ran.clear()
    measure(argparse.Namespace(**(vars(options) | {"steps": 5})))
    assert len(ran) == 4 and len(json.loads(options.record.read_text())["runs"]) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_commands_are_legal(variant: str) -> None:
    words = PrecisionRun(variant, 1, 300).command()[2:]
    config = parse_run(words, 1).config
    assert config.run.steps == 300 and config.precision.dtype == VARIANTS[variant].settings.get(
        "precision.dtype"
    )


def test_what_is_stored_is_whole() -> None:
    record = json.loads(RECORD.read_text())
    found = {line.variant: line for line in lines_of(record)}
    assert set(found) == set(VARIANTS) and found[BASE].seeds == 3
    assert all(len(run["losses"]) == record["steps"] == 300 for run in record["runs"])
    assert all(line.verdict in ("", "parity") for line in found.values())
