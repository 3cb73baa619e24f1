"""Microbatches that a pipeline cuts on: the loader counts its own, the schedule runs more.

Two forked ranks, a stage each; fp64. Loss divided by `grad_accum`, or by `grad_accum x num_chunks`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import broken
from megacpp.config.schema import MeshConfig
from megacpp.errors import ConfigError
from megacpp.memory.estimate import estimate
from megacpp.memory.plan_space import pipeline_is_legal
from megacpp.memory.traffic import traffic
from megacpp.model.stages import as_scheduled
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.memory.test_planner import small
from tests.parallel.parity import Run, Slices, batches_of, config_of, error, gradients, world_of
from tests.ranks import on_worlds
from tests.synthetic import ragged_batch
from tests.together import Together

PIPE = MeshConfig(pp=2, dp_shard=1)


@dataclass(frozen=True)
class Case:
    """Microbatches of the loader, parts of each, and what the loss is divided by."""

    accum: int
    chunks: int = 1
    divisor: Literal["tokens", "microbatches"] = "tokens"
    schedule: Literal["1f1b", "gpipe", "dualpipev"] = "1f1b"
    world: int = 2


@dataclass
class Outcome:
    gradients: Slices
    losses: tuple[float, int]
    run: int  # microbatches that the schedule ran


def outcome(rank: int, case: Case) -> Outcome:
    """One step of eight rows with ragged labels."""
    run = Run("plain", replace(PIPE, pp_schedule=case.schedule), accum=case.accum)
    world, config = world_of(rank, run), config_of(run)
    train = replace(config.train, num_chunks=case.chunks, divisor=case.divisor)
    model = build_model(config := replace(config, train=train), world)
    boundary = AccumulationBoundary(model, world, config)
    sums = boundary.accumulate(batches_of(0, world, run))
    assert boundary.pipeline is not None and boundary.pipeline._built is not None
    found = gradients(model)
    return Outcome(found, (sums.loss_sum.item(), sums.valid_tokens), boundary.pipeline._built[0][0])


CASES = [Case(2, 2), Case(2, 4), Case(2, 2, "microbatches"), Case(1, 4, schedule="dualpipev")]


def alone(case: Case) -> Case:
    """As many microbatches of the loader itself."""
    return replace(case, accum=case.accum * case.chunks, chunks=1)


@functools.cache
def results() -> Together[Case, list[Outcome]]:
    make = lambda some: on_worlds(outcome, dict.fromkeys(some, 2))  # noqa: E731
    return Together(__name__, CASES, make, lambda case: [alone(case)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_microbatches_of_the_schedule(case: Case) -> None:
    """The same gradient, divided by grad_accum x num_chunks, as so many smaller microbatches."""
    for found, other in zip(results()[case], results()[alone(case)], strict=True):
        assert found.run == other.run == case.accum * case.chunks
        assert found.losses[1] == other.losses[1]
        assert abs(found.losses[0] / other.losses[0] - 1) <= 1e-12
        assert error(found.gradients, other.gradients)[0] <= 1e-12


def test_the_divisor_counts_parts() -> None:
    """Where labels are ragged, a mean of four parts' means isn't that of two microbatches'."""
    in_parts, whole = Case(2, 2, "microbatches"), Case(2, 1, "microbatches")
    found = on_worlds(outcome, {whole: 2})[whole]
    apart = [
        error(a.gradients, b.gradients)[0] for a, b in zip(results()[in_parts], found, strict=True)
    ]
    assert 1e-3 < max(apart) < math.inf


def test_a_batch_in_parts_has_every_label_once() -> None:
    batch = ragged_batch(range(6), 16)
    parts = batch.split(3)
    assert torch.equal(torch.cat([p.ids_BT for p in parts]), batch.ids_BT)
    assert torch.equal(torch.cat([p.labels_BT for p in parts]), batch.labels_BT)
    assert torch.equal(torch.cat([p.docs.starts_BT for p in parts]), batch.docs.starts_BT)
    assert sum(p.num_targets for p in parts) == batch.num_targets
    assert sum(p.target_bytes for p in parts) == batch.target_bytes
    assert [p.rows for p in parts] == [(0, 1), (2, 3), (4, 5)]


def resolved(*flags: str, world: int = 2):
    return parse_run(["tiny", "--mesh.pp", "2", *flags], world).config


def test_counts_are_apart_and_rules_know_both() -> None:
    """Four parts of two microbatches are enough for a V of two ranks, which needs four."""
    flags = "--mesh.pp-schedule dualpipev --train.grad-accum 2 --train.device-batch-size 8".split()
    with pytest.raises(ConfigError, match=r"needs 2 \* mesh.pp \(4\) or more"):
        resolved(*flags)
    config = resolved(*flags, "--train.num-chunks", "4")
    assert (config.train.grad_accum, config.train.num_chunks) == (2, 4)
    assert config.train.tokens_per_step == 2 * 8 * config.data.seq_len
    run = as_scheduled(config).train
    assert (run.grad_accum, run.device_batch_size, run.num_chunks) == (8, 2, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.device-batch-size 6 --train.num-chunks 4",
         r"must divide train.device_batch_size \(6\), .*Fix: use --train.num-chunks 3 or "
         r"--train.device-batch-size 8"),
        ("--train.device-batch-size 4 --train.num-chunks 2 --mesh.pp 1", "only a pipeline"),
        ("--train.num-chunks 0", "must be at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_one_line(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolved("--train.grad-accum", "2", *flags.split())
    assert "\n" not in str(caught.value)


def test_memory_and_traffic_are_those_of_the_parts() -> None:
    parts = resolved(
        *"--train.grad-accum 2 --train.device-batch-size 8 --train.num-chunks 4".split()
    )
    same = resolved(*"--train.grad-accum 8 --train.device-batch-size 2".split())
    whole = resolved(*"--train.grad-accum 2 --train.device-batch-size 8".split())
    for rank in (0, 1):
        assert estimate(parts, 2, rank) == estimate(same, 2, rank)
        assert estimate(parts, 2, rank).point < estimate(whole, 2, rank).point
        assert traffic(parts, 2, rank) == traffic(same, 2, rank)


def test_a_plan_keeps_to_the_parts() -> None:
    base = small()
    config = replace(base, train=replace(base.train, num_chunks=2))
    mesh = replace(base.mesh, pp=2, dp_shard=1)
    assert pipeline_is_legal(config, mesh, 4, 2) and not pipeline_is_legal(config, mesh, 3, 2)
    assert not pipeline_is_legal(config, replace(mesh, pp=1, dp_shard=2), 4, 2)
    odd = replace(config, mesh=mesh, train=replace(config.train, device_batch_size=3, grad_accum=2))
    assert any("train.num_chunks=2" in str(e) for e in broken(odd, 2))
