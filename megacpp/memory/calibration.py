"""Record how far estimates missed, and derive the margin of the next launch from it.

A record is found by a hash of everything that memory depends on: hardware, versions, allocator,
kernels, model, mesh, policy, optimizer, precision and batch. Records that differ in the batch alone
are neighbours: a miss that was measured at 8 rows a device also counts at 4 and 2. No torch import
here.

One record can't tell which part of a miss grows with the batch. So a neighbour's miss is taken
both in bytes and in proportion to the estimate; the larger of the two counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megacpp.config.schema import Config
from megacpp.memory.budget import GIB, words

TRUST = 0.05  # an estimate this close, relatively, in all and in each bucket, is believed
LEAST = 0.01  # of the whole: a bucket that missed less doesn't decide about trust
# Of the optimizer and of training, what memory depends on; of a batch, what neighbours differ in.
OPTIM = (
    "name",
    "adamw_state",
    "adamw_layers",
    "cautious_weight_decay",
    "muon_momentum_dtype",
    "muon_dtype",
    "muon_bucket_mib",
    "muon_coefficients",
)
TRAIN = ("gradient_sync", "divisor", "nonfinite", "compile")
OF_A_STEP = "tensors_of_a_step"  # tensors that don't outlive the step
BATCH = ("device_batch_size", "grad_accum", "num_chunks")
PRECISION = (
    *("dtype", "fp8", "fp8_layers", "fp8_ends", "fp8_recipe", "fp8_local_scales"),
    "fp8_all_gather",
)


@dataclass(frozen=True)
class Situation:
    """Everything that a launch's memory depends on.

    Attributes:
        key: hash of all of it.
        family: hash of all but the batch.
        rows: rows of a device batch, or of one of its chunks.
        about: the settings themselves, for people who read a record.
    """

    key: str
    family: str
    rows: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """Predicted and measured bytes of one launch, each the maximum over all ranks.

    Attributes:
        key: see `Situation`.
        family: see `Situation`.
        rows: rows of a device batch.
        predicted_bytes: estimate of the fullest rank.
        measured_bytes: peak of the fullest rank.
        components: by name, predicted and measured bytes; None: not measurable there.
        steps: optimizer steps that had been taken.
        written: Unix time.
    """

    key: str
    family: str
    rows: int
    predicted_bytes: int
    measured_bytes: int
    components: dict[str, dict[str, int | None]]
    steps: int = 1
    written: float = 0.0

    @property
    def miss_bytes(self) -> int:
        """Measured bytes less predicted ones; above 0, more was needed than predicted."""
        return self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True)
class Margin:
    """Memory that stays free in addition to the configured headroom.

    Attributes:
        extra_bytes: 0 where the estimate is trusted, and where it was too large.
        source: a `record` of this very launch, or a `neighbour` with another batch.
        residual: measured over predicted bytes, less 1.
        rows: rows of a device batch of the record that was used.
        trusted: the residual is within 5 %, and so is every bucket that was measured.
        off: by bucket that is not, measured bytes less predicted ones.
        unreadable: names of files that hold no record.
    """

    extra_bytes: int = 0
    source: Literal["none", "record", "neighbour"] = "none"
    residual: float | None = None
    rows: int | None = None
    trusted: bool = False
    off: tuple[tuple[str, int], ...] = ()
    unreadable: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the line about calibration in the header of a run."""
        bad = f"; unreadable and left out: {', '.join(self.unreadable)}" if self.unreadable else ""
        if self.residual is None:
            return f"calibration: no launch of this kind is on record{bad}"
        such = "this launch" if self.source == "record" else f"one of {self.rows} rows a device"
        word = "more" if self.residual > 0 else "less"
        off = f"calibration: {such} took {abs(self.residual):.1%} {word} than estimated before"
        if self.trusted:
            return f"{off}: the estimate is trusted{bad}"
        if self.off:
            off += (
                " (" + ", ".join(f"{name} {size / GIB:+.1f} GiB" for name, size in self.off) + ")"
            )
        if not self.extra_bytes:
            return f"{off}: the headroom stays as it is{bad}"
        return f"{off}: {words(self.extra_bytes)} more stay free{bad}"


def situation(
    config: Config,
    size: int,
    device: str,
    versions: Mapping[str, str | None],
    allocator: str = "",
) -> Situation:
    """Return the situation of a resolved configuration.

    Args:
        config: resolved, for `size` ranks; kernels by the names that were chosen.
        size: number of devices.
        device: name of the device; `cpu` for a CPU.
        versions: of packages, the driver and NCCL, which memory depends on.
        allocator: settings of the environment for torch's allocator.
    """
    about = {
        "hardware": {"device": device, "count": size, "measures": measures(device)},
        "versions": dict(versions),
        "model": asdict(config.model),
        "mesh": asdict(config.mesh),
        "policy": asdict(config.recompute),
        "optimizer": {name: getattr(config.optim, name) for name in OPTIM},
        "precision": {name: getattr(config.precision, name) for name in PRECISION},
        "kernels": asdict(config.kernels),
        "allocator": {"expandable": config.memory.expandable_segments, "environment": allocator},
        "train": {name: getattr(config.train, name) for name in TRAIN},
        "qk_clip": config.optim.qk_clip > 0,
        "seq_len": config.data.seq_len,
    }
    batch = {name: getattr(config.train, name) for name in BATCH}
    whole = {**about, "batch": batch}
    rows = config.train.device_batch_size // config.train.num_chunks
    return Situation(fingerprint(whole)[:20], fingerprint(about)[:20], rows, whole)


