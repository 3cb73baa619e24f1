"""Resumed runs equal runs that never stopped, on the same mesh or another.

Forked gloo ranks, real steps in fp64: three, a checkpoint, three more. On the mesh that saved, the
resumed steps are the same to the last bit. On another one, sums are made in another order, about
1e-16 of their size apart, so 1e-12 is a wrong tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.config.schema import MeshConfig
from megacpp.data.batches import Batch
from megacpp.data.loader import Loader
from megacpp.model.init import Slice
from megacpp.run.health import Health
from megacpp.state.tensors import model_tensors
from megacpp.state.training import TrainingState
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.differences import largest
from tests.figures import Record
from tests.parallel.parity import ROWS, Run, Slices, config_of, covered, error, models, world_of
from tests.parallel.parity import T as SEQ_LEN
from tests.parallel.parity import slices as slices_of
from tests.ranks import on_worlds
from tests.state.meshes import digests, fill, merged
from tests.synthetic import ragged_batch
from tests.together import Together

BEFORE, AFTER = 3, 6  # steps


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


RUNS = {
    "one": Run("plain"),
    "muon": Run("plain", optimizer="muon_adamw"),
    "tp2": Run("plain", mesh(tp=2)),
    "muon tp4": Run("plain", mesh(tp=4), optimizer="muon_adamw"),
    "fsdp2": Run("plain", mesh(dp_shard=2)),
    "muon fsdp2 tp2": Run("plain", mesh(dp_shard=2, tp=2), optimizer="muon_adamw"),
    "ep2": Run("plain", mesh(dp_shard=2, ep=2)),
    "fsdp2 cp2 ep4": Run("plain", mesh(dp_shard=2, cp=2, ep=4)),
    "pp2": Run("plain", mesh(pp=2), accum=2),
    "pp2 tp2": Run("plain", mesh(pp=2, tp=2), accum=2),
    "tied": Run("tied"),
    "tied pp2 fsdp2": Run("tied", mesh(pp=2, dp_shard=2), accum=2),
}
SAME = ["one", "muon fsdp2 tp2", "fsdp2 cp2 ep4", "pp2 tp2", "tied pp2 fsdp2"]
STAYS = [(name, name) for name in SAME]
MOVES = [
    ("muon fsdp2 tp2", "muon"),
    ("one", "tp2"),
    ("tp2", "fsdp2"),
    ("muon tp4", "muon fsdp2 tp2"),
    ("ep2", "one"),
    ("one", "ep2"),
    ("fsdp2 cp2 ep4", "pp2"),
    ("pp2 tp2", "fsdp2 cp2 ep4"),
    ("pp2 tp2", "one"),
    ("tied pp2 fsdp2", "tied"),
    ("tied", "tied pp2 fsdp2"),
]


@dataclass
class Trace:
    """Run on one rank from the checkpoint on."""

    digests: dict[str, str] = field(default_factory=dict)  # of whole tensors, at the checkpoint
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # read from the checkpoint on
    health: dict[str, Any] = field(default_factory=dict)  # at the end
    tensors: Slices = field(default_factory=dict)  # at the end


class Rows:
    """Ragged rows by global number."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def changes_at(self, step: int, /) -> bool:
        return False

    def train_batch(self, rows: Sequence[int], /) -> Batch:
        return ragged_batch(rows, SEQ_LEN, self.vocab_size)


def train(rank: int, run: Run, folder: Path, source: Path | None) -> Trace:
    """Six steps as `train.py` makes them with a checkpoint after the third, or the last three."""
    trace, world, config = Trace(), world_of(rank, run), config_of(run)
    model = build_model(config, world)
    boundary, optimizer = (
        AccumulationBoundary(model, world, config),
        build_optimizer(model, config, world.holders),
    )
    place, places = world.coordinate("batch"), world.degree("batch")
    loader = Loader(Rows(models()[run.model].vocab_size), place, places, run.device_batch)
    health = Health()
    state = TrainingState(folder, model, optimizer, config, "corpus", loader, {"health": health})

    def tensors() -> dict[str, Tensor]:
        own = {f"model.{name}": t for name, t in model_tensors(model).items()}
        return own | {f"optim.{name}": t for name, t in optimizer.state_tensors().items()}

    if source is not None:
        fill(tensors(), seed=7)
        state.resume(str(source))
        trace.digests = digests(tensors())
    while state.step < AFTER:
        batches = list(loader.take(run.accum))
        sums = boundary.accumulate(batches)
        norm = clip_gradients(model.parameters(), config.optim.clip_norm, copies=boundary.copies)
        optimizer.step()
        optimizer.zero_grad()
        boundary.finish_step()
        loss = sums.loss_sum.item() / sums.valid_tokens
        health.observe(state.step, loss, norm.item())
        state.advance(True, good=True)
        if state.step > BEFORE:
            trace.losses.append(loss)
            trace.norms.append(norm.item())
            trace.rows += [row for batch in batches for row in batch.rows]
        elif state.step == BEFORE:
            state.save(keep=1)
            trace.digests = digests(tensors())
    trace.health = health.state()
    trace.tensors = slices_of({name: t for name, t in tensors().items() if t.dim()})
    return trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


