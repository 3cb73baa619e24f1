"""fp16 and its loss scale: overflow leaves a step out and halves it, good steps double it.

Forked gloo ranks and tests/parallel/parity.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from megacpp.config.schema import MeshConfig, PrecisionConfig, TrainConfig
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.step_sums import LEAST, MOST, LossScale
from tests.parallel.parity import Run, batches_of, config_of, world_of
from tests.ranks import run_ranks

MESHES = {
    "one process": MeshConfig(dp_shard=1),
    "fsdp2": MeshConfig(dp_shard=2),
    "pp2": MeshConfig(dp_shard=1, pp=2),
    "tp2": MeshConfig(dp_shard=1, tp=2),
}
STEPS, GROWTH, START = 16, 3, 2.0**24  # the gradients of these models overflow at such a scale
Seen = list[tuple[float, bool, float]]  # of each step: scale, taken, gradient norm


def play(rank: int, _world: int, precision: PrecisionConfig) -> dict[str, Seen]:
    """What a rank sees, on every mesh of as many ranks."""
    found: dict[str, Seen] = {}
    for name, mesh in MESHES.items():
        run = Run("plain", mesh, accum=2)
        if run.world != _world:
            continue
        world = world_of(rank, run)
        config = dataclasses.replace(config_of(run), precision=precision, train=TrainConfig())
        model = build_model(config, world)
        boundary = AccumulationBoundary(model, world, config)
        optimizer = build_optimizer(model, config, world.holders)
        seen: Seen = []
        for step in range(STEPS):
            sums, scale = boundary.accumulate(batches_of(step % 3, world, run)), boundary.loss_scale
            before = scale.value
            norm = clip_gradients(
                model.parameters(), 1.0, copies=boundary.copies, along=sums.along, loss_scale=before
            )
            status = boundary.check_step(sums, norm)
            if status.healthy:
                optimizer.step()
            optimizer.zero_grad()
            boundary.finish_step(status)
            seen.append((before, status.healthy, status.grad_norm))
        found[name] = seen
    return found


@functools.cache
def results(dtype: str) -> dict[str, list[Seen]]:
    precision = PrecisionConfig(dtype, loss_scale=START, loss_scale_growth=GROWTH)  # type: ignore
    job = functools.partial(play, precision=precision)
    found = {name: [seen] for name, seen in job(0, 1).items()}
    of_ranks = run_ranks(job, 2)
    return found | {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_scale_finds_its_place(mesh: str) -> None:
    first, *others = results("fp16")[mesh]
    assert all(other == first for other in others), "ranks disagree"
    assert first[0][:2] == (START, False) and sum(taken for _, taken, _ in first) >= 4
    good = 0
    for (scale, taken, _), (after, _, _) in itertools.pairwise(first):
        good = good + 1 if taken else 0
        expected = scale / 2 if not taken else scale * 2 if good == GROWTH else scale
        assert after == expected
        good = 0 if good == GROWTH else good
    assert any(b > a for (a, _, _), (b, _, _) in itertools.pairwise(first)), "it grew"


@pytest.mark.parametrize("mesh", MESHES)
def test_what_the_optimizer_sees_has_no_scale(mesh: str) -> None:
    """The norm of the first step that is taken, beside fp32: ten bits, and some hundred products.

    Before that step nothing has moved, so the same batch of the fp32 run's first round compares.
    """
    number, norm = next(
        (i, norm) for i, (_, taken, norm) in enumerate(results("fp16")[mesh][0]) if taken
    )
    precision = PrecisionConfig("fp32")
    run = Run("plain", MESHES["one process"], accum=2)
    world = world_of(0, run)
    config = dataclasses.replace(config_of(run), precision=precision)
    model = build_model(config, world)
    boundary = AccumulationBoundary(model, world, config)
    sums = boundary.accumulate(batches_of(number % 3, world, run))
    wide = boundary.check_step(
        sums, clip_gradients(model.parameters(), 1.0, along=sums.along)
    ).grad_norm
    assert abs(norm / wide - 1) < 2**-8, (norm, wide)


def test_other_precisions_have_none() -> None:
    scale = LossScale(PrecisionConfig("fp32"))
    for stepped in (False, True) * 3000:
        scale.update(stepped)
    assert scale.value == 1.0 and not scale.dynamic


def test_the_published_rule() -> None:
    """Doubles after 2,000 good steps in a row, halves at once; goes on after a restart."""
    scale = LossScale(PrecisionConfig("fp16"))
    for _ in range(1999):
        scale.update(True)
    assert scale.value == 65536.0
    again = LossScale(PrecisionConfig("fp16"))
    again.restore(scale.state())
    for one in (scale, again):
        one.update(True)
        assert one.value == 131072.0
        one.update(False)
        assert one.value == 65536.0 and one.good_steps == 0


def test_the_scale_has_limits() -> None:
    scale = LossScale(PrecisionConfig("fp16", loss_scale=1.0, loss_scale_growth=1))
    for stepped, limit in ((False, LEAST), (True, MOST)):
        for _ in range(100):
            scale.update(stepped)
        assert scale.value == limit


def test_a_run_takes_the_scale_of_its_own_precision_alone() -> None:
    half, fixed = (LossScale(PrecisionConfig(dtype, loss_scale=64.0)) for dtype in ("fp16", "fp32"))
    saved = {name: scale.state() for name, scale in (("half", half), ("fixed", fixed))}
    half.update(False)
    fixed.restore(half.state())
    assert fixed.value == 1.0
    half.restore(saved["fixed"])
    assert half.value == 32.0
    half.restore(saved["half"])
    assert half.value == 64.0
