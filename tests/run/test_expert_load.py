"""How loads of experts are put into figures, and when a person hears of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megacpp.blocks.experts.choices import columns, slots
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import Config, RunConfig
from megacpp.model.hybrid import HybridLM
from megacpp.run.expert_load import ExpertLoad, LoadWatch, load_figures
from megacpp.run.metrics import MetricsLog, StepRecord
from parallel.expert.load import LoadTable
from tests.model.small import small

EVEN, ONE = ExpertLoad(1, (10, 10, 10, 10)), ExpertLoad(4, (40, 0, 0, 0), 0.25, 0.003)


def test_figures_by_hand() -> None:
    assert (EVEN.mean, EVEN.busiest, EVEN.dead) == (10, 1.0, 0) and EVEN.entropy == pytest.approx(1)
    assert (ONE.mean, ONE.busiest, ONE.dead, ONE.entropy) == (10, 4.0, 3, 0.0)
    half = ExpertLoad(0, (20, 20, 0, 0))
    assert half.entropy == pytest.approx(math.log(2) / math.log(4)) and half.busiest == 2.0
    nothing = ExpertLoad(0, (0, 0))
    assert (nothing.busiest, nothing.entropy, nothing.dead) == (0.0, 0.0, 2)
    assert load_figures([EVEN, ONE]) == {
        "load_max_over_mean": {"1": 1.0, "4": 4.0},
        "load_entropy": {"1": 1.0, "4": 0.0},
        "dead_experts": {"1": 0, "4": 3},
        "bias_range": {"4": 0.003},
        "null_fraction": {"4": 0.25},
    }
    assert load_figures([]) == {}


def test_one_line_and_then_quiet() -> None:
    watch, busy = LoadWatch(3.0, quiet=10), ExpertLoad(4, (40, 1, 1, 1))
    assert watch.observe(0, [EVEN]) == []
    assert watch.observe(1, [EVEN, busy]) == [
        "step 2: warning: the busiest expert of layer 4 has 3.7 times the mean (limit 3, 1 of 2 "
        "layers)"
    ]
    assert all(watch.observe(step, [busy]) == [] for step in range(2, 11))
    (line,) = watch.observe(11, [ONE, ONE])
    assert "4.0 times the mean" in line and "3 of 4 experts of layer 4 have no token" in line
    assert LoadWatch(4.0).observe(0, [ONE])  # not above the limit, but dead
    few = ExpertLoad(0, (4, 4, 4, 0))
    assert LoadWatch(4.0).observe(0, [few]) == []  # of 3 tokens on average one may well get none
    assert LoadWatch(4.0).observe(0, [ExpertLoad(0, (12, 12, 8, 0))]), "of 8 none may not"


def test_figures_by_layer_are_stored(tmp_path: Path) -> None:
    """Store figures as an object in metrics.jsonl, and a curve per layer in TensorBoard."""
    log = MetricsLog(tmp_path, Config(run=RunConfig(steps=1)), 0, active=True)
    numbers = {
        name: 1.0 for name in ("loss", "bits_per_byte", "grad_norm", "lr", "tokens_per_s", "step_s")
    }
    whole = dict.fromkeys(("tokens", "valid_tokens", "peak_bytes", "grad_accum", "nonfinite"), 1)
    more = load_figures([EVEN, ONE])
    log.write(StepRecord(step=0, skipped=False, more=more, **numbers, **whole))  # type: ignore[arg-type]
    log.close()
    stored = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert stored["load_max_over_mean"] == {"1": 1.0, "4": 4.0}
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {name: board.Scalars(name)[0].value for name in board.Tags()["scalars"]}
    assert scalars["train/load_max_over_mean/layer_4"] == 4.0
    assert scalars["train/bias_range/layer_4"] == pytest.approx(0.003)


def test_the_table_of_two_ranks_has_the_loads_of_their_layers() -> None:
    """Counts of replicas are summed; a bias, the same on both, keeps its range."""
    config = small("EAEF")
    model = HybridLM(config)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for layer, router in zip((0, 2), routers, strict=True):
        router.tokens_per_expert.fill_(layer + 1)
        router.expert_bias.zero_()[0] = 0.5 * (layer + 1)
    table = LoadTable(model, config, ranks=2)
    first, last = table.read((2 * table.numbers(torch.device("cpu"))).tolist())
    experts = config.moe.num_experts
    assert (first.layer, first.counts, first.bias_range) == (0, (2,) * experts, 0.5)
    assert (last.layer, last.counts, last.bias_range) == (2, (6,) * experts, 1.5)


def test_the_share_of_nulls_is_of_all_slots() -> None:
    """Compare with counts by hand: 3 tokens of 8 slots, at most 4 real, chose 6 real experts."""
    config = small("E")
    config = replace(config, moe=replace(config.moe, num_experts=4, top_k=4, null_rho=0.5))
    table = LoadTable(HybridLM(config), config, ranks=1)
    assert (columns(config.moe), slots(config.moe)) == (4, 8)
    (load,) = table.read([6.0, 0.0, 0.0, 0.0, 3 * 4 - 6.0, 0.0])
    assert load.nulls == 0.75
