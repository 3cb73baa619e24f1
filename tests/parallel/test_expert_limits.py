"""What groups of experts and null experts save of the rows between ranks, counted on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp.blocks.experts.choices import visited_ranks
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import ModelConfig
from megacpp.model.init import initialise
from parallel.expert.parallel import ExpertParallel
from parallel.start import join
from tests.parallel.expert_cases import CPU, randn, spread_over
from tests.parallel.test_expert_exchange import FOUR, KINDS, Leaving, Waits
from tests.ranks import run_ranks

TOKENS, DIM, EP = 256, 16, 4
FREE = MoEConfig(num_experts=32, top_k=6, hidden_dim=8, num_shared=0)
MODELS = {
    "free": FREE,
    "2 of 4 nodes": replace(FREE, num_groups=4, top_k_groups=2),
    "1 of 2 pairs of nodes": replace(FREE, num_groups=2, top_k_groups=1),
    "3 of 8 half nodes": replace(FREE, num_groups=8, top_k_groups=3),
    "nulls": replace(FREE, null_rho=0.5),
    "nulls, 2 of 4 nodes": replace(FREE, null_rho=0.5, num_groups=4, top_k_groups=2),
}


def of_rank(rank: int, _size: int) -> dict[str, dict[str, Any]]:
    """Ranks that tokens met, rows that left this rank in both kinds, waits of the host."""
    world, found = join(FOUR, CPU), {}
    x_BTD = randn(1, TOKENS, DIM, seed=rank).to(torch.bfloat16)
    for name, moe in MODELS.items():
        mine: dict[str, Any] = {}
        for kind in KINDS:
            mixer = MixtureOfExperts(ModelConfig(dim=DIM, depth=1, init_std=0.5, moe=moe))
            initialise(mixer.to(torch.bfloat16), mixer.init_rules(), seed=0)
            _, indices_TK = mixer.router(x_BTD, decoding=True)
            spread_over(mixer, world, ExpertParallel(kind))
            own = x_BTD.clone().requires_grad_()
            with Leaving() as seen, pytest.MonkeyPatch.context() as patch:
                waits = Waits(patch)
                mixer(own).sum().backward()
            assert own.grad is not None and own.grad.isfinite().all()
            mine[kind] = seen.bytes[torch.bfloat16] / (4 * DIM * 2)  # there and back, twice
            mine["waits"] = waits.seen
        met = [{e // 8 for e in of_token if e < 32} for of_token in indices_TK.tolist()]
        mine["most"] = max(map(len, met))
        mine["rows"] = sum(len(ranks - {rank}) for ranks in met)
        mine["copies"] = sum(e < 32 and e // 8 != rank for of in indices_TK.tolist() for e in of)
        mine["real"] = int((indices_TK < 32).sum())
        found[name] = mine
    return found


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
