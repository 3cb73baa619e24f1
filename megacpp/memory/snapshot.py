"""Snapshots of a step's memory by component, and the cause of growth between two of them.

Pure data, no torch: megacpp/run/forensics.py takes snapshots, this file reads, writes and compares
them. A bucket is a component (components.py), or a part of one: `activations/M scan`,
`moe_routing/dispatch`. Its bytes are the most that were alive at one moment of the step. Buckets
are fullest at different moments, so they don't sum to the peak; `at_peak` does.

Longer or more rows make all buckets that depend on tokens grow by one factor. The comparison takes
this factor out first; growth beyond it is a bucket's own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megacpp.blocks.kinds import KINDS
from megacpp.errors import DataError
from megacpp.memory.components import COMPONENTS
from megacpp.memory.stream import Stream, StreamBlock

VERSION = 1
# What hangs on the number of tokens of a microbatch: in full, or in part.
BY_TOKENS = ("activations", "moe_routing", "batch")
ALSO_BY_TOKENS = ("head_loss", "feature_activations", "workspace", "communication")
QUIET = 0.005  # of the peak: growth below it is noise
LOUD = 0.02  # of the peak: growth that a person should hear of without asking,
LOUD_BYTES = 1 << 20  # and at least as much as this
QUIET_HOST = 0.05  # of the resident set, which moves by itself
BUCKETS = (
    *COMPONENTS,
    *(
        f"activations/{letter}{part}"
        for letter in sorted(KINDS)
        for part in ("", *[" scan", " conv"] * KINDS[letter].recurrent)
    ),
    *("moe_routing/router", "moe_routing/dispatch", "loose", "host"),
)
RECURRENT = tuple(letter for letter in sorted(KINDS) if KINDS[letter].recurrent)
ROUTING = ("router", "experts", "dispatch", "combine")  # modules below an E block's mixer


@dataclass(frozen=True)
class Snapshot:
    """Memory of one rank at one step.

    Attributes:
        step: counted from 1.
        followed: every allocation of the step was recorded; otherwise only resting bytes are known.
        most: bytes by bucket, at its own fullest moment.
        at_peak: bytes by component, at the fullest moment of the step; they sum to `peak_bytes`.
        where: part of the step that ran at that moment.
        resting_bytes: alive between two steps.
        loose_bytes: of these, in no parameter, gradient, optimizer state or buffer: held elsewhere.
        allocated_bytes, reserved_bytes: peaks of the caching allocator since the start; 0: none.
        split_bytes: in blocks that are partly used, and can't be given back.
        retries, ooms: of the allocator since the start.
        pools: of the allocator, current bytes: `large active`, `small reserved`, ...
        host_bytes: resident set of the process.
        tokens: their number in a microbatch on this rank.
    """

    step: int
    rank: int = 0
    device: str = "cpu"
    followed: bool = True
    most: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    where: str = ""
    resting_bytes: int = 0
    loose_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    split_bytes: int = 0
    retries: int = 0
    ooms: int = 0
    pools: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    tokens: int = 0

    @property
    def overhead_bytes(self) -> int:
        """Peak of reserved bytes less peak of allocated bytes, at least 0."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    def buckets(self) -> dict[str, int]:
        """Return bytes by bucket: of tensors, of the allocator's overhead, and of loose tensors."""
        more = {"allocator_overhead": self.overhead_bytes, "loose": self.loose_bytes}
        return dict(self.most) | {name: size for name, size in more.items() if size}


@dataclass(frozen=True)
class Cause:
    """Reason for growth: its name, prefixes of the buckets that show it, explanation, and fix."""

    name: str
    buckets: tuple[str, ...]
    words: str
    fix: str


