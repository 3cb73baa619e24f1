"""Memory snapshots of a running trainer by component, and their comparison.

    forensics = Forensics(folder, config, rank, device, lambda: StepWatch(model, optimizer))
    for step in ...:
        forensics.begin(step)
        ...                      # the whole step
        log.warn(forensics.end(step))
    forensics.close(sum_over_ranks)

Every `memory.snapshot_every` steps a step is recorded, and another one `memory.snapshot_gap` steps
later; the two are compared. The first step is recorded as well, for the calibration record
(measured.py), and not stored. All other steps cost one comparison of integers. A recorded step
dispatches each operator through Python: on a CPU with small matrices it takes about half as long
again.

A run that fails leaves what this rank knows: `memory/error-step-N.json`, the bytes at the error (of
a step that was not recorded only those that outlive it), `memory/summary-rank-N.json`, and on a GPU
the allocator's own snapshot for pytorch.org/memory_viz.

A compiled block hides its tensors, and Transformer Engine allocates outside torch's dispatcher: a
snapshot then has the tensors that outlive a step and the allocator's figures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.memory.budget import resident_bytes, words
from megacpp.memory.components import RESTING
from megacpp.memory.snapshot import (
    BUCKETS,
    CAUSES,
    STEADY,
    Difference,
    Snapshot,
    as_text,
    by_bucket,
    by_component,
    compare,
    file_name,
    most_by_bucket,
    snapshots_of,
)
from megacpp.memory.stream import Stream
from megacpp.model.pattern import block_letters
from megacpp.run.metrics import peak_resident_bytes
from megacpp.state.files import write_json, write_text

KEPT = 2  # newest snapshots of ranks other than the first, beside the oldest one
CAUSE_NAMES = (STEADY.name, *(cause.name for cause in CAUSES))


class Watch(AbstractContextManager["Watch"], Protocol):
    """Recorder of a step while its context is entered (checkpointing/tracing/watch.py)."""

    def stream(self) -> Stream:
        """Return the allocations so far."""
        ...

    def rest(self) -> dict[str, int]:
        """Return the bytes that outlive a step, by component."""
        ...


class Forensics:
    """Snapshots of one rank: taken, stored and compared.

    Args:
        folder: folder of the run; snapshots go to `memory/` in it.
        config: configuration of the run.
        rank: this rank.
        device: device of this rank.
        watch: makes the recorder of one step.
        first_step: first step of this start; snapshots of later steps are deleted.

    Attributes:
        first, last: stored snapshots of this start.
        seen: snapshot of the step that ended last, if it was due or requested.
        failed: snapshot at the error that ended the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        rank: int,
        device: torch.device,
        watch: Callable[[], Watch],
        first_step: int = 0,
    ) -> None:
        self.config = config
        self.folder, self.rank, self.device, self.watch = folder / "memory", rank, device, watch
        self.every, self.gap = config.memory.snapshot_every, config.memory.snapshot_gap
        # While operators are recorded, FlexAttention runs uncompiled and materialises all scores.
        hidden = config.precision.fp8 == "te" or config.kernels.attention == "flex"
        self.follows = config.train.compile == "off" and not hidden
        self.letters = block_letters(config.model.pattern, config.model.depth)
        self.tokens = config.train.device_batch_size * config.data.seq_len
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self.seen: Snapshot | None = None
        self.failed: Snapshot | None = None
        self._step = first_step
        self._asked = False
        self._before: dict[int, Snapshot] = {}  # snapshots that wait for their comparison
        self._running: Watch | None = None
        for old in snapshots_of(self.folder, rank):
            if old.step > first_step:
                (self.folder / file_name(old.step, rank)).unlink(missing_ok=True)

    def due(self, step: int) -> bool:
        """Return whether step `step` (the first is 0) is recorded; the first never is."""
        done, first = step + 1, step + 1 - self.gap
        if self.every <= 0 or done < 2:
            return False
        second = self.gap > 0 and first > 0 and first % self.every == 0
        return done % self.every == 0 or second

    def begin(self, step: int, asked: bool = False) -> None:
        """Start recording, before anything of a step is allocated.

        Args:
            step: index of the step.
            asked: record this step, due or not.
        """
        self._step, self._asked, self.seen = step, asked, None
        if (asked or self.due(step)) and self.follows:
            self._running = self.watch()
            self._running.__enter__()

    def end(self, step: int) -> list[str]:
        """Store a snapshot of a recorded step, after the optimizer's step.

        Returns:
            A warning if memory grew since the snapshot that this one is compared with.
        """
        if not (self._asked or self.due(step)):
            return []
        stream = None
        if self._running is not None:
            self._running.__exit__(None, None, None)
            stream, self._running = self._running.stream(), None
        found = self.seen = self._snapshot(step + 1, stream)
        if not self.due(step):
            return []
        self.first, self.last = self.first or found, found
        self._store(found)
        before = self._before.pop(found.step - self.gap, None)
        if found.step % self.every == 0 and self.gap > 0:
            self._before[found.step] = found
        return growth_lines(compare(before, found)) if before is not None else []

    def close(self, sum_over_ranks: Callable[[Tensor], Tensor], size: int) -> None:
        """Write the peaks of every rank and the largest growth to `memory/summary.json`.

        All ranks call it.

        Args:
            sum_over_ranks: sum of a tensor over all ranks.
            size: number of ranks.
        """
        row = self._row(self.last)
        table = torch.zeros(size, len(row), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor(row)
        table = sum_over_ranks(table).tolist()
        if self.rank == 0:
            write_json(self.folder / "summary.json", summary(table))

    def at_error(self) -> Snapshot:
        """Return a snapshot of now, when the run has failed; write it and this rank's summary.

        Tensors are those that the frames of the exception still hold. No other rank is waited for.
        """
        if self.failed is not None:
            return self.failed
        stream = None
        if self._running is not None:
            stream = self._running.stream()  # before the watch ends: then a forward has ended
            self._running.__exit__(None, None, None)
            self._running = None
        event = len(stream.events) - 1 if stream is not None else 0
        found = self.failed = self._snapshot(self._step + 1, stream, event)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / f"error-{file_name(found.step, self.rank)}", as_text(found))
        buckets = {name: size for name, size in found.most.items() if name not in RESTING}
        about = {
            "rank": self.rank,
            "step": found.step,
            "where": found.where,
            "largest_bucket": max(buckets, key=lambda name: buckets[name], default=None),
            "largest_bucket_bytes": max(buckets.values(), default=None),
        }
        # Bytes that outlive a step are no growth since a recorded step's peak.
        alike = found.followed or not self.follows
        content = {"error": about, **summary([self._row(found if alike else self.last)])}
        write_json(self.folder / f"summary-rank-{self.rank}.json", content)
        if self.device.type == "cuda" and torch.cuda.is_available():
            name = f"error-step-{found.step}-rank-{self.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(self.folder / name))
        return found

    def _row(self, last: Snapshot | None) -> list[int]:
        """Return this rank's line of the summary: peaks, and growth since the first snapshot."""
        own, grown = self._snapshot(0, None), [0] * 5
        if self.first is not None and last is not None and self.first is not last:
            found = compare(self.first, last)
            cause = CAUSE_NAMES.index(found.cause.name)
            bucket = BUCKETS.index(found.largest.bucket)
            grown = [found.largest.grown, cause, bucket, self.first.step, last.step]
        return [own.reserved_bytes, own.allocated_bytes, peak_resident_bytes(), *grown]

    def _snapshot(self, step: int, stream: Stream | None, at: int | None = None) -> Snapshot:
        """Return what is known of a step, at its fullest moment or after an event."""
        rest = self.watch().rest()
        resting = sum(rest.values())
        values: dict[str, Any] = {"most": rest, "peak_bytes": resting, "at_peak": rest}
        if stream is not None:
            if at is None:
                event, most = stream.peak()[0], most_by_bucket(stream, self.letters)
            else:
                event, most = at, by_bucket(stream, at, self.letters)
            values = {
                "most": most,
                "at_peak": by_component(stream, event, self.letters),
                "peak_bytes": stream.timeline()[event],
                "where": stream.where(event),
            }
        return Snapshot(
            step=step,
            rank=self.rank,
            device=self.device.type,
            followed=stream is not None,
            resting_bytes=resting,
            host_bytes=resident_bytes(),
            tokens=self.tokens,
            **values,
            **allocator_state(self.device, resting),
        )

    def _store(self, found: Snapshot) -> None:
        """Store a snapshot; ranks other than the first keep only the oldest and the newest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / file_name(found.step, self.rank), as_text(found))
        if self.rank:
            for old in snapshots_of(self.folder, self.rank)[1:-KEPT]:
                (self.folder / file_name(old.step, self.rank)).unlink(missing_ok=True)


def growth_lines(found: Difference) -> list[str]:
    """Return a warning if something grew by much: routing alone varies a little between steps."""
    if not found.loud:
        return []
    row, (before, after) = found.largest, (found.before.step, found.after.step)
    return [
        f"memory: from step {before} to {after} {row.bucket} grew by {words(row.grown)} to "
        f"{words(row.after)}: {found.cause.words}. Fix: {found.cause.fix}."
    ]


def summary(table: list[list[int]]) -> dict[str, Any]:
    """Return the summary for the record of a run, from one row per rank (`Forensics.close`)."""
    rank, row = max(enumerate(table), key=lambda x: x[1][3])
    grown, cause, bucket, first, last = row[3:]
    return {
        "peak_reserved_bytes": [r[0] for r in table],
        "peak_allocated_bytes": [r[1] for r in table],
        "peak_resident_bytes": [r[2] for r in table],
        "largest_growth": None
        if first == last
        else {
            "rank": rank,
            "steps": [first, last],
            "bucket": BUCKETS[bucket],
            "grown_bytes": grown,
            "cause": CAUSE_NAMES[cause],
        },
    }


def allocator_state(device: torch.device, resting: int) -> dict[str, Any]:
    """Return the caching allocator's figures as fields of a snapshot; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    pools = {
        f"{pool} {kind}": stats.get(f"{kind}_bytes.{pool}_pool.current", 0)
        for pool in ("small", "large")
        for kind in ("allocated", "reserved", "active", "inactive_split")
    }
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
        "loose_bytes": max(0, stats.get("allocated_bytes.all.current", 0) - resting),
        "pools": pools,
    }
