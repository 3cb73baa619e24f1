"""Limits of experts on real ranks: rows that groups and nulls save, rows that are dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from megacpp.blocks.experts.choices import visited_ranks
from megacpp.config.schema import MeshConfig
from megacpp.lessons.expert_limits import EP, MODELS, TOKENS, of_rank
from megacpp.lessons.experts import CPU, MOE, D, mixer_of, randn, spread_over
from parallel.expert.parallel import ExpertParallel, Kind
from parallel.start import join
from tests.ranks import run_ranks

TIGHT = replace(MOE, capacity_factor=1.0)
PREFERRED = [1, 6]  # a bias: their copies are too many for a capacity of one even share


def test_tokens_stay_on_few_ranks() -> None:
    """One row a token and rank that holds experts of its groups; none for a null."""
    ranks = run_ranks(of_rank, EP)
    sent: dict[tuple[str, str], float] = {}
    for name, moe in MODELS.items():
        assert max(rank[name]["most"] for rank in ranks) <= visited_ranks(moe, EP), name
        assert all(rank[name]["waits"] == ["tolist"] for rank in ranks)
        for kind, rows in (("per_rank", "rows"), ("per_expert", "copies")):
            total = sum(rank[name][kind] for rank in ranks)
            assert total == sum(rank[name][rows] for rank in ranks), (name, kind)
            sent[name, kind] = total / (EP * TOKENS)
    assert [visited_ranks(moe, EP) for moe in MODELS.values()] == [4, 2, 2, 3, 4, 2]
    assert sent["2 of 4 nodes", "per_rank"] <= 2 and sent["1 of 2 pairs of nodes", "per_rank"] <= 2
    assert sent["2 of 4 nodes", "per_rank"] < 0.65 * sent["free", "per_rank"]
    # All of 12 slots that are real, and only those: as many bytes as there are such choices.
    real = sum(rank["nulls"]["real"] for rank in ranks) / (EP * TOKENS)
    assert 4 < real < 8
    assert sent["nulls", "per_expert"] == pytest.approx(real * 3 / 4, rel=0.05)
    assert sent["nulls, 2 of 4 nodes", "per_rank"] < sent["nulls", "per_rank"]


def tight_rank(rank: int, size: int) -> dict[str, float]:
    """Return how far each way of sending is from one process, which drops the same copies."""
    world = join(MeshConfig(dp_shard=size, ep=size), CPU)
    x_RTD = randn(size, 40, D, seed=3)
    dy_RTD = randn(size, 40, D, seed=4)
    found = {}
    for kind in get_args(Kind):
        whole = mixer_of(TIGHT, torch.float64, PREFERRED)
        seen = slice(None) if kind == "padded" else slice(rank, rank + 1)
        want, dwant = _through(whole, x_RTD[seen], dy_RTD[seen])
        own = rank if kind == "padded" else 0
        spread = mixer_of(TIGHT, torch.float64, PREFERRED)
        spread_over(spread, world, ExpertParallel(kind))
        mine = slice(rank, rank + 1)
        got, dgot = _through(spread, x_RTD[mine], dy_RTD[mine])
        found[f"{kind} output"] = (got[0] - want[own]).abs().max().item()
        found[f"{kind} input"] = (dgot[0] - dwant[own]).abs().max().item()
        roomy, _ = _through(mixer_of(MOE, torch.float64, PREFERRED), x_RTD[seen], dy_RTD[seen])
        found[f"{kind} dropped"] = (roomy[own] - want[own]).abs().max().item()
    return found


def _through(
    mixer: torch.nn.Module, x_BTD: torch.Tensor, dy_BTD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and gradient of the input."""
    x_BTD = x_BTD.clone().requires_grad_()
    y_BTD = mixer(x_BTD)
    y_BTD.backward(dy_BTD)
    assert x_BTD.grad is not None
    return y_BTD.detach(), x_BTD.grad


def test_a_capacity_drops_what_one_process_drops() -> None:
    """Compare with a process that has the rank's tokens; with `padded`, those of all ranks."""
    for found in run_ranks(tight_rank, 2):
        assert len(found) == 9
        for name, value in found.items():
            assert (value > 0.1) if "dropped" in name else (value < 1e-12), (name, value)
