"""Functions on forked gloo ranks of one machine: no cluster, no port.

    def body(rank: int, world: int, x: Tensor) -> Tensor:
        dist.all_reduce(x)          # the process group exists already
        return x

    results = run_ranks(body, 4, torch.ones(2))   # one result per rank, in rank order

Ranks are forked, not spawned: a closure or a lambda will do, arguments aren't pickled, and four
ranks start in a fifth of a second, because torch is already imported. They meet in a file, so no
port is needed and any number of test runs may share a machine. The caller itself must not have
started a process group.
"""

from __future__ import annotations

import copyreg
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch._dynamo  # FSDP2 imports it: a second once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor

from megacpp.run.failure import OF_A_PEER

Job = TypeVar("Job", bound=Hashable)
GRACE_S = 3.0  # for ranks to leave after the first one failed
# Only a hang may meet a time limit: machines that are ten times slower than ours must not.
PATIENCE_S = 300.0
LONG_S = 1200.0  # for one fork of ranks that serves a whole file of tests
# Main threads of ranks that all wait for each other compute nothing; threads beside them (gloo's, a
# run's watch over hangs) go on. A rank that computes takes many times this part of a core.
STILL_S, STILL_PART = 12.0, 0.005


class RankError(AssertionError):
    """Error of a rank that raised or died; the message holds its number and traceback."""


class RankTimeoutError(RankError):
    """Ranks were still running; the message holds where each of them was."""


class Stillness:
    """How long processes together have computed nothing, on a machine of any speed."""

    def __init__(self) -> None:
        self.since, self.used = time.monotonic(), 0.0

    def hangs(self, pids: Sequence[int | None]) -> bool:
        """Whether they have been still for `STILL_S`; call it every second or so.

        A thread that computes is runnable even while a crowded machine doesn't run it.
        """
        threads = [fields for pid in pids for fields in main_threads(pid)]
        used, now = sum(map(_cpu_seconds, threads)), time.monotonic()
        allowed = 0.05 + STILL_PART * len(pids) * (now - self.since)
        runs = any(state in "RD" for state, *_ in threads)
        if runs or abs(used - self.used) > allowed:  # less: one of them has ended
            self.since, self.used = now, used
        return now - self.since > STILL_S


def main_threads(pid: int | None) -> list[list[str]]:
    """Return the main threads of a process and all its descendants, as /proc states them."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [own, *(fields for child in children(pid) for fields in main_threads(child))]


def _cpu_seconds(fields: list[str]) -> float:
    """Return CPU seconds of a thread and of processes that it has waited for."""
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def children(parent: int | None) -> list[int]:
    """Return the processes that a process started and that still run, in order."""
    found: list[int] = []
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # a thread or the process has ended
            found += map(int, path.read_text().split())
    return sorted(found)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = PATIENCE_S,
    backend: str = "gloo",
) -> list[Any]:
    """Run `fn(rank, world, *args)` on `world` forked ranks of one process group.

    Args:
        fn: its result must be picklable; tensors are, as values without a graph (DTensors are
            not: return local parts).
        args: inherited by the fork; a rank's changes to them are its own.
        timeout_s: for everything together; every rank's stack is in the error.

    Returns:
        The result of every rank, in rank order.

    Raises:
        RankError: of the first rank that failed; the others are ended.
        RankTimeoutError: not all ranks finished, or all of them wait for each other.
    """
    assert not dist.is_initialized(), "the caller must not be part of a process group"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, world, folder, fn, args, writer, timeout_s, backend)
            )
            process.start()
            writer.close()  # the rank's copy stays open; ours would hide its death
            ranks.append((process, reader))
        try:
            return _collect(ranks, folder, timeout_s)
        finally:
            for process, reader in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                reader.close()


def on_worlds(play: Callable[[int, Job], Any], worlds: Mapping[Job, int]) -> dict[Job, list[Any]]:
    """Return the results of `play(rank, job)` on every rank of every job, one fork per world size.

    Args:
        worlds: jobs (values that compare) and how many ranks each is for; those of a single rank
            are played here, without a process group.
    """
    found: dict[Job, list[Any]] = {}
    for size in sorted(set(worlds.values())):
        jobs = [job for job, world in worlds.items() if world == size]

        def body(rank: int, _world: int, jobs: list[Job] = jobs) -> list[Any]:
            return [play(rank, job) for job in jobs]

        of_ranks = [body(0, 1)] if size == 1 else run_ranks(body, size, timeout_s=LONG_S)
        for number, job in enumerate(jobs):
            found[job] = [results[number] for results in of_ranks]
    return found


def _collect(
    ranks: list[tuple[BaseProcess, Connection]], folder: Path, timeout_s: float
) -> list[Any]:
    """Return the results, or raise the first failure."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {reader: rank for rank, (_, reader) in enumerate(ranks)}
    began, still = time.monotonic(), Stillness()
    deadline = began + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        late = time.monotonic() >= deadline
        if not ready and not failures and (late or still.hangs([p.pid for p, _ in ranks])):
            after_s = time.monotonic() - began
            raise RankTimeoutError(_where(ranks, sorted(waiting.values()), folder, after_s))
        if not ready and late:
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            try:
                kind, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                process = ranks[rank][0]
                process.join(GRACE_S)
                kind, value = "died", f"ended without a result, exit code {process.exitcode}"
            if kind == "result":
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        # A rank that raised explains more than its peers, whose collectives then broke.
        broken = {r for r, text in failures.items() if any(words in text for words in OF_A_PEER)}
        rank = min(failures, key=lambda r: (r in broken, r))
        raise RankError(f"rank {rank} of {len(ranks)}: {failures[rank]}")
    return [results[rank] for rank in range(len(ranks))]


