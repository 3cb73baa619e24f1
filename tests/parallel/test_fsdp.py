"""Data meshes (FSDP2, HSDP) and accumulation: the same run, and how often ranks talk.

Forked gloo ranks and tests/parallel/parity.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megacpp.blocks.ngram.config import NgramConfig
from megacpp.config.schema import Config, MeshConfig
from megacpp.data.batches import IGNORED, Batch
from megacpp.model.count import meta_model
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import units_of
from parallel.mesh import World
from tests.model.small import small
from tests.parallel.parity import (
    CPU,
    ROWS,
    STEPS,
    Run,
    T,
    Trace,
    batches_of,
    check,
    config_of,
    error,
    gradients,
    traces_of,
    world_of,
)
from tests.ranks import run_ranks
from tests.synthetic import micro_rows, ragged_batch
from tests.together import Together

SHARDED, HSDP = MeshConfig(dp_shard=2), MeshConfig(dp_replicate=2, dp_shard=2)
RUNS = [
    Run("plain", MeshConfig(dp_shard=1), accum=4),
    Run("plain", SHARDED, accum=1),
    Run("plain", SHARDED, accum=4),
    Run("plain", SHARDED, accum=1, dtype="fp32"),
    Run("plain", SHARDED, accum=4, sync="resident"),
    Run("plain", SHARDED, accum=4, sync="each"),
    Run("options", HSDP, accum=2, sync="each"),
    Run("plain", HSDP, accum=2, sync="resident"),
    Run("tied", SHARDED, accum=1, evaluate=True),
    Run("tied", MeshConfig(dp_shard=2, reshard="always"), accum=4),
    Run("options", SHARDED),
    Run("plain", HSDP, accum=2),
    Run("tied", HSDP),
]
CURVES = [  # other meshes, other numbers of microbatches: the same losses, step by step
    Run("plain", MeshConfig(dp_shard=1), accum=2),
    Run("plain", MeshConfig(dp_shard=1), accum=8),
    Run("plain", MeshConfig(dp_shard=1, tp=2), accum=2),
    Run("plain", MeshConfig(dp_shard=1, cp=2), accum=8),
    Run("plain", MeshConfig(dp_shard=1, pp=2), accum=4),
    Run("plain", MeshConfig(dp_shard=2, ep=2), accum=4),
    Run("plain", MeshConfig(dp_shard=2, pp=2), accum=2),
    Run("plain", MeshConfig(dp_shard=1, cp=2, pp=2), accum=8),
    Run("plain", MeshConfig(dp_shard=1, cp=2, pp=2, pp_schedule="gpipe"), accum=1),
]
SILENT = ((0, 2, 3), (0, 1, 2, 3))  # of four microbatches, those without a label
QUIET = Run("plain", MeshConfig(dp_shard=1), accum=4)


def whole(run: Run) -> Run:
    """The same rows on one process, all in one microbatch."""
    return dataclasses.replace(run.reference, accum=1)


@functools.cache
def results() -> Together[Run, list[Trace]]:
    make = functools.partial(traces_of, collectives=True)
    return Together(__name__, [*RUNS, *CURVES], make, lambda run: [whole(run)])


@pytest.mark.parametrize("run", [*RUNS, *CURVES], ids=str)
def test_any_split_is_the_same_run(run: Run) -> None:
    check(results()[run], results()[whole(run)][0], run.dtype)


def test_tables_of_ngrams_are_gathered_once_and_their_projection_stays() -> None:
    model = meta_model(dataclasses.replace(small("AF"), ngram=NgramConfig(heads=2)))
    units = {id(unit.modules[0]): unit for unit in units_of(model, apart=False)}
    tables, projection = units[id(model.ngram.tables)], units[id(model.ngram)]
    assert tables.reshard and not tables.in_backward
    assert projection.in_backward and not projection.reshard


def test_evaluating_in_between_changes_nothing() -> None:
    """A run that looks at held-out rows is one that doesn't; every mesh sees the same loss."""
    looking = next(run for run in RUNS if run.evaluate)
    plain = next(run for run in RUNS if run.model == "tied" and not run.evaluate)
    expected = results()[whole(looking)][0].evaluations
    assert len(set(expected)) == STEPS
    for trace in results()[looking]:
        assert trace.sharded, "evaluating leaves gathered parameters behind"
        assert trace.evaluations == pytest.approx(expected, rel=1e-12)
        assert trace.losses == pytest.approx(results()[plain][0].losses, rel=1e-12)


