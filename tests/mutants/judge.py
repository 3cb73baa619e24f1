"""Plant a fault in a copy of the checkout, and run tests there until one fails."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.mutants.faults import Fault

OURS = ("tests", "megacpp", "parallel", "optim", "checkpointing", "bench", "train")
MARK = "MEGACPP_MUTANT"  # variable of all programs that a run of tests starts
STUCK_S = 60  # CPU seconds of one process more than the tests have together: it goes in circles
WAITS_S = 600.0  # without a test that ends; ranks that wait are found in seconds (tests/ranks.py)
CRASH = 70
NO_VERDICT = (3, 4, 5, CRASH)  # pytest's internal error, no such test, none collected; ours


@dataclass(frozen=True)
class Verdict:
    """Outcome of a run of tests.

    Attributes:
        outcome: `killed`, `survived` or `timed out`.
        seconds, cpu_s: of the run, by the clock and of CPU time.
        by: test that failed.
        costs: seconds of test files that ran to their end.
    """

    outcome: str
    seconds: float
    cpu_s: float
    by: str
    costs: dict[str, float]


class PlantedTree:
    """Copy of the checkout in which one fault at a time is planted.

    Args:
        root: the checkout, which stays as it is.
        folder: the copy and the files of a run come here.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.top, self.folder, self.plants = folder / "tree", folder, 0
        shutil.rmtree(self.top, ignore_errors=True)
        names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, names.split("\0")):
            if (root / name).is_file():
                (self.top / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, self.top / name)
        _git(self.top, "init", "-q")  # some tests ask for the commit
        _git(self.top, "add", "-A")
        who = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
        _git(self.top, *who, "commit", "-q", "-m", "all")

    @contextmanager
    def planted(self, fault: Fault | None) -> Iterator[None]:
        """Have a fault in the copy; None leaves it sound."""
        if fault is None:
            yield
            return
        path = self.top / fault.file
        sound = path.read_text()
        try:
            self._write(path, fault.planted(sound))
            yield
        finally:
            self._write(path, sound)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: by that and its size Python knows compiled ones."""
        path.write_text(text)
        self.plants += 1
        os.utime(path, (1_000_000_000 + self.plants, 1_000_000_000 + self.plants))

    def judge(self, tests: Sequence[str], time_s: float, fault: Fault | None = None) -> Verdict:
        """Run tests until one fails.

        Args:
            tests: files or ids of tests, in this order.
            time_s: CPU seconds after which no further test begins; one that then runs on is ended.
            fault: None runs the sound copy.

        Raises:
            RuntimeError: the tests couldn't be run.
        """
        log, began = self.folder / "reports.jsonl", time.monotonic()
        before_s = _children_s()
        log.write_text("")
        scratch = self.folder / "scratch"
        with self.planted(fault):
            pid = os.fork()
            if pid == 0:
                reporter = _Reporter(log, time_s, self.folder / "cache")
                _run_tests(self.top, scratch, reporter, tests)
            code = _wait(pid, log)
        if fault is None and (scratch / "cache").exists():
            shutil.copytree(scratch / "cache", self.folder / "cache", dirs_exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        reports = [json.loads(line) for line in log.read_text().splitlines()]
        bad = [one["test"] for one in reports if one["failed"]]
        seconds, cpu_s = time.monotonic() - began, _children_s() - before_s
        if code in (None, -signal.SIGXCPU):
            begun = [one["test"] for one in reports]
            return Verdict("timed out", seconds, cpu_s, begun[-1] if begun else "", {})
        if code in NO_VERDICT and not bad:
            raise RuntimeError(f"no test ran: {tests}; see {self.folder / 'output.txt'}")
        outcome = "survived" if code == 0 or (code == 2 and not bad) else "killed"
        return Verdict(outcome, seconds, cpu_s, bad[0] if bad else "", _costs(reports, bad))


def _costs(reports: Sequence[dict[str, Any]], bad: Sequence[str]) -> dict[str, float]:
    """Return seconds of test files; of those in which a test failed not all tests have run."""
    costs: dict[str, float] = {}
    for one in reports:
        file = one["test"].split("::")[0]
        costs[file] = costs.get(file, 0.0) + one["seconds"]
    return {f: round(s, 2) for f, s in costs.items() if not any(b.startswith(f) for b in bad)}


def _run_tests(top: Path, scratch: Path, reporter: _Reporter, tests: Sequence[str]) -> NoReturn:
    """Body of a forked process: torch is imported already, nothing of the checkout stays."""
    code = CRASH
    try:
        os.setsid()
        most_s = int(reporter.time_s) + STUCK_S
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 60))
        out = os.open(top.with_name("output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
        os.chdir(top)
        for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = [str(top), *(p for p in sys.path if p and not _is_checkout(Path(p)))]
        os.environ |= {"PYTHONPATH": str(top), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        os.environ[MARK] = str(os.getpid())
        words = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        words += ["-p", "no:xdist", f"--basetemp={scratch}", f"--rootdir={top}"]
        code = int(pytest.main([*words, *tests], plugins=[reporter]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _is_checkout(path: Path) -> bool:
    return (path / "megacpp").is_dir() and (path / "train.py").is_file()


class _Reporter:
    """Plugin of pytest that writes each test's outcome as it comes, and begins none too late."""

    def __init__(self, log: Path, time_s: float, cache: Path) -> None:
        self.log, self.time_s, self.cache = log, time_s, cache

    def _write(self, test: str, failed: bool, seconds: float) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"test": test, "failed": failed, "seconds": seconds}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report.nodeid, report.failed, report.duration)

    def pytest_runtest_logfinish(self) -> None:
        if sum(os.times()[:4]) > self.time_s:  # of this process, and of ranks that have ended
            self.session.shouldstop = "the time is up"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Give the tests a copy of the block traces that sound runs made (tests/conftest.py)."""
        self.session = session
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if self.cache.exists():
            shutil.copytree(self.cache, base / "cache")

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Take an exit of what a test file imports for an error of that file."""
        if excinfo.errisinstance(SystemExit):
            self._write("", True, 0.0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, True, 0.0)


def _wait(pid: int, log: Path) -> int | None:
    """Return the exit code of a process and end what it leaves; None: its log grows no more."""
    done, status, grown, size = 0, 0, time.monotonic(), 0
    while not done and time.monotonic() - grown < WAITS_S:
        time.sleep(0.05)
        done, status = os.waitpid(pid, os.WNOHANG)
        if log.stat().st_size != size:
            grown, size = time.monotonic(), log.stat().st_size
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for one in _left_by(pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) if done else None


def _children_s() -> float:
    """Return CPU seconds of processes that this one has waited for."""
    return sum(os.times()[2:4])


def _left_by(pid: int) -> list[int]:
    """Return what a run of tests left: forks share its session, other programs its variables."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit():
                session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
                mark = f"{MARK}={pid}".encode()
                if session == pid or mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
    return found


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
