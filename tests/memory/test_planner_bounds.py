"""The planner's bounds against looking at everything, and the plans of the article."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from megacpp.config.checks.every import broken
from megacpp.config.presets import preset
from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.budget import BRIEF
from megacpp.memory.plan_space import (
    mesh_is_legal,
    meshes,
    policies,
    row_choices,
    with_knobs,
)
from megacpp.memory.planner import Candidate, device_tokens, plan
from megacpp.memory.traffic import traffic
from tests.memory.test_planner import SEQ, all_meshes, estimator, small


@pytest.mark.parametrize(
    ("world", "memory"), ((4, 120_000), (4, 260_000), (4, 600_000), (8, 180_000))
)
def test_bounds_decide_as_looking_at_everything_does(world: int, memory: int) -> None:
    """Every mesh, batch and policy, by the rules of a launch; then what the docstring says."""
    config, tokens, needs = small(), world * 4 * SEQ, estimator()
    found = plan(config, world, memory, tokens, ("mesh.ep_dispatch",), needs)
    fits: dict[tuple[MeshConfig, int, int], int] = {}
    considered = 0
    rungs = policies(config)
    for mesh in all_meshes(config, world):
        ranks = mesh.dp_replicate * mesh.dp_shard
        rows, rest = divmod(tokens // SEQ, ranks)
        choices = [r for r in range(1, rows + 1) if rows % r == 0] if not rest else [0]
        for row, (i, rung) in itertools.product(choices, enumerate(rungs)):
            considered += 1
            if not row:
                continue
            one = with_knobs(config, mesh, row, tokens, rung)
            if next(broken(one, world), None) is None:
                points = [needs(one, world, r, memory).point for r in _stages(one, world)]
                if max(points) <= memory:
                    fits[mesh, row, i] = max(points)
    kept = {key for key in fits if not any(_dominates(config, y, key) for y in fits)}
    assert found.considered == considered
    assert {_key(c, rungs) for c in found.candidates} == kept
    assert {_key(c, rungs): c.estimate.point for c in found.candidates} == {
        key: fits[key] for key in kept
    }
    assert found.estimated < found.legal or memory > 500_000


def _stages(config: Config, world: int) -> list[int]:
    return [stage * (world // config.mesh.pp) for stage in range(config.mesh.pp)]


def _dominates(config: Config, y: tuple, x: tuple) -> bool:
    axes = ("tp", "cp", "pp", "dp_replicate")
    a, b = ([getattr(mesh, axis) for axis in axes] for mesh, _, _ in (y, x))
    smaller = all(m <= n for m, n in zip(a, b, strict=True)) and a != b
    return (
        smaller and device_tokens(config, *y[:2]) >= device_tokens(config, *x[:2]) and y[2] <= x[2]
    )


def _key(candidate: Candidate, rungs: list) -> tuple[MeshConfig, int, int]:
    rows = candidate.config.train.device_batch_size
    return candidate.config.mesh, rows, rungs.index(candidate.policy)


def test_what_is_said_to_fit_does() -> None:
    """No false verdict against a traced step, of the candidate with the least left."""
    from megacpp.cli.trace import trace_step

    config = small(pattern="AEMR", depth=4)
    config = replace(config, train=replace(config.train, device="cpu"))
    found = plan(config, 8, 28 << 20, 8 * 8 * SEQ, ("mesh.cp", "mesh.dp_replicate"))
    sure = [c for c in found.candidates if c.estimate.verdict == "fits"]
    tight = max(sure, key=lambda c: c.estimate.upper)
    assert tight.estimate.upper > 0.95 * found.budget_bytes
    _, peak = trace_step(tight.config, 8, tight.rank).peak()
    assert 0.9 * found.budget_bytes < peak <= found.budget_bytes


@pytest.mark.parametrize("name", ("nam56r_base", "dense_110m", "tiny"))
def test_what_the_bounds_rest_on(name: str) -> None:
    """More rows need no less memory, nor does a policy that runs less again."""
    config, tokens, rng = preset(name), 1 << 19, random.Random(0)
    legal = [mesh for mesh in meshes(config, 8) if mesh_is_legal(config, mesh, 8)]
    rungs = policies(config)
    for mesh in rng.sample(legal, 4):
        rows = row_choices(config, mesh, tokens)[:3]
        needs = {}
        for row, (i, rung) in itertools.product(rows, enumerate(rungs)):
            one = with_knobs(config, mesh, row, tokens, rung)
            found = BRIEF(one, 8, 0, None)
            needs[row, i] = found.point, found.upper
        for (few, i), (many, j) in itertools.product(needs, repeat=2):
            if many >= few and (i == j or rungs[i].keeps_less(rungs[j])):
                assert all(a <= b for a, b in zip(needs[few, i], needs[many, j], strict=True))


POINTS = {  # preset, row: policy and rows of the article's mesh, which are out for ours
    ("nam56r_base", 4096): ("none", 8),
    ("nam56r_base", 16384): ("experts", 2),
    ("nam52_deep_base", 4096): ("none", 16),
    ("nam52_deep_base", 16384): ("experts", 4),
}
# Two plans look at all axes; the others leave out three that none of the best uses.
NARROW, FEWER = list(POINTS)[1:3], ("mesh.cp", "mesh.pp", "mesh.dp_replicate")


@pytest.mark.parametrize(("name", "seq"), POINTS)
def test_the_articles_operating_points_fit_and_what_is_better(name: str, seq: int) -> None:
    """TP 2, EP 4 on 8 devices of 141 GiB: at 4K without recompute, at 16K with that of experts."""
    budget, (policy, rows) = int(0.9 * (141 << 30)), POINTS[name, seq]
    config = preset(name)
    config = replace(config, data=replace(config.data, seq_len=seq))
    theirs = replace(config, mesh=replace(config.mesh, tp=2, ep=4))
    at = plan(theirs, 8, budget, 1 << 20, ("mesh.tp", "mesh.ep")).candidates
    point = next(c for c in at if c.policy.name == policy)
    assert (point.config.train.device_batch_size, point.config.mesh.dp_shard) == (rows, 4)
    assert point.estimate.verdict in ("fits", "at_risk")
    found = plan(config, 8, budget, 1 << 20, FEWER if (name, seq) in NARROW else ())
    best, instead = found.candidates[0], found.instead_of(point)
    mesh = best.config.mesh
    assert (mesh.tp, mesh.ep, mesh.dp_shard, best.estimate.verdict) == (1, 1, 8, "fits")
    # It works on more tokens at once, and less travels. So does what dominates the point,
    # which has at least as much to do in a microbatch and repeats no more.
    assert best.device_tokens >= 2 * point.device_tokens
    assert instead is not None and instead.device_tokens >= point.device_tokens
    assert instead.config.mesh.tp == 1 and instead.policy.replayed <= point.policy.replayed
    sent, other, theirs_sent = (traffic(c.config, 8).bytes for c in (best, instead, point))
    assert 1.4 * sent < other < theirs_sent / 4