@pytest.mark.parametrize("run", [run for run in RUNS if run.world > 1], ids=str)
def test_collectives_of_a_step(run: Run) -> None:
    """One reduce-scatter a unit (HSDP: and one all-reduce), however many microbatches.

    Blocks are gathered for each forward and each backward, or once where they stay; what a backward
    starts with may still be there. The root's contract parameters are gathered once a step.
    """
    numel = sum(part.local.numel() for part in results()[whole(run)][0].parameters.values())
    # root, 5 blocks, and embedding and head: two units, or one when they are tied
    units = 6 + (1 if run.model == "tied" else 2)
    for trace in results()[run]:
        calls = trace.collectives
        assert {call.kind for call in calls} == {"reduce_scatter", "all_gather", "all_reduce"}
        scatters = [c.numel for c in calls if c.kind == "reduce_scatter"]
        times = run.accum if run.sync == "each" else 1
        assert len(scatters) == times * units, "of every unit"
        assert sum(scatters) >= times * numel, "of every gradient"
        gathers = [c.numel for c in calls if c.kind == "all_gather"]
        assert units <= len(gathers) <= 1 + 2 * (units - 1) * run.accum
        if run.sync == "resident":
            assert len(gathers) == units
        counts, *reduced, losses = [c.numel for c in calls if c.kind == "all_reduce"]
        assert (counts, losses) == (2, 2), "of tokens before, sums after"
        assert len(reduced) == (units if run.mesh.dp_replicate > 1 < run.mesh.dp_shard else 0)


# ---- nothing to learn from ----------------------------------------------------------------------


def quiet(name: str) -> Config:
    """Without auxiliary losses, which need no label."""
    config = config_of(Run(name))
    moe = dataclasses.replace(config.model.moe, sequence_loss=0.0, z_loss=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


def silent_step(rank: int, _world: int, run: Run) -> dict[tuple[int, ...], Any]:
    """Loss, labels and gradients of a step with label-free microbatches."""
    found = {}
    for silent in SILENT:
        world = world_of(rank, run)
        config = dataclasses.replace(quiet(run.model), mesh=run.mesh)
        model = build_model(config, world)
        batches = batches_of(0, world, run)
        batches = [without_labels(b) if i in silent else b for i, b in enumerate(batches)]
        sums = AccumulationBoundary(model, world, config).accumulate(batches)
        found[silent] = sums.loss_sum.item(), sums.valid_tokens, gradients(model)
    return found


def without_labels(batch: Batch) -> Batch:
    labels_BT = torch.full_like(batch.labels_BT, IGNORED)
    return dataclasses.replace(batch, labels_BT=labels_BT, num_targets=0, target_bytes=0)


@functools.cache
def silent_steps(name: str, ranks: int) -> list[Any]:
    run = Run(name, MeshConfig(dp_shard=ranks), accum=4)
    return [silent_step(0, 1, run)] if ranks == 1 else run_ranks(silent_step, ranks, run)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["plain", "tied"])
def test_a_step_without_labels_has_zero_gradients(name: str, ranks: int) -> None:
    for of_rank in silent_steps(name, ranks):
        loss, valid, found = of_rank[SILENT[-1]]
        assert loss == 0 and valid == 0
        assert all((part.local == 0).all() for part in found.values())


def test_microbatches_without_labels_add_nothing() -> None:
    """The step is that of the other microbatches alone, on one process and on two."""
    world, silent = World(0, 1, CPU), SILENT[0]
    model = build_model(quiet("plain"), world)
    loud = [b for i, b in enumerate(batches_of(0, world, QUIET)) if i not in silent]
    sums = AccumulationBoundary(model, world, quiet("plain")).accumulate(loud)
    for ranks in (1, 2):
        for of_rank in silent_steps("plain", ranks):
            loss, valid, found = of_rank[silent]
            assert valid == sums.valid_tokens > 0
            assert abs(loss / sums.loss_sum.item() - 1) <= 1e-12
            assert error(found, gradients(model))[0] <= 1e-12


# ---- the gradient itself ------------------------------------------------------------------------


def test_the_boundary_gives_the_gradient_of_the_mean() -> None:
    """By plain autograd on all rows at once: loss / valid + auxiliary / tokens."""
    config, world = config_of(QUIET), World(0, 1, CPU)
    model, twin = build_model(config, world), build_model(config, world)
    boundary = AccumulationBoundary(model, world, config)
    sums = boundary.accumulate(batches_of(0, world, QUIET))
    batch = ragged_batch(range(ROWS), T, config.model.vocab_size)
    for router in AccumulationBoundary(twin, world, config).loads.routers.values():
        router.aux_scale.fill_(1 / batch.ids_BT.numel())
    out = twin(batch.ids_BT, batch.labels_BT, batch.docs)
    (out.loss_sum / out.valid_tokens).backward()
    assert sums.valid_tokens == batch.num_targets and sums.tokens == batch.ids_BT.numel()
    assert sums.target_bytes == batch.target_bytes
    assert error(gradients(model), gradients(twin))[0] <= 1e-12


def rows_of(rank: int, _world: int) -> list[Any]:
    found = []
    for run in RUNS:
        if run.world == _world:
            found.append(
                micro_rows(range(3 * ROWS, 4 * ROWS), world_of(rank, run), run.device_batch)
            )
    return found


def test_rows_of_a_step_are_covered_once_by_any_split() -> None:
    for ranks in (2, 4):
        for shares in zip(*run_ranks(rows_of, ranks), strict=True):
            rows = sorted(r for share in shares for micro in share for r in micro)
            assert rows == list(range(3 * ROWS, 4 * ROWS))
