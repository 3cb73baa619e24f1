"""One batch, however it is split: the same gradient. Both divisors, auxiliary losses, masks.

Forked gloo ranks and tests/parallel/parity.py; fp64, where another order of the same sums differs
by 1e-16 of their size and a wrong factor by all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from megacpp.config.schema import MeshConfig
from megacpp.data.batches import IGNORED, Batch
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.step_sums import Totals
from tests.differences import largest
from tests.figures import Record
from tests.parallel.parity import (
    ROWS,
    TOLERANCE,
    Run,
    Slices,
    T,
    config_of,
    covered,
    error,
    gradients,
    world_of,
)
from tests.ranks import on_worlds
from tests.synthetic import micro_rows, ragged_batch
from tests.together import Together

Rule = Literal["tokens", "microbatches"]
DRAWS = 24  # random ways to split a batch, of each divisor


@dataclass(frozen=True)
class Split:
    """A way to run eight rows, and which of their labels count.

    Attributes:
        mask: of which random draw of labels; some rows have none at all.
        even: every row has as many labels as any other.
    """

    mesh: MeshConfig
    accum: int
    mask: int = 0
    rule: Rule = "tokens"
    even: bool = False
    model: str = "plain"

    @property
    def run(self) -> Run:
        return Run(self.model, self.mesh, self.accum)

    def __str__(self) -> str:
        return f"{self.run} mask {self.mask} {self.rule}{' even' if self.even else ''}"


@dataclass(frozen=True)
class Outcome:
    """What one rank got."""

    gradients: Slices
    loss_sum: float
    valid: int


def labels(batch: Batch, split: Split) -> Batch:
    """The batch with some labels left out, a function of the global row alone."""
    labels_BT = batch.labels_BT.clone()
    for place, row in enumerate(batch.rows):
        rng = random.Random(f"{split.mask} {row}")
        if split.even:
            labels_BT[place] = batch.ids_BT[place]
            labels_BT[place, rng.sample(range(T), 5)] = IGNORED
        elif rng.random() < 0.3:
            labels_BT[place] = IGNORED
        else:
            labels_BT[place, rng.sample(range(T), rng.randrange(T))] = IGNORED
    return dataclasses.replace(
        batch, labels_BT=labels_BT, num_targets=int((labels_BT != IGNORED).sum())
    )


@functools.lru_cache(maxsize=1)
def built(rank: int, run: Run, rule: Rule) -> AccumulationBoundary:
    """A model at its first weights, kept from one split to the next."""
    world, config = world_of(rank, run), config_of(run)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, divisor=rule))
    return AccumulationBoundary(build_model(config, world), world, config)


def outcome(rank: int, split: Split) -> Outcome:
    """The gradient of one step, before clipping."""
    boundary = built(rank, Run(split.model, split.mesh), split.rule)
    model, world = boundary.model, boundary.world
    for source in boundary.sources:
        source.forget()
    model.zero_grad()
    shares = micro_rows(range(ROWS), world, split.run.device_batch)
    batches = [labels(ragged_batch(share, T, 48), split) for share in shares]
    sums = boundary.accumulate(iter(batches))
    return Outcome(gradients(model), sums.loss_sum.item(), sums.valid_tokens)


def meshes() -> list[MeshConfig]:
    """All legal ones of up to 4 ranks over replicas, shards, context and pipeline."""
    found = []
    for replicas, shards, cp, pp in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2)):
        if replicas * shards * cp * pp <= 4:
            found.append(MeshConfig(dp_replicate=replicas, dp_shard=shards, cp=cp, pp=pp))
    return found


def splits(rule: Rule) -> list[Split]:
    """Random draws of mesh, microbatches and labels; the same in every run of the tests."""
    rng, found = random.Random(7), []
    while len(found) < DRAWS:
        mesh = rng.choice(meshes())
        rows = ROWS // (mesh.dp_replicate * mesh.dp_shard)
        accum = rng.choice([n for n in (1, 2, 4, 8) if n <= rows and n >= mesh.pp])
        split = Split(mesh, accum, rng.randrange(4), rule, even=rule == "microbatches")
        if split not in found:
            found.append(split)
    return found


def whole(split: Split) -> Split:
    """All rows in one microbatch of one process, divided by its tokens."""
    return dataclasses.replace(split, mesh=MeshConfig(dp_shard=1), accum=1, rule="tokens")


def by_tokens(split: Split) -> Split:
    """The same, divided by the tokens of the step."""
    return dataclasses.replace(split, rule="tokens")


# Every auxiliary loss that there is (sequence balance, z, indexer, token order, further tokens),
# null experts, hashed n-grams, a memory: on each axis.
FEATURES = [
    Split(mesh, accum, mask, model="one_stream")
    for mask, (mesh, accum) in enumerate(
        (
            (MeshConfig(dp_shard=1), 4),
            (MeshConfig(dp_shard=2, ep=2), 2),
            (MeshConfig(dp_shard=1, tp=2), 8),
            (MeshConfig(dp_replicate=2, dp_shard=1, cp=2), 4),
            (MeshConfig(dp_shard=2, pp=2), 2),
        )
    )
]
UNEVEN = [
    Split(mesh, accum, 1, "microbatches")
    for mesh, accum in (
        (MeshConfig(dp_shard=1), 4),
        (MeshConfig(dp_shard=2), 4),
        (MeshConfig(dp_shard=1, cp=2), 4),
        (MeshConfig(dp_shard=1, pp=2), 4),
        (MeshConfig(dp_shard=2, pp=2), 4),
    )
]


@functools.cache
def results() -> Together[Split, list[Outcome]]:
    cases = [*splits("tokens"), *splits("microbatches"), *FEATURES, *UNEVEN]

    def beside(split: Split) -> list[Split]:
        return [whole(split)] if split.mask else [whole(split), by_tokens(split)]

    return Together(__name__, cases, outcomes, beside)


def outcomes(wanted: list[Split]) -> dict[Split, list[Outcome]]:
    """Return what every rank found of each split; those of one model stand together (`built`)."""
    wanted.sort(key=lambda split: (split.model, str(split.mesh), split.rule))
    return on_worlds(outcome, {split: split.run.world for split in wanted})


def assert_same(split: Split, other: Split) -> None:
    (expected,) = results()[other]
    covered([found.gradients for found in results()[split]], expected.gradients)
    for found in results()[split]:
        assert found.valid == expected.valid
        assert abs(found.loss_sum / expected.loss_sum - 1) <= TOLERANCE["fp64"]
        worst = error(found.gradients, expected.gradients)
        assert worst[0] <= TOLERANCE["fp64"], worst


@pytest.mark.parametrize("split", [*splits("tokens"), *FEATURES], ids=str)
def test_any_split_of_a_batch_has_its_gradient(split: Split, record_property: Record) -> None:
    """Ragged labels, rows and microbatches without one; sequence balance and z losses on."""
    assert_same(split, whole(split))
    record_property("splits of a batch with rows and microbatches without a label", 1)
    (whole_batch,) = results()[whole(split)]
    worst = largest(error(o.gradients, whole_batch.gradients)[0] for o in results()[split])
    record_property("largest relative difference of a gradient", worst)


@pytest.mark.parametrize("split", splits("microbatches"), ids=str)
def test_both_divisors_agree_on_equal_microbatches(split: Split) -> None:
    """To the bit on the same microbatches: both divide by n v."""
    assert_same(split, whole(split))
    if split.mask:
        return
    for found, other in zip(results()[split], results()[by_tokens(split)], strict=True):
        assert found.loss_sum == other.loss_sum and found.valid == other.valid
        for name, part in found.gradients.items():
            assert torch.equal(part.local, other.gradients[name].local), name


def test_the_draws_are_worth_drawing() -> None:
    """Microbatches without a label, and every axis, occur among the splits."""
    drawn = splits("tokens")
    assert {s.accum for s in drawn} == {1, 2, 4, 8}
    for axis in ("dp_replicate", "dp_shard", "cp", "pp"):
        assert sum(getattr(s.mesh, axis) > 1 for s in drawn) >= 3, axis
    empty = 0
    for split in drawn:
        rows = [labels(ragged_batch([row], T, 48), split).num_targets for row in range(ROWS)]
        size = ROWS // split.accum
        empty += any(sum(rows[i : i + size]) == 0 for i in range(0, ROWS, size))
    assert empty >= 3


@pytest.mark.parametrize("split", UNEVEN, ids=str)
def test_the_mean_of_microbatches(split: Split) -> None:
    """On any mesh each microbatch, of all data ranks together, weighs the same.

    Which is the rule to divide by `grad_accum_steps x num_chunks`, and another gradient than that
    of the mean over tokens where microbatches differ.
    """
    rows = ROWS // split.accum
    config = config_of(split.run.reference)
    world = world_of(0, split.run.reference)
    model = build_model(config, world)
    auxiliary = AccumulationBoundary(model, world, config)
    none = torch.zeros(1, dtype=torch.int64)
    auxiliary._set_scales(Totals(ROWS * T, none, none, 1, none, none), 0)
    for first in range(0, ROWS, rows):
        batch = labels(ragged_batch(range(first, first + rows), T, 48), split)
        out = model(batch.ids_BT, batch.labels_BT, batch.docs)
        (out.loss_sum / max(1, batch.num_targets) / split.accum).backward()
    expected = gradients(model)
    by_tokens = results()[whole(split)][0].gradients
    assert error(expected, by_tokens)[0] > 1e-2
    for found in results()[split]:
        worst = error(found.gradients, expected)
        assert worst[0] <= TOLERANCE["fp64"], worst


def test_divisors() -> None:
    none = torch.tensor([])

    def totals(*valid: int, microbatches: int = 3) -> Totals:
        return Totals(60, torch.tensor(100), torch.tensor(valid), microbatches, none, none)

    assert totals(10, 0, 30).divisors("tokens").tolist() == [40, 40, 40]
    assert totals(40).divisors("tokens").tolist() == [40, 40, 40]
    assert totals(10, 0, 30).divisors("microbatches").tolist() == [30, 3, 90]
    assert totals(0).divisors("tokens").tolist() == [1, 1, 1]


def test_loss_scale_is_invisible() -> None:
    """Gradients of a scaled loss, unscaled by clipping, are the same bits: it is a power of two."""
    found: list[dict[str, Tensor]] = []
    run = Run("plain", MeshConfig(dp_shard=1), accum=2, dtype="fp32")
    config = config_of(run)
    for scale in (1.0, 2.0**10):
        world = world_of(0, run)
        model = build_model(config, world)
        boundary = AccumulationBoundary(model, world, config)
        boundary.loss_scale.value = scale
        shares = micro_rows(range(ROWS), world, run.device_batch)
        boundary.accumulate([ragged_batch(share, T, 48) for share in shares])
        found.append({n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 40
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