CAUSES: tuple[Cause, ...] = (
    Cause(
        "longer_rows",
        (),
        "everything that hangs on tokens grew alike: longer rows, or more of them",
        "keep --data.seq-len and --train.device-batch-size, or halve the latter and accumulate",
    ),
    Cause(
        "dispatch",
        ("moe_routing",),
        "more rows arrive at the experts of this rank: some expert is hot",
        "raise --model.moe.bias-update-rate or --model.moe.balance-loss, bound what may arrive by "
        "--model.moe.capacity-factor 1.25, or --recompute.eblock expert_gemm_only",
    ),
    Cause(
        "ssm_state",
        tuple(f"activations/{letter}" for letter in RECURRENT),
        "blocks with a scan keep more a token: states of chunks",
        "look for a change of --model.mamba3.chunk-size or d-state (or m2rnn's); "
        "--recompute.mblock conv_bc_only, --recompute.rblock full_plus_norms",
    ),
    Cause(
        "convolution",
        tuple(f"activations/{letter} conv" for letter in RECURRENT),
        "short convolutions in front of a scan keep more a token",
        "look for a change of --model.mamba3.conv-kernel; --recompute.mblock conv_bc_only",
    ),
    Cause(
        "fragmentation",
        ("allocator_overhead",),
        "the allocator reserves more while tensors hold as much as before: its blocks don't fit",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep shapes equal between steps",
    ),
    Cause(
        "optimizer_state",
        ("optimizer_state", "muon_transient"),
        "state of the optimizer came late: the first steps ran without it",
        "count it from the start (it stays from now on); --optim.adamw-state 8bit, or more ranks",
    ),
    Cause(
        "activations",
        ("activations", "feature_activations", "head_loss"),
        "one kind of block keeps more a token for its backward",
        "recompute that kind of block (megacpp activations shows what each costs)",
    ),
    Cause(
        "gradients",
        ("gradients",),
        "more gradients wait: whole ones that are not reduced yet, or parameters that had none",
        "--train.gradient-sync each",
    ),
    Cause(
        "gathered",
        ("communication", "workspace", "batch"),
        "gathered parameters, buffers of collectives or temporaries are larger",
        "--mesh.reshard always, a lower --optim.muon-bucket-mib",
    ),
    Cause(
        "parameters",
        ("parameters",),
        "the model itself is larger",
        "parameters don't grow by themselves: look for modules made during the run",
    ),
    Cause(
        "leak",
        ("loose",),
        "tensors outlive their step: something holds on to them",
        "keep floats, not tensors, of losses and metrics; a kept loss keeps its whole graph",
    ),
    Cause(
        "host",
        ("host",),
        "the process grew on the host while tensors did not",
        "look at loaders, logs and lists that grow; --recompute.offload-host-gib bounds offload",
    ),
)
STEADY = Cause("steady", (), "nothing grew beyond noise", "nothing to do")


@dataclass(frozen=True)
class Growth:
    """Bytes of a bucket before and after; `own`: growth beyond the common factor of tokens."""

    bucket: str
    before: int
    after: int
    own: int

    @property
    def grown(self) -> int:
        """Bytes of growth, own and common."""
        return self.after - self.before


@dataclass(frozen=True)
class Difference:
    """Growth between two snapshots of a rank.

    Attributes:
        rows: one `Growth` for each bucket, largest first.
        by_cause: bytes of growth that each cause explains, largest first.
        cause: the first of them, or `steady`.
    """

    before: Snapshot
    after: Snapshot
    rows: tuple[Growth, ...]
    by_cause: dict[str, int]
    cause: Cause

    @property
    def loud(self) -> bool:
        """Whether growth exceeds the changes that routing alone makes from step to step."""
        least = max(LOUD * self.after.peak_bytes, LOUD_BYTES)
        return max(self.by_cause.values(), default=0) > least

    @property
    def largest(self) -> Growth:
        """Growth of the bucket that grew most among those that show the cause."""
        own = [row for row in self.rows if row.grown > 0 and self._speaks(row)]
        return max(own or self.rows, key=lambda row: row.grown)

    def _speaks(self, row: Growth) -> bool:
        if self.cause.name == "longer_rows":
            return row.bucket.split("/")[0] in BY_TOKENS + ALSO_BY_TOKENS
        return self.cause is STEADY or cause_of(row.bucket) is self.cause

    def as_dict(self) -> dict[str, Any]:
        """Return the difference for JSON, in bytes."""
        rows = [asdict(row) | {"grown": row.grown} for row in self.rows]
        return {
            "rank": self.after.rank,
            "steps": [self.before.step, self.after.step],
            "peak_bytes": [self.before.peak_bytes, self.after.peak_bytes],
            "reserved_bytes": [self.before.reserved_bytes, self.after.reserved_bytes],
            "cause": self.cause.name,
            "diagnosis": self.cause.words,
            "fix": self.cause.fix,
            "by_cause": self.by_cause,
            "buckets": rows,
        }


