"""Experts on ranks: the same layer as on one process, wherever its tokens and experts lie."""

from __future__ import annotations

import pytest

from megacpp.lessons.experts import BIASES, ExpertCase, ExpertOutcome, cases, outcomes
from tests.differences import largest

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


@pytest.fixture(scope="module")
def found() -> dict[ExpertCase, list[ExpertOutcome]]:
    return outcomes()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_any_mesh_is_one_process(
    case: ExpertCase, found: dict[ExpertCase, list[ExpertOutcome]]
) -> None:
    """Outputs, gradients of inputs and of every parameter, counts, and the bias they move."""
    for of_rank in found[case]:
        assert largest(of_rank.errors.values()) <= TOLERANCE[case.dtype], of_rank.errors
        assert of_rank.counts == of_rank.expected_counts
        assert of_rank.same_bias
    if BIASES[case.bias]:
        assert 0 in found[case][0].counts
