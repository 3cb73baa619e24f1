"""Worker processes of a preparation: jobs go out by pipes, results come back, memory is bounded.

A worker is a new Python that imports this module alone, so neither threads nor CUDA of this process
are in its way, and a script that prepares a corpus needs no guard. It ends when its pipe closes,
also if this process is killed. concurrent.futures does neither: its processes import the caller's
script, and hand a job's results back all at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from megacpp.errors import DataError

WORTH_BYTES = 1 << 23  # of text: a worker needs half a second to start
QUEUED = 2  # results a worker, that wait for their turn
ROOT = Path(__file__).parents[2]

Job = TypeVar("Job")
Result = TypeVar("Result")


def worker_count(wanted: int, text_bytes: int) -> int:
    """Return the number of workers: as many as wanted, or cores that the work is worth (0)."""
    cores = len(os.sched_getaffinity(0))
    return wanted or max(1, min(cores, text_bytes // WORTH_BYTES))


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int
) -> Generator[Result, None, None]:
    """Yield the result of each job, in the order of jobs; with one worker in this process.

    Args:
        work: a function or an object that can be pickled.
        jobs: taken as workers become free.
        workers: processes.

    Raises:
        DataError: a worker ended, or the work raised it.
    """
    if workers == 1:
        yield from map(work, jobs)
        return
    with _Processes(work, workers) as processes, ThreadPoolExecutor(workers) as threads:
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(threads.submit(processes.result, job))
                if len(waiting) == QUEUED * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            processes.end()
            threads.shutdown(cancel_futures=True)


def as_they_come(
    work: Callable[[Job], Iterator[Result]], jobs: Iterable[Job], workers: int
) -> Generator[Result, None, None]:
    """Yield all results of each job; those of one job in their order.

    Args:
        work: a function or an object that can be pickled, which yields results.
        jobs: taken as workers become free.
        workers: processes; one: this process.

    Raises:
        DataError: a worker ended, or the work raised it.
    """
    if workers == 1:
        for job in jobs:
            yield from work(job)
        return
    results: queue.Queue[Result | BaseException | None] = queue.Queue(QUEUED * workers)
    source, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def serve() -> None:
        try:
            while not stop.is_set():
                with lock:
                    job = next(source, None)
                if job is None:
                    break
                for result in processes.results(job):
                    results.put(result)
            results.put(None)
        except BaseException as error:
            results.put(error)

    with _Processes(work, workers) as processes:
        threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        try:
            left = workers
            while left:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    left -= 1
                else:
                    yield result
        finally:
            stop.set()
            processes.end()
            while any(thread.is_alive() for thread in threads):  # one may wait for room
                with contextlib.suppress(queue.Empty):
                    results.get(timeout=0.05)


class _Processes:
    """Workers that are started, each used by one thread at a time."""

    def __init__(self, work: Callable[..., Any], count: int) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        more = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._all = [
            subprocess.Popen(
                [sys.executable, "-m", "megacpp.data.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | more,
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
            for _ in range(count)
        ]
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        for process in self._all:
            self._idle.put(process)
        packed = pickle.dumps(work)
        for process in self._all:
            with contextlib.suppress(BrokenPipeError):  # found with its first job
                assert process.stdin is not None
                process.stdin.write(packed)
                process.stdin.flush()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for process in self._all:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def end(self) -> None:
        """End the workers; what they do is lost."""
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()

    def result(self, job: object) -> Any:
        """Return the one thing that a worker makes of a job."""
        (made,) = self.results(job)
        return made

    def results(self, job: object) -> Iterator[Any]:
        """Yield what a worker makes of a job."""
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            while True:
                more, result = pickle.load(process.stdout)
                if isinstance(result, BaseException):
                    raise result
                if not more:
                    return
                yield result
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = process.wait()
            raise DataError(
                f"workers: one ended with {code} (killed for its memory?). Fix: fewer --workers."
            ) from None
        finally:
            self._idle.put(process)


def _serve() -> None:
    """Read the work and then jobs from the standard input, write results to the output."""
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        work = pickle.load(jobs)
        while True:
            job = pickle.load(jobs)
            try:
                made = work(job)
                for result in made if isinstance(made, Iterator) else (made,):
                    pickle.dump((True, result), results, protocol=5)
                    results.flush()
                last = None
            except DataError as error:
                last = error
            pickle.dump((False, last), results)
            results.flush()


if __name__ == "__main__":
    _serve()
