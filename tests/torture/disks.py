"""R15: the disk of a run folder is full, limited, read-only or gone under the real command.

Each fault begins when the run has made a few steps. The run must end with 4 and one line, and leave
whole files; once the fault is mended, the same command must end as a run that nothing happened to.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.launch import ROOT

STEPS, BEGINS = 8, 3  # steps of a run, and those after which its disk fails
BLOCKS = 40  # of 1 KiB: less than a file of a checkpoint
FILLED = "filled"


def _did(*words: str) -> bool:
    """Return whether a command exists and succeeded."""
    return (
        bool(shutil.which(words[0])) and not subprocess.run(words, capture_output=True).returncode
    )


def fill(folder: Path) -> None:
    """Write zeros beside a run folder until its disk has no byte left."""
    with (folder.parent / FILLED).open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def read_only(folder: Path, sign: str = "+") -> None:
    """Forbid new files, also to root."""
    assert _did("chattr", f"{sign}i", str(folder), str(folder / "checkpoints"))


def back(folder: Path) -> None:
    """Put a run folder back where it was, in place of any that was made since."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name("aside").rename(folder)


Fault = Callable[[Path], object]
# What happens to a run folder, and what mends it.
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "full": (fill, lambda folder: (folder.parent / FILLED).unlink()),
    "limited": (lambda _: None, lambda _: None),  # `ulimit -f`, from the start
    "read-only": (read_only, lambda folder: read_only(folder, "-")),
    "gone": (lambda folder: folder.rename(folder.with_name("aside")), back),
}


@contextmanager
def disk(parent: Path, fault: str) -> Iterator[Path | None]:
    """Lend a folder on which a fault can happen; None: this machine forbids it."""
    parent.mkdir()
    mounts, here = fault == "full", True
    if mounts:
        here = _did("mount", "-t", "tmpfs", "-o", "size=16m", "none", str(parent))
    elif fault == "read-only":
        here = _did("chattr", "+i", str(parent)) and _did("chattr", "-i", str(parent))
    try:
        yield parent if here else None
    finally:
        if mounts and here:
            _did("umount", "-l", str(parent))


def weights(folder: Path) -> list[str]:
    """Return the hashes of the final weights."""
    files = sorted((folder / "final").glob("*.safetensors"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def rows_of(folder: Path) -> int:
    """Return the steps on record."""
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def attack(
    words: Sequence[str], folder: Path, fault: str, env: Mapping[str, str]
) -> tuple[int, str, int]:
    """Run a command whose disk fails, mend the disk, and run it again.

    Args:
        words: arguments of `megacpp train`.
        folder: of the run.
        fault: key of FAULTS.
        env: variables of both.

    Returns:
        Exit code and stderr of the first run, exit code of the second.
    """
    begins, mended = FAULTS[fault]
    command = [sys.executable, "-m", "megacpp", "train", *words]
    limited = ["bash", "-c", f'ulimit -f {BLOCKS}; exec "$@"', "-", *command]
    first = subprocess.Popen(
        limited if fault == "limited" else command,
        cwd=ROOT,
        env=dict(env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while rows_of(folder) < BEGINS and first.poll() is None:
        time.sleep(0.02)
    begins(folder)
    _, err = first.communicate()
    mended(folder)
    again = subprocess.run(command, cwd=ROOT, env=dict(env), capture_output=True)
    return first.returncode, err, again.returncode


def problems(code: int, err: str, again: int, folder: Path, straight: Path) -> list[str]:
    """Return what isn't as it must be after an attack."""
    found = []
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    if code != 4 or len(said) != 1 or "Fix: " not in said[0]:
        found.append(f"code {code}, {said or err[-600:]}")
    rows = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    if again or rows != list(range(STEPS)):
        found.append(f"the second start ended with {again}, steps on record: {rows}")
    elif weights(folder) != weights(straight):
        found.append("other weights")
    return found