def _where(
    ranks: list[tuple[BaseProcess, Connection]], late: list[int], folder: Path, timeout_s: float
) -> str:
    """Which ranks didn't finish, and their stacks."""
    lines = [f"ranks {late} of {len(ranks)} didn't finish in {timeout_s:.3g} s"]
    for rank in late:
        pid = ranks[rank][0].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + GRACE_S
    for rank in late:
        while not (folder / f"stack-{rank}").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        lines += [f"rank {rank} was at", (folder / f"stack-{rank}").read_text()]
    return "\n".join(lines)


def packed(result: Any) -> bytes:
    """`pickle.dumps`, with CPU tensors as their bytes: ten times faster than torch's own way."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = ChainMap({Tensor: _reduced}, copyreg.dispatch_table)  # pyright: ignore
    pickler.dump(result)
    return buffer.getvalue()


def _reduced(x: Tensor) -> tuple[Any, ...]:
    if x.device.type != "cpu" or x.layout != torch.strided:
        return x.__reduce_ex__(2)
    plain = x.detach().resolve_conj().resolve_neg()
    flat = plain.clone(memory_format=torch.contiguous_format).view(-1)
    return _tensor, (bytearray(flat.view(torch.uint8).numpy()), x.dtype, tuple(x.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(data, dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def share_a_device() -> None:
    """All gloo groups of this process use one device.

    Each has one of its own otherwise, with a thread that wakes up a hundred times a second
    (`gloo/transport/tcp/loop.cc`). A mesh is a dozen groups, and ranks that run through many
    meshes would soon do little else. Nothing in Python passes options to a gloo group:
    `_new_process_group_helper` of torch takes only a timeout.
    """
    gloo = dist.ProcessGroupGloo
    plain, device = gloo.__init__, gloo.create_default_device()

    def init(
        self: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        enable_reconfigure: bool = False,  # passed from torch 2.15 on, False unless asked for
    ) -> None:
        assert not enable_reconfigure
        options = gloo._Options()  # pyright: ignore
        options._devices, options._timeout, options._threads = [device], timeout, 1
        plain(self, store, rank, size, options)

    gloo.__init__ = init  # type: ignore[method-assign]


def _rank(
    rank: int,
    world: int,
    folder: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    writer: Connection,
    timeout_s: float,
    backend: str,
) -> NoReturn:
    """Body of one forked process: joins the group, runs `fn`, sends what came of it."""
    code = 0
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            torch.set_num_threads(1)
            gc.freeze()  # what the parent holds is never garbage here: don't look through it
            share_a_device()
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(folder / "store"), world),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            message = packed(("result", fn(rank, world, *args)))
            dist.barrier()  # gloo aborts peers that are still at work when a rank leaves
            dist.destroy_process_group()
        except BaseException as error:
            code = 1
            message = pickle.dumps(("error", "".join(traceback.format_exception(error))))
    writer.send_bytes(message)
    writer.close()
    os._exit(code)  # no interpreter shutdown: the parent's exit handlers are not ours
