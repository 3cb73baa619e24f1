"""What a step keeps between microbatches and sends, against the closed forms; two gloo ranks."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import pytest

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.config.schema import MeshConfig
from megacpp.data.batches import Batch
from megacpp.memory.forms.accumulation import GradientSync, held, travelling
from megacpp.model.fp32 import contract_parameters
from megacpp.model.head import LossSum
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.parallel.parity import Run, batches_of, config_of, world_of
from tests.ranks import run_ranks

SYNCS: tuple[GradientSync, ...] = ("defer", "each", "resident")
MICROBATCHES = 4


def kept(rank: int, _: int) -> dict[tuple[GradientSync, str], tuple[int, int, int, int]]:
    """Bytes alive before the last forward, made since the step began; elements whole and here."""
    found: dict[tuple[GradientSync, str], tuple[int, int, int, int]] = {}
    for sync in SYNCS:
        for dtype in ("fp32", "bf16"):
            run = Run("F", MeshConfig(dp_shard=2), accum=MICROBATCHES, sync=sync)
            config = config_of(dataclasses.replace(run, dtype=dtype))  # type: ignore[arg-type]
            world = world_of(rank, run)
            model = build_model(config, world)
            boundary = AccumulationBoundary(model, world, config)

            with LiveBytes() as live:
                watched = Watched(boundary._run, live)
                boundary._run = watched  # type: ignore[method-assign]
                boundary.accumulate(batches_of(0, world, run))
            contract = {id(p) for _, p in contract_parameters(model)}
            own = [p for p in model.parameters() if id(p) not in contract]
            whole = sum(p.numel() for p in own)
            here = sum(p.to_local().numel() for p in own)  # type: ignore[attr-defined]
            unit = max(p.numel() for p in own)
            found[sync, dtype] = watched.seen[-1] - watched.seen[0], whole, here, unit
    return found


class Watched:
    """A forward that notes how many bytes are alive when it starts."""

    def __init__(self, forward: Callable[[Batch], LossSum], live: LiveBytes) -> None:
        self.forward, self.live = forward, live
        self.seen: list[int] = []

    def __call__(self, batch: Batch) -> LossSum:
        self.seen.append(self._settled())
        return self.forward(batch)

    def _settled(self) -> int:
        """Return the least of several readings.

        A thread of gloo lets go of a collective's tensors only after it has said that it is done.
        """
        readings = []
        for _ in range(5):
            readings.append(self.live.alive())
            time.sleep(0.01)
        return min(readings)


@functools.cache
def results() -> list[dict[tuple[GradientSync, str], tuple[int, int, int, int]]]:
    return run_ranks(kept, 2, timeout_s=120)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sync", SYNCS)
def test_bytes_kept_between_microbatches(sync: GradientSync, dtype: str) -> None:
    """Before the last forward against before the first.

    Besides there are counters and contract parameters, less than 300 bytes here, and, where the
    last thing that happened was a reduction, the flat gradient that it read, which FSDP2 lets go of
    at the next one: at most that of one unit.
    """
    for of_rank in results():
        difference, whole, here, unit = of_rank[sync, dtype]
        compute_bytes = 2 if dtype == "bf16" else 4
        expected = held(sync, whole, here, MICROBATCHES, compute_bytes).total
        read = 4 * unit if sync == "each" else 0
        assert expected <= difference <= expected + read + 300, (difference, expected, read)


def test_bytes_that_travel() -> None:
    """The figures that the book shows, of 8 microbatches."""
    assert travelling("defer", 8).total == 36
    assert travelling("defer", 8, gathered_again=False).total == 20
    assert travelling("each", 8).total == 64
    assert travelling("resident", 8).total == 6
    assert held("defer", 10, 5, 1).total == 0, "one microbatch keeps nothing"
