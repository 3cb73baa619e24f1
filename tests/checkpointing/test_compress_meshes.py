"""Compressed layers on meshes and through checkpoints: the same run as on one process.

Forked gloo ranks, five steps in fp64 with a redraw after every second one. Two orders of the same
sums differ by about 1e-16 of their size, so 1e-12 is a wrong formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpointing.compress import compress_linears
from megacpp.config.schema import KEEP, Config, MeshConfig
from megacpp.model.hybrid import HybridLM
from megacpp.state.training import TrainingState
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.parallel.parity import (
    Run,
    Trace,
    batches_of,
    config_of,
    covered,
    error,
    slices,
    world_of,
)
from tests.ranks import on_worlds
from tests.together import Together

POLICY = dataclasses.replace(KEEP, compress=0.25, compress_redraw=2)
STEPS = 5
SAVED = 3  # steps before the checkpoint, one after a redraw


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


RUNS = {
    "fsdp2": Run("plain", mesh(dp_shard=2)),
    "fsdp2 muon": Run("plain", mesh(dp_shard=2), optimizer="muon_adamw"),
    "tp2": Run("plain", mesh(tp=2)),
    "tp2 mla": Run("mla", mesh(tp=2)),
    "cp2 mla relu2": Run("options", mesh(cp=2)),
    "pp2": Run("plain", mesh(pp=2), accum=2),
    "pp2 zbv": Run("plain", mesh(pp=2, pp_schedule="zbv"), accum=4),
    "fsdp2 tp2 accum": Run("plain", mesh(dp_shard=2, tp=2), accum=2, sync="each"),
}
# Saved on the first, resumed on the second.
MOVES = [("one", "one"), ("one", "fsdp2"), ("fsdp2", "tp2"), ("fsdp2 tp2 accum", "one")]


def config(run: Run) -> Config:
    return dataclasses.replace(config_of(run), recompute=POLICY)


def train(rank: int, run: Run, folder: Path, source: Path | None = None) -> Trace:
    """Five steps, as `train.py` makes them, with a checkpoint after the third; or those after."""
    trace, world, settings = Trace(run), world_of(rank, run), config(run)

    def compress(model: HybridLM) -> None:
        compress_linears(model, POLICY.compress, settings.run.seed)

    model = build_model(settings, world, compress)
    boundary = AccumulationBoundary(model, world, settings)
    optimizer = build_optimizer(model, settings, world.holders)
    state = TrainingState(folder, model, optimizer, settings, "corpus")
    if source is not None:
        state.resume(str(source))
    while state.step < STEPS:
        sums = boundary.accumulate(batches_of(state.step, world, run))
        trace.losses.append(sums.loss_sum.item() / sums.valid_tokens)
        if state.step == 0:
            found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
            trace.gradients = slices(found)
        norm = clip_gradients(model.parameters(), 1.0, copies=boundary.copies, along=sums.along)
        trace.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        boundary.finish_step()
        state.advance(True, good=True)
        if state.step == SAVED and source is None:
            state.save(keep=1)
    state_of = {f"optim.{n}": t for n, t in optimizer.state_tensors().items() if t.dim()}
    trace.parameters = slices({**dict(model.named_parameters()), **state_of})
    return trace


def one(run: Run) -> Run:
    return dataclasses.replace(run.reference, accum=run.accum)


Job = tuple[str, str]  # names: a run and "straight" or "reference"; or the two runs of a move
STRAIGHT = [(name, "straight") for name in RUNS]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Together[Job, list[Trace]]:
    """Runs and their references, then what goes on from their checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {**RUNS, "one": one(RUNS["fsdp2"])}

    step = f"step-{SAVED:06d}"

    def beside(job: Job) -> list[Job]:
        own = job[0], "straight"
        return [(job[0], "reference")] if job == own else [own, ("one", "straight")]

    def run_of(job: Job) -> tuple[Run, Path]:
        name, how = job
        alone = one(runs[name]), folder / f"of {name}"
        return alone if how == "reference" else (runs[name], folder / name)

    def make(jobs: list[Job]) -> dict[Job, list[Trace]]:
        whole = {job: run_of(job) for job in jobs if job not in MOVES}
        moves = {
            (a, b): (runs[b], folder / "unused", folder / a / step)
            for a, b in jobs
            if (a, b) in MOVES
        }
        return on_ranks(whole) | on_ranks(moves)

    return Together(__name__, [*STRAIGHT, *MOVES], make, beside)


def on_ranks(jobs: Mapping[Job, tuple[Any, ...]]) -> dict[Job, list[Trace]]:
    """Return the traces of every rank of every job, one fork of ranks per world size."""
    worlds = {key: run.world for key, (run, *_) in jobs.items()}
    return on_worlds(lambda rank, key: train(rank, *jobs[key]), worlds)


@pytest.mark.parametrize("job", STRAIGHT, ids=RUNS)
def test_a_mesh_is_one_process(traces: Together[Job, list[Trace]], job: Job) -> None:
    """Loss and norm of every step, gradients of the first, weights and moments of the last."""
    found, (expected,) = traces[job], traces[job[0], "reference"]
    latents = [n for n in expected.gradients if n.endswith(".latent")]
    assert latents and all(expected.gradients[n].local.any() for n in latents)
    assert not any(expected.parameters[n].local.any() for n in latents)
    covered([t.gradients for t in found], expected.gradients)
    covered([t.parameters for t in found], expected.parameters)
    for trace in found:
        assert trace.losses == pytest.approx(expected.losses, rel=1e-12)
        assert trace.norms == pytest.approx(expected.norms, rel=1e-12)
        for part in ("gradients", "parameters"):
            worst = error(getattr(trace, part), getattr(expected, part))
            assert worst[0] <= 1e-12, worst


@pytest.mark.parametrize("move", MOVES, ids="-".join)
def test_a_resumed_run_goes_on(traces: Together[Job, list[Trace]], move: Job) -> None:
    """On the mesh that saved to the bit; on another as close as that mesh is."""
    of_ranks, (expected,) = traces[move], traces["one", "straight"]
    saver, loader = move
    for found in of_ranks:
        if saver == loader:
            assert found.losses == expected.losses[SAVED:]
            assert error(found.parameters, expected.parameters)[0] == 0
        assert found.losses == pytest.approx(expected.losses[SAVED:], rel=1e-12)
        worst = error(found.parameters, expected.parameters)
        assert worst[0] <= 1e-12, worst