def measures(device: str) -> str:
    """Return which memory is compared: of `tensors` on a CPU, of the whole `device` on a GPU."""
    return "tensors" if device == "cpu" else "device"


def fingerprint(content: Any) -> str:
    """Return the SHA-256 of canonical JSON: sorted keys, no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def margin(
    point: int,
    of: Situation,
    records: Iterable[Record],
    components: Mapping[str, int] | None = None,
) -> Margin:
    """Return the margin that records add to an estimate of `point` bytes.

    A record of this very situation predicts the measured bytes. Otherwise the neighbour with the
    nearest ratio of rows a device counts; of two equally near, the one with the larger miss.

    Args:
        point: estimated bytes.
        of: situation of the launch.
        records: of earlier launches.
        components: estimated bytes by bucket, for a record of this very situation.
    """
    known = list(records)
    exact = [r for r in known if r.key == of.key]
    if exact:
        newest = max(exact, key=lambda r: r.written)
        return _of_miss(newest.measured_bytes - point, point, "record", newest, components or {})
    near = [r for r in known if r.family == of.family and r.predicted_bytes > 0]
    if not near:
        return Margin()
    away = lambda r: abs(math.log2(r.rows / of.rows))  # noqa: E731
    nearest = min(near, key=lambda r: (away(r), -r.miss_bytes))
    miss = nearest.miss_bytes
    scaled = round(miss * point / nearest.predicted_bytes)
    return _of_miss(max(miss, scaled), point, "neighbour", nearest, {})


def _of_miss(
    miss_bytes: int,
    point: int,
    source: Literal["record", "neighbour"],
    record: Record,
    components: Mapping[str, int],
) -> Margin:
    residual = miss_bytes / max(1, point)
    off = tuple(buckets_off(record, components))
    trusted = abs(residual) <= TRUST and not off
    extra = 0 if trusted else max(0, miss_bytes)
    return Margin(extra, source, residual, record.rows, trusted, off)


def buckets_off(record: Record, components: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield measured buckets that a prediction missed by more than 5 %, with the bytes missed.

    Two misses that cancel in the sum would not at another batch. `tensors_of_a_step` stands for the
    buckets of a step where these can't be told apart.

    Args:
        record: of a launch.
        components: today's predictions; without one the record's own counts.
    """
    apart = record.components.get("activations", {}).get("measured") is not None
    for name, both in record.components.items():
        measured = both["measured"]
        if measured is None or (name == OF_A_STEP and apart):
            continue
        predicted = components.get(name, both["predicted"] or 0)
        miss = measured - predicted
        if abs(miss) > max(TRUST * predicted, LEAST * record.measured_bytes):
            yield name, miss


def read_records(folder: Path) -> tuple[list[Record], tuple[str, ...]]:
    """Return all records of a folder, and names of files that hold none."""
    found, bad = [], []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found.append(_parse(json.loads(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            bad.append(path.name)
    return found, tuple(bad)


def write_record(folder: Path, record: Record, of: Situation, **more: Any) -> Path:
    """Write `folder/KEY.json` atomically and return its path; a situation keeps its newest launch.

    Args:
        folder: is made if it doesn't exist.
        record: the launch to store.
        of: the launch's situation, whose settings are stored too.
        more: further entries of the JSON object.
    """
    content = {**asdict(record), "residual": record.miss_bytes / max(1, record.predicted_bytes)}
    path = folder / f"{record.key}.json"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**content, **more, "about": of.about}, indent=2) + "\n")
    temporary.replace(path)
    return path


def _parse(content: Mapping[str, Any]) -> Record:
    numbers = ("rows", "predicted_bytes", "measured_bytes", "steps", "written")
    for name in numbers:
        if not isinstance(content[name], (int, float)) or content[name] < 0:
            raise ValueError(name)
    if content["rows"] < 1:
        raise ValueError("rows")
    names = ("key", "family", *numbers, "components")
    return Record(**{name: content[name] for name in names})


def compared(
    predicted: Mapping[str, int], measured: Mapping[str, int | None], names: Sequence[str]
) -> dict[str, dict[str, int | None]]:
    """Return predicted and measured bytes of each component, side by side."""
    return {n: {"predicted": predicted.get(n, 0), "measured": measured.get(n)} for n in names}
