"""Runs of `train.py` in processes that are forked from this one, where torch is imported already.

    done = forked("tiny", *flags, ranks=2)

A forked rank is a process too, which runs `train.py` as `__main__`, prints to files of its own and
leaves with its own exit code. `megacpp train` starts new interpreters under torchrun instead: of
the ten seconds of a short run on two ranks eight go into importing torch three times.
"""

from __future__ import annotations

import faulthandler
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
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # imported by FSDP2 on its first use
import torch.distributed as dist
import torch.distributed.checkpoint  # imported by the first save
import torch.utils.tensorboard  # imported by the log of a run

from megacpp.home import HOME, put_first
from megacpp.lessons.ranks import GRACE_S, LONG_S, Stillness, share_a_device

put_first()
import train  # noqa: F401 - so that no forked process has to import what it needs

Done = subprocess.CompletedProcess[str]
# A model of every letter, in milliseconds a step.
SMALL = (
    "--model.dim 32 --model.depth 5 --model.pattern AMERF --model.vocab-size 400"
    " --model.attention.num-heads 2 --model.attention.num-kv-heads 1"
    " --model.attention.head-dim 16 --model.mamba3.headdim 16 --model.mamba3.d-state 8"
    " --model.mamba3.chunk-size 16 --model.m2rnn.key-dim 8 --model.m2rnn.value-dim 8"
    " --model.moe.num-experts 4 --model.moe.hidden-dim 32 --model.moe.shared-hidden-dim 32"
    " --model.mlp.hidden-dim 64 --data.seq-len 48 --run.steps 20 --run.eval-rows 23"
    " --run.sample-tokens 8 --checkpoint.every 10 --checkpoint.keep 0"
).split()
ADAMW = ["--optim.name", "adamw", "--precision.dtype", "fp64"]


def forked(*flags: str, ranks: int = 1, read: int | None = None) -> Done:
    """Run train.py in forked processes; the exit code is that of the first rank that failed.

    Args:
        read: lines of a pipe after which the output was closed (None: a file has all).

    Raises:
        TimeoutExpired: the processes still run; with their output so far.
    """
    flags = kept_apart(flags)
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
        err = (folder / "err").read_text() + "".join(map(_signal, range(ranks), processes))
    if late:
        raise subprocess.TimeoutExpired(flags, LONG_S, out, err)
    codes = [process.exitcode or 0 for process in processes]
    first = next((code for code in codes if code > 0), min(codes))  # below 0: ended by us
    return subprocess.CompletedProcess(flags, first, out, err)


def _signal(rank: int, process: BaseProcess) -> str:
    """Return a line about a rank that a signal ended, which prints nothing itself."""
    code = process.exitcode or 0
    return f"rank {rank} was ended by {signal.Signals(-code).name}\n" if code < 0 else ""


def kept_apart(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags without other runs' records on this machine, unless a later flag names some."""
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
    faulthandler.enable()  # prints where a segmentation fault happened
    _warn_as_usual()
    gc.freeze()  # what the parent holds is never garbage here
    torch.set_num_threads(1)
    os.chdir(HOME)
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

    def show(message: Any, kind: Any, file: str, number: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, kind, file, number))

    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = show
