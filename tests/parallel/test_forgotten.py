"""Documents and their memos go with a microbatch, without Python's garbage collector.

Parts of a row, which tensor parallelism makes, point back at the row. The collector knows nothing
of a GPU's memory.
"""

from __future__ import annotations

import gc

import pytest

from megacpp.config.schema import MeshConfig
from megacpp.model.documents import Documents
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.parallel.parity import Run, batches_of, config_of, world_of
from tests.ranks import run_ranks


def alive(rank: int, world: int, run: Run, evaluates: bool) -> list[int]:
    """Return the number of documents with memos that live after each of three steps."""
    here, config = world_of(rank, run), config_of(run)
    boundary = AccumulationBoundary(build_model(config, here), here, config)
    gc.collect()
    gc.disable()
    found = []
    for step in range(3):
        if evaluates:
            boundary.evaluate(batches_of(step, here, run))
        else:
            boundary.accumulate(batches_of(step, here, run), step)
            boundary.finish_step()
        living = [o for o in gc.get_objects() if type(o) is Documents]
        found.append(sum(bool(vars(docs)["_memo"]) for docs in living))
        del living
    gc.enable()
    return found


@pytest.mark.parametrize("evaluates", [False, True], ids=["trains", "evaluates"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("model", ["plain", "ahead"])
def test_documents_go_with_their_microbatch(
    model: str, mesh: dict[str, int], evaluates: bool
) -> None:
    run = Run(model, MeshConfig(dp_shard=1, **mesh), accum=2)
    assert set(map(tuple, run_ranks(alive, run.world, run, evaluates))) == {(0, 0, 0)}