Move = tuple[str, str]  # names of the run that saves and of the run that goes on
Found = tuple[list[Trace], list[Trace]]  # of all ranks: of the first without a stop, of the second


@pytest.fixture(scope="module")
def results(folder: Path) -> Together[Move, Found]:
    def make(moves: list[Move]) -> dict[Move, Found]:
        straight = on_ranks({a: (RUNS[a], folder / a, None) for a, _ in moves})
        path = f"step-{BEFORE:06d}"
        jobs = {(a, b): (RUNS[b], folder / "unused", folder / a / path) for a, b in moves}
        return {(a, b): (straight[a], traces) for (a, b), traces in on_ranks(jobs).items()}

    return Together(__name__, [*STAYS, *MOVES], make)


def on_ranks(jobs: Mapping[Any, tuple[Run, Path, Path | None]]) -> dict[Any, list[Trace]]:
    """Return the traces of every rank of every job."""
    worlds = {key: run.world for key, (run, *_) in jobs.items()}
    return on_worlds(lambda rank, key: train(rank, *jobs[key]), worlds)


@pytest.mark.parametrize("move", STAYS, ids=SAME)
def test_on_the_same_mesh_to_the_last_bit(
    results: Together[Move, Found], move: Move, record_property: Record
) -> None:
    for expected, found in zip(*results[move], strict=True):
        assert found.digests == expected.digests
        assert found.losses == expected.losses and found.norms == expected.norms
        assert found.rows == expected.rows and found.health == expected.health
        assert found.tensors.keys() == expected.tensors.keys()
        for key, part in found.tensors.items():
            assert part.local.equal(expected.tensors[key].local), key
    record_property("models and meshes resumed, equal bit for bit", 1)


@pytest.mark.parametrize("move", MOVES, ids="-".join)
def test_on_another_mesh(
    results: Together[Move, Found], move: Move, record_property: Record
) -> None:
    saved, loaded = results[move]
    assert merged([t.digests for t in loaded]) == merged([t.digests for t in saved])
    for key in ("losses", "norms"):
        for found in loaded:
            assert getattr(found, key) == pytest.approx(getattr(saved[0], key), rel=1e-12)
    after = set(range(BEFORE * ROWS, AFTER * ROWS))
    for traces in (loaded, saved):
        assert {row for trace in traces for row in trace.rows} == after
    for found in loaded:
        figures, of_saved = found.health, saved[0].health
        assert figures["weight"] == of_saved["weight"]
        assert figures["average"] == pytest.approx(of_saved["average"], rel=1e-12)
        assert figures["losses"] == pytest.approx(of_saved["losses"], rel=1e-12)
    whole = wholes([t.tensors for t in saved])
    covered([t.tensors for t in loaded], whole)
    for found in loaded:
        worst = error(found.tensors, whole)
        assert worst[0] <= 1e-12, worst
    record_property("resumed on another mesh", 1)
    record_property(
        "largest relative difference after it", largest(error(t.tensors, whole)[0] for t in loaded)
    )


def wholes(of_ranks: list[Slices]) -> Slices:
    """Whole tensors, put together from what each rank holds."""
    found: Slices = {}
    for of_rank in of_ranks:
        for key, part in of_rank.items():
            empty = torch.zeros(part.shape, dtype=part.local.dtype)
            full = found.setdefault(key, Slice(empty, part.shape, (0,) * len(part.shape)))
            box = (slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))
            full.local[tuple(box)] = part.local
    return found