def compare(before: Snapshot, after: Snapshot) -> Difference:
    """Return growth from one snapshot to another, by bucket, and its most likely cause."""
    old, new = before.buckets(), after.buckets()
    if not (before.followed and after.followed):  # one has no buckets of what comes and goes
        known = set(old) & set(new)
        old, new = ({k: v for k, v in x.items() if k in known} for x in (old, new))
    factor = _common_factor(before, after)
    rows, by_cause = [], dict.fromkeys((cause.name for cause in CAUSES), 0)
    for bucket in sorted(old.keys() | new.keys()):
        was, now = old.get(bucket, 0), new.get(bucket, 0)
        alike = bucket.split("/")[0] in BY_TOKENS + ALSO_BY_TOKENS
        common = min(max(0, now - was), round((factor - 1) * was)) if alike else 0
        rows.append(Growth(bucket, was, now, now - was - common))
        by_cause["longer_rows"] += common
        by_cause[cause_of(bucket).name] += max(0, now - was - common)
    host = after.host_bytes - before.host_bytes
    if after.device == "cpu":  # tensors are a part of it
        host -= max(0, after.peak_bytes - before.peak_bytes)
    rows.append(Growth("host", before.host_bytes, after.host_bytes, host))
    by_cause["host"] = host if host > QUIET_HOST * before.host_bytes else 0
    quiet = QUIET * max(before.peak_bytes, sum(before.at_peak.values()), 1)
    by_cause = {k: v for k, v in sorted(by_cause.items(), key=lambda x: -x[1]) if v > quiet}
    first = next(iter(by_cause), "")
    cause = next((c for c in CAUSES if c.name == first), STEADY)
    ranked = tuple(sorted(rows, key=lambda row: (-row.grown, row.bucket)))
    return Difference(before, after, ranked, by_cause, cause)


def cause_of(bucket: str) -> Cause:
    """Return the cause that growth of a bucket alone indicates: the longest prefix that fits."""
    fits = [(len(name), c) for c in CAUSES for name in c.buckets if bucket.startswith(name)]
    assert fits, f"no cause for {bucket}"
    return max(fits, key=lambda x: x[0])[1]


def _common_factor(before: Snapshot, after: Snapshot) -> float:
    """Return the factor by which tokens grew; if not known, the least growth of their buckets."""
    if before.tokens and after.tokens:
        return max(1.0, after.tokens / before.tokens)
    old, new = before.most, after.most
    found = [
        new.get(bucket, 0) / was
        for bucket, was in old.items()
        if was and bucket.split("/")[0] in BY_TOKENS
    ]
    return max(1.0, min(found)) if len(found) > 1 else 1.0


# ---- from allocations ----------------------------------------------------------------------


def bucket_of(block: StreamBlock, letters: str) -> str:
    """Return the bucket of an allocation; `letters` are the kinds of the layers, in order."""
    if block.component not in ("activations", "moe_routing"):
        return block.component
    words = block.part.split(".")
    path = block.name.split(":")[0] if ":" in block.name else ""
    if block.component == "moe_routing":
        return "moe_routing/router" if "router" in path.split(".") else "moe_routing/dispatch"
    if words[0] != "blocks" or len(words) < 2 or int(words[1]) >= len(letters):
        return "activations"
    letter = letters[int(words[1])]
    if letter == "E" and (below := next((w for w in path.split(".") if w in ROUTING), "")):
        return "moe_routing/router" if below == "router" else "moe_routing/dispatch"
    below = path.split(".")[1:2] if KINDS[letter].recurrent else []
    part = {"scan": " scan", "convolve": " conv"}.get(below[0], "") if below else ""
    return f"activations/{letter}{part}"


