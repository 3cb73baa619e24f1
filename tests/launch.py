"""`train.py` in processes of its own: started as a person would, or forked from this one.

    done = started("tiny", *flags, ranks=2)   # a new interpreter, under torchrun
    done = forked("tiny", *flags, ranks=2)    # the same script; torch is imported already

Of the ten seconds of a short run on two ranks eight go into importing torch three times. A forked
rank is a process too, which runs `train.py` as `__main__`, prints to files of its own and leaves
with its own exit code. So what happens before torch is imported, what torchrun makes of a failure,
and that a run needs nothing from the one before it are tested with `started`; the rest is `forked`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megacpp.lessons.launch import Done, forked, kept_apart
from megacpp.lessons.ranks import GRACE_S, LONG_S, Stillness, children

ROOT = Path(__file__).parents[1]
__all__ = ["Done", "background", "finished", "forked", "started", "until", "watched"]


def started(*flags: str, ranks: int = 1) -> Done:
    """`python train.py FLAGS`, under torchrun if it has several ranks.

    Raises:
        TimeoutExpired: the processes still run, or all of them wait; with their output so far.
    """
    under = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(under if ranks > 1 else []), "train.py", *kept_apart(flags)]
    return watched([sys.executable, *words])


def watched(command: Sequence[str]) -> Done:
    """Run a command in the checkout; it is ended if its processes only wait for each other.

    Raises:
        TimeoutExpired: see `started`.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ((out, err),) = finished(process)
    return Done(command, process.returncode, out, err)


def finished(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Wait for processes and their descendants; return what each printed, and its errors.

    A stream of a process that isn't a pipe counts as empty.

    Raises:
        TimeoutExpired: they still run, or all of them wait; with the output of all so far. They
            and their descendants are killed then.
    """
    began, still = time.monotonic(), Stillness()
    found: dict[int, tuple[str, str]] = {}
    late = False
    while len(found) < len(processes):
        for process in processes:
            if process.pid not in found:
                with suppress(subprocess.TimeoutExpired):  # nothing of the output is lost
                    found[process.pid] = _said(process, 1.0 / len(processes))
        left = [process for process in processes if process.pid not in found]
        if left and (time.monotonic() - began > LONG_S or still.hangs([p.pid for p in left])):
            late = True
            for process in left:
                _kill(process)
            for process in left:
                found[process.pid] = _said(process, GRACE_S)
    said = [found[process.pid] for process in processes]
    if late:
        out, err = map("".join, zip(*said, strict=True))
        raise subprocess.TimeoutExpired(processes[0].args, time.monotonic() - began, out, err)
    return said


def _said(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return out or "", err or ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process, its group if it has one, and all descendants."""
    pids = [process.pid]
    for pid in pids:
        pids += children(pid)
    with suppress(ProcessLookupError):  # its descendants, if it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for pid in pids[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def background(
    *flags: str,
    ranks: int = 1,
    agent: bool = False,
    env: Mapping[str, str] | None = None,
    out: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[str]]:
    """A run in a new interpreter that goes on beside the test; what is left of it is killed.

    Args:
        agent: under torchrun even if it has one rank.
        env: further variables.
        out: where its output goes.
    """
    under = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(under if ranks > 1 or agent else []), "train.py", *kept_apart(flags)]
    with in_a_session(*words, env=env, out=out) as process:
        yield process


@contextmanager
def in_a_session(
    *words: str, env: Mapping[str, str] | None = None, out: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """A Python command and its children in a session of their own; what is left is killed.

    Args:
        env: further variables.
        out: where its output goes.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(what: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    """Wait until something is true of a run whose processes must neither end nor hang before."""
    deadline, still = time.monotonic() + LONG_S, Stillness()
    while not what():
        late = time.monotonic() > deadline or still.hangs([p.pid for p in processes])
        if late or any(process.poll() is not None for process in processes):
            for process in processes:
                _kill(process)
            said = [text for process in processes for text in _said(process, GRACE_S)]
            raise AssertionError(("hangs" if late else "has ended", *said))
        time.sleep(0.05)
