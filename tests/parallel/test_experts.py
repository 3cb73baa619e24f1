"""Experts on ranks: the same layer as on one process, wherever its tokens and experts lie."""

from __future__ import annotations

import functools

import pytest

from megacpp.lessons.experts import (
    BIASES,
    CPU,
    MESHES,
    ROUTERS,
    ExpertCase,
    ExpertOutcome,
    outcome,
)
from megacpp.lessons.ranks import on_worlds
from parallel.expert.parallel import Kind
from parallel.start import join
from tests.differences import largest
from tests.together import Together

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


def cases() -> list[ExpertCase]:
    """Return every router in all kinds on one mesh, and every mesh and load with one router."""
    kinds: tuple[Kind, ...] = ("per_rank", "per_expert", "padded")
    found = [ExpertCase(router, "cp2 tp2", kind) for router in ROUTERS for kind in kinds]
    found += [ExpertCase("sigmoid", mesh, kind) for mesh in MESHES for kind in kinds]
    found += [ExpertCase("roomy", mesh) for mesh in ("dp2", "dp2 tp2, experts twice")]
    for router, bias in (("sigmoid", "first"), ("sigmoid", "last"), ("one_expert", "one")):
        found += [ExpertCase(router, mesh, kind, bias) for mesh in ("cp2", "dp4") for kind in kinds]
    found += [ExpertCase("groups", "dp2 cp2", kind, "even", "fp32") for kind in kinds]
    found += [ExpertCase("nulls", mesh, kind) for mesh in ("dp2", "dp4") for kind in kinds]
    found += [ExpertCase("nulls", "dp4", kind, "nulls") for kind in kinds]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def found() -> Together[ExpertCase, list[ExpertOutcome]]:
    join_once = functools.cache(lambda mesh: join(MESHES[mesh], CPU))
    play = lambda rank, case: outcome(case, join_once(case.mesh))  # noqa: E731
    make = lambda some: on_worlds(play, {case: case.world for case in some})  # noqa: E731
    return Together(__name__, cases(), make)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_any_mesh_is_one_process(
    case: ExpertCase, found: Together[ExpertCase, list[ExpertOutcome]]
) -> None:
    """Outputs, gradients of inputs and of every parameter, counts, and the bias they move."""
    for of_rank in found[case]:
        assert largest(of_rank.errors.values()) <= TOLERANCE[case.dtype], of_rank.errors
        assert of_rank.counts == of_rank.expected_counts
        assert of_rank.same_bias
    if BIASES[case.bias]:
        assert 0 in found[case][0].counts