def by_component(stream: Stream, event: int, letters: str) -> dict[str, int]:
    """Return bytes alive after an event, by component; `moe_routing` has all that routing keeps."""
    found = dict.fromkeys(COMPONENTS, 0)
    for bucket, size in by_bucket(stream, event, letters).items():
        found[bucket.split("/")[0]] += size
    return {name: size for name, size in found.items() if size}


def by_bucket(stream: Stream, event: int, letters: str) -> dict[str, int]:
    """Return the bytes of each bucket that are alive after an event, in the order of a table."""
    found: dict[str, int] = {}
    for number in stream.alive_at(event):
        block = stream.blocks[number]
        name = bucket_of(block, letters)
        found[name] = found.get(name, 0) + block.bytes
    return _ordered(found)


def most_by_bucket(stream: Stream, letters: str) -> dict[str, int]:
    """Return the most bytes of each bucket that are alive at one moment."""
    names = [bucket_of(block, letters) for block in stream.blocks]
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for number, sign in stream.changes():
        name = names[number]
        now[name] = now.get(name, 0) + sign * stream.blocks[number].bytes
        if now[name] > most.get(name, 0):
            most[name] = now[name]
    return _ordered(most)


def _ordered(buckets: dict[str, int]) -> dict[str, int]:
    order = {name: place for place, name in enumerate(COMPONENTS)}
    return dict(sorted(buckets.items(), key=lambda x: (order[x[0].split("/")[0]], x[0])))


# ---- files --------------------------------------------------------------------------------


def file_name(step: int, rank: int = 0) -> str:
    """Return `step-1000.json` for the first rank, `step-1000-rank-3.json` for another one."""
    return f"step-{step}-rank-{rank}.json" if rank else f"step-{step}.json"


def as_text(snapshot: Snapshot) -> str:
    """Return a snapshot as the JSON text that is stored."""
    return json.dumps({"megacpp_snapshot": VERSION, **asdict(snapshot)}, indent=1) + "\n"


def read_snapshot(path: Path) -> Snapshot:
    """Read a stored snapshot.

    Raises:
        DataError: the file doesn't exist, or isn't a snapshot of megacpp.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        what = (error.strerror or type(error).__name__).lower()
        raise DataError(f"snapshot={path}: {what}. Fix: give two files of RUN/memory.") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.pop("megacpp_snapshot", None) != VERSION:
        raise DataError(
            f"snapshot={path}: not one of megacpp. Fix: give two files of RUN/memory; a pickle of "
            "PyTorch is not read, because reading one runs what it says."
        )
    try:
        return _checked(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"snapshot={path}: is damaged ({error}). Fix: give another one.") from None


def _checked(values: dict[str, Any]) -> Snapshot:
    """Return the snapshot, with the type of every value checked."""
    kinds = {"int": int, "str": str, "bool": bool, "dict[str, int]": dict}
    for f in fields(Snapshot):
        value = values.get(f.name, f.default)
        expected = kinds[str(f.type)]
        if f.name in values and (
            not isinstance(value, expected) or (expected is int and isinstance(value, bool))
        ):
            raise ValueError(f"{f.name} is {value!r}")
        if expected is dict and f.name in values:
            for name, size in value.items():
                known = f.name == "pools" or name in BUCKETS
                if not known or not isinstance(size, int) or size < 0:
                    raise ValueError(f"{f.name} has {name}: {size!r}")
    return Snapshot(**values)


def snapshots_of(folder: Path, rank: int = 0) -> list[Snapshot]:
    """Return all readable snapshots of a rank in a run's `memory` folder, by step."""
    found = []
    for path in folder.glob(f"step-*-rank-{rank}.json" if rank else "step-*.json"):
        if rank == 0 and "-rank-" in path.name:
            continue
        try:
            found.append(read_snapshot(path))
        except DataError:
            continue
    return sorted(found, key=lambda s: s.step)
