"""Memory that a machine has left for its ranks, and the rank that needs most; no torch import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from megacpp.config.schema import Config
from megacpp.kernels.selection import planned_kernels
from megacpp.memory.estimate import MemoryEstimate, estimate

EstimateFunction = Callable[[Config, int, int, int | None], MemoryEstimate]
GIB = 1 << 30
BRIEF: EstimateFunction = partial(
    estimate, detail=False
)  # of many configurations, for their sums alone


def fullest(
    config: Config, size: int, budget: int | None = None, estimator: EstimateFunction = estimate
) -> tuple[int, MemoryEstimate]:
    """Return the rank of `size` that needs most memory, and its estimate.

    Ranks differ by their pipeline stage; if shards are uneven, the first rank of a stage holds the
    longest ones.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        budget: bytes that a rank may use.
        estimator: estimates one rank.
    """
    stride = size // config.mesh.pp
    found = [
        (stride * s, estimator(config, size, stride * s, budget)) for s in range(config.mesh.pp)
    ]
    return max(found, key=lambda one: one[1].point)


def as_run(config: Config, device: str, narrow: bool) -> Config:
    """Return the configuration with `auto` resolved as a run on that device resolves it.

    Kernels are those planned for a host that hasn't been examined. A caller that has examined it
    names them before (`as_chosen`, megacpp/kernels/chosen.py).

    Args:
        config: may have `auto` in it.
        device: `cpu` or `cuda`.
        narrow: the device computes in bf16 unless another dtype is set.
    """
    precision = config.precision
    if precision.dtype == "auto":
        precision = replace(precision, dtype="bf16" if narrow else "fp32")
    train = replace(config.train, device="cuda" if device == "cuda" else "cpu")
    settled = replace(config, precision=precision, train=train)
    return replace(settled, kernels=planned_kernels(settled, train.device))


def as_planned(config: Config) -> Config:
    """Return the configuration as a run on a GPU that computes in bf16 resolves it.

    With `train.device=cpu` it is resolved as on a CPU.
    """
    device = "cpu" if config.train.device == "cpu" else "cuda"
    return as_run(config, device, narrow=device == "cuda")


def words(size_bytes: float) -> str:
    """Return bytes as text: `12.3 GiB`, or in MiB below a tenth of a GiB."""
    if abs(size_bytes) < GIB / 10:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / GIB:.{2 if abs(size_bytes) < 10 * GIB else 1}f} GiB"


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """Return bytes that processes of this machine may still allocate; None: not reported.

    Every memory limit of a control group above this process counts (versions 1 and 2); inactive
    file cache counts as available.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*(n * 1024 for n in kib), *_group_rooms(root)], default=None)


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the resident set of this process in bytes; 0: the kernel doesn't report it."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS:")), 0)


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves below its limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, usage, cached = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            if level == base.parent:
                break
            most, used = _number(level / limit), _number(level / usage)
            if most is not None and used is not None:
                yield max(0, most - used + _entry(level / "memory.stat", cached))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # another version, or not to be seen from within a container
        return None
    return int(text) if text.isdigit() else None  # `max`: no limit


def _entry(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) for x in lines if x.startswith(f"{name} ")), 0)
