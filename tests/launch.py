"""`train.py` in processes of its own: started as a person would, or forked from this one.

    done = started("tiny", *flags, ranks=2)   # a new interpreter, under torchrun
    done = forked("tiny", *flags, ranks=2)    # the same script; torch is imported already

Of the ten seconds of a short run on two ranks eight go into importing torch three times. A forked
rank is a process too, which runs `train.py` as `__main__`, prints to files of its own and leaves
with its own exit code. So what happens before torch is imported, what torchrun makes of a failure,
and that a run needs nothing from the one before it are tested with `started`; the rest is `forked`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # imported by FSDP2 on its first use
import torch.distributed as dist
import torch.utils.tensorboard  # imported by the log of a run

import train  # noqa: F401 - so that no forked process has to import what it needs
from tests.ranks import GRACE_S, LONG_S, Stillness, children, share_a_device

ROOT = Path(__file__).parents[1]
Done = subprocess.CompletedProcess[str]


def started(*flags: str, ranks: int = 1) -> Done:
    """`python train.py FLAGS`, under torchrun if it has several ranks.

    Raises:
        TimeoutExpired: the processes still run, or all of them wait; with their output so far.
    """
    under = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(under if ranks > 1 else []), "train.py", *_kept_apart(flags)]
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


def forked(*flags: str, ranks: int = 1, read: int | None = None) -> Done:
    """Run in forked processes; the exit code is that of the first rank that failed.

    Args:
        read: lines of a pipe after which the output was closed (None: a file has all).

    Raises:
        TimeoutExpired: the processes still run; with their output so far.
    """
    flags = _kept_apart(flags)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if read is not None:
            os.mkfifo(folder / "out")
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            processes.append(context.Process(target=_script, args=(flags, rank, ranks, folder)))
            processes[-1].start()
        out = None if read is None else _first_lines(folder / "out", read)
        late = _wait(processes)
        out = (folder / "out").read_text() if out is None else out
        err = (folder / "err").read_text()
    if late:
        raise subprocess.TimeoutExpired(flags, LONG_S, out, err)
    codes = [process.exitcode or 0 for process in processes]
    first = next((code for code in codes if code > 0), min(codes))  # below 0: ended by us
    return subprocess.CompletedProcess(flags, first, out, err)


@contextmanager
def background(
    *flags: str, ranks: int = 1, agent: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A run in a new interpreter that goes on beside the test; what is left of it is killed.

    Args:
        agent: under torchrun even if it has one rank.
        env: further variables.
    """
    under = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, *(under if ranks > 1 or agent else []), "train.py", *_kept_apart(flags)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
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
    """Wait until something is true of a run that must not end before."""
    deadline = time.monotonic() + LONG_S
    while not what():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def _kept_apart(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Without the records of other runs on this machine, unless a flag that follows names some."""
    preset = flags[:1] if not flags[0].startswith("-") else ()
    return (*preset, "--memory.calibration=", *flags[len(preset) :])


def _first_lines(pipe: Path, count: int) -> str:
    with pipe.open() as lines:
        return "".join(itertools.islice(lines, count))


def _wait(processes: list[BaseProcess]) -> bool:
    """Until all are gone; soon after one fails the others are ended. Whether time ran out."""
    deadline, late = time.monotonic() + LONG_S, False
    left, still = list(processes), Stillness()
    while left:
        sentinels = [p.sentinel for p in left]
        ended = wait(sentinels, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        hangs = not ended and still.hangs([process.pid for process in left])
        if not ended and time.monotonic() < deadline and not hangs:
            continue
        if not ended:
            late = not any(process.exitcode for process in processes)
            for process in left:
                process.kill()
        for process in left:
            if not ended or process.sentinel in ended:
                process.join()
        left = [process for process in left if process.is_alive()]
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return late


def _script(flags: tuple[str, ...], rank: int, ranks: int, folder: Path) -> NoReturn:
    """Body of one forked process."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, append), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    _warn_as_usual()
    gc.freeze()  # what the parent holds is never garbage here
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = ["train.py", *flags]
    if ranks > 1:
        share_a_device()
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {key: str(value) for key, value in numbers.items()}
        # In a file, where torchrun's ranks meet at a port: nobody opens this one.
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.rendezvous = lambda *_, **__: iter([(store, rank, ranks)])  # type: ignore[assignment]
        dist.init_process_group = functools.partial(
            dist.init_process_group, store=store, rank=rank, world_size=ranks
        )
    code = 0
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: the parent's exit handlers are not ours


def _warn_as_usual() -> None:
    """On stderr, by the interpreter's rules; pytest would keep warnings for its own report."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = show
