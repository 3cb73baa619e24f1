"""What groups of experts and null experts save of the rows between ranks, counted on real ranks."""

from __future__ import annotations

import pytest

from megacpp.blocks.experts.choices import visited_ranks
from megacpp.lessons.expert_limits import EP, MODELS, TOKENS, of_rank
from tests.ranks import run_ranks


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
