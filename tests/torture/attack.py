"""Run train.py with a fault on one rank: `torchrun ... attack.py FAULT RANK STEP [train.py flags]`.

Steps count from 0. A fault replaces a function of the run on that rank; train.py is unchanged.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
FAULT, RANK, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
HERE = os.environ.get("RANK", "0") == str(RANK)


def before(owner: Any, name: str, fault: Callable[..., None]) -> None:
    """Call `fault` with the arguments of a function before it, on the rank of the attack."""
    function = getattr(owner, name)

    def attacked(*args: Any, **kwargs: Any) -> Any:
        if HERE:
            fault(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, attacked)


def at_step(fault: Callable[[], None]) -> None:
    """Call `fault` in the step of the attack, as its microbatches are about to run."""
    from parallel.boundary import AccumulationBoundary

    def check(self: Any, batches: Any, step: int = 0) -> None:
        if step == STEP:
            fault()

    before(AccumulationBoundary, "accumulate", check)


def sleep() -> None:
    time.sleep(3600)


def deadlock() -> None:
    """Wait for a lock that this thread holds, in C."""
    import ctypes

    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def loop() -> None:
    while True:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(3), 0)


def in_data() -> None:
    from megacpp.data.loader import Loader

    take, calls = Loader.take, iter(range(10**9))

    def late(self: Any, count: int) -> Any:
        yield from ()
        if HERE and next(calls) == STEP:
            sleep()
        yield from take(self, count)

    Loader.take = late  # type: ignore[method-assign]


def in_save() -> None:
    from megacpp.state import checkpoint

    before(checkpoint, "hash_file", lambda *_: sleep())


def in_evaluation() -> None:
    from megacpp.run.evaluate import HeldOut

    before(HeldOut, "evaluate", lambda *_: sleep())


def in_start() -> None:
    from megacpp.launch import start

    before(start, "check_corpus", lambda *_: sleep())


def slow_disk() -> None:
    """Have each file that is flushed to the disk take six seconds longer."""
    before(os, "fsync", lambda *_: time.sleep(6))


def slow() -> None:
    """Add to each step several times what a step of the tests' model takes."""
    from parallel.boundary import AccumulationBoundary

    def late(self: Any, batches: Any, step: int = 0) -> None:
        if step >= STEP:
            time.sleep(0.5)

    before(AccumulationBoundary, "accumulate", late)


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": lambda: at_step(sleep),
    "deadlock": lambda: at_step(deadlock),
    "loop": lambda: at_step(loop),
    "stop": lambda: at_step(stop),
    "other-collective": lambda: at_step(other_collective),
    "data": in_data,
    "save": in_save,
    "evaluation": in_evaluation,
    "start": in_start,
    "slow": slow,
    "slow-disk": slow_disk,
}

if __name__ == "__main__":
    FAULTS[FAULT]()
    sys.argv = ["train.py", *sys.argv[4:]]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
