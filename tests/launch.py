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
from megacpp.lessons.ranks import LONG_S, Stillness, children

ROOT = Path(__file__).parents[1]
__all__ = ["Done", "background", "forked", "started", "until", "watched"]


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
    began, still = time.monotonic(), Stillness()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    late = False
    while True:
        try:
            out, err = process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:  # nothing of the output is lost
            if time.monotonic() - began > LONG_S or still.hangs([process.pid]):
                late = True
                for pid in [process.pid, *children(process.pid)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            continue
        if late:
            raise subprocess.TimeoutExpired(command, time.monotonic() - began, out, err)
        return Done(command, process.returncode, out, err)


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


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is true of a run that must neither end nor hang before."""
    deadline, still = time.monotonic() + LONG_S, Stillness()
    while not what():
        late = time.monotonic() > deadline or still.hangs([process.pid])
        if late or process.poll() is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(("hangs" if late else "has ended", *process.communicate()))
        time.sleep(0.05)
