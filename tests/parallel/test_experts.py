"""Experts on ranks: the same layer as on one process, wherever its tokens and experts lie."""

from __future__ import annotations

import pytest

from tests.parallel.expert_cases import BIASES, Case, Outcome, cases, outcomes

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


@pytest.fixture(scope="module")
def found() -> dict[Case, list[Outcome]]:
    return outcomes()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_any_mesh_is_one_process(case: Case, found: dict[Case, list[Outcome]]) -> None:
    """Outputs, gradients of inputs and of every parameter, counts, and the bias they move."""
    for of_rank in found[case]:
        worst = max(of_rank.errors, key=of_rank.errors.__getitem__)
        assert of_rank.errors[worst] <= TOLERANCE[case.dtype], (worst, of_rank.errors[worst])
        assert of_rank.counts == of_rank.expected_counts
        assert of_rank.same_bias
    if BIASES[case.bias]:
        assert 0 in found[case][0].counts
