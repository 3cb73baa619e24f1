"""Plan of the first half hour on a GPU, in three calls of less than ten minutes each.

    python -m bench.gpu --plan first                      # all calls, to $OUT/gpu.json
    python -m bench.gpu --plan first --call B             # one; .gpu/ has what earlier ones left
    python -m bench.gpu --plan first --cells "dense_1b, inductor"      # again, after a fault
    python -m bench.gpu --plan first --rehearse           # on a CPU, small, with planted faults

Every cell is a process of its own with a time limit, and may use what earlier ones left of theirs:
a crash, a hang or a lost device costs that cell. Processes are forked from one that has imported
everything and never touches the GPU. Rows are in the file as they are measured; how a cell ended is
there too. Before the time of a call is over, caches of compiled code are packed beside the results,
for the next call.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bench.gpu import levers
from bench.gpu.carried import CARRIED, pack, unpack
from bench.gpu.estimator import estimator
from bench.gpu.kernels import kernels
from bench.gpu.models import models
from bench.gpu.profile import profile
from bench.gpu.record import GpuRecord, Row, read
from megacpp.state.files import write_json
from megacpp.terminal.screen import duration

PACKING_S = 20.0  # at the end of a call
LOST = 3  # exit code of a cell whose device stopped answering
STACK_AT = 0.9  # of a cell's limit: plan.log then has the stack, should it hang
DYING_S = 10.0  # for a killed process to go; one that waits for a broken driver may never
SCALE = 0.5  # of the limits, in a rehearsal
PLANTED = {"ceilings": "hang", "kernels, experts": "crash", "R rows": "sticky"}


@dataclass(frozen=True)
class Cell:
    """Measurement, which adds rows to a record in a process of its own with a time limit."""

    name: str
    seconds: float
    run: Callable[[GpuRecord], object]


@dataclass(frozen=True)
class Call:
    """Command on the machine with the GPU, its purpose, its time limit and its cells in order."""

    name: str
    what: str
    seconds: float
    cells: tuple[Cell, ...]


def _tests(file: str, of_cpu: str) -> Callable[[GpuRecord], object]:
    """Run a file's tests that need a GPU; in a rehearsal, some that don't."""

    def run(record: GpuRecord) -> None:
        chosen = ["-m", "not gpu", "-k", of_cpu] if record.tiny else ["-m", "gpu"]
        levers.tests(record, file, chosen)

    return run


def _models(name: str, mode: str, seconds: float, fp8: Literal["off", "torchao"] = "off") -> Cell:
    run = partial(models, wanted=[name], modes=[mode], fp8=fp8)
    return Cell(f"{name}, {mode}" + (", fp8" if fp8 != "off" else ""), seconds, run)


def _kernels(name: str, seconds: float) -> Cell:
    return Cell(f"kernels, {name}", seconds, partial(kernels, wanted=[name]))


FIRST = (
    Call(
        "A",
        "truth",
        540.0,
        (
            Cell("ceilings", 20, levers.ceilings),
            Cell("steps", 85, _tests("tests/gpu/test_steps.py", "dense_110m or captured")),
            Cell("golden data", 75, _tests("tests/gpu/test_golden_data.py", "fp32")),
            Cell("M2RNN by Triton", 45, partial(kernels, wanted=["m2rnn"], only="triton")),
            Cell("tune SISO", 120, levers.tune_siso),
            _kernels("m2rnn", 35),
            _kernels("mamba3", 35),
            _kernels("cross_entropy", 35),
            _kernels("experts", 35),
            _kernels("attention", 35),
        ),
    ),
    Call(
        "B",
        "goals",
        570.0,
        (
            _models("dense_1b", "inductor", 115),
            _models("dense_1b", "inductor, graph", 80),
            _models("dense_1b", "eager", 50),
            _models("hybrid_13", "inductor", 120),
            _models("hybrid_13", "inductor, graph", 80),
            _models("hybrid_13", "eager", 60),
            Cell("profile", 45, partial(profile, wanted=["hybrid_13"])),
        ),
    ),
    Call(
        "C",
        "levers",
        540.0,
        (
            Cell("loss chunks", 40, levers.loss_chunks),
            Cell("attention kernels", 40, levers.attention_kernels),
            Cell("muon", 75, levers.muon),
            Cell("R rows", 75, levers.r_rows),
            _models("dense_1b", "inductor", 120, fp8="torchao"),
            Cell("estimator", 100, partial(estimator, wanted=["dense_110m", "hybrid_400m"])),
            Cell("time model", 70, levers.predicted),
        ),
    ),
)
PLANS = {"first": FIRST}


class PlantedRecord(GpuRecord):
    """Record whose process goes wrong after its first row, in one of three ways."""

    fault = ""

    def add(self, row: Row) -> None:
        """Add a row, and then fail.

        Raises:
            RuntimeError: the device is lost, from now on.
        """
        super().add(row)
        if self.fault == "crash":
            os.abort()
        while self.fault == "hang":
            time.sleep(1.0)
        if self.fault == "sticky":
            self.lost = True  # as after a synchronisation that fails
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def run_plan(
    calls: Sequence[Call],
    out: Path,
    device: torch.device,
    carried: Path = CARRIED,
    cells: Sequence[str] = (),
    planted: dict[str, str] | None = None,
    scale: float = 1.0,
) -> int:
    """Run calls one after another; 0: every cell came to its end.

    Args:
        calls: of a plan.
        out: folder of results.
        device: of the measurements.
        carried: folder that travelled here.
        cells: names of cells to run; empty: all.
        planted: faults by the name of a cell.
        scale: factor of all limits.
    """
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.gettempdir()) / f"bench-gpu-{os.getuid()}"
    unpack(carried, out, work)
    ends: list[str] = []
    for call in calls:
        due = time.monotonic()
        last = due + scale * (call.seconds - PACKING_S)
        wanted = [c for c in call.cells if not cells or c.name in cells]
        for cell in wanted:
            due += scale * cell.seconds  # a cell may use what earlier ones left of their time
            seconds = min(due, last) - time.monotonic()
            fault = (planted or {}).get(cell.name, "")
            ends.append(_cell(call, cell, seconds, out, device, fault))
        if wanted:
            print(pack(work, out), flush=True)
    return 0 if set(ends) <= {"done"} else 1


def _cell(
    call: Call, cell: Cell, seconds: float, out: Path, device: torch.device, fault: str
) -> str:
    """Run a cell in a process of its own, note how it ended, and return that."""
    path, began = out / "gpu.json", time.monotonic()
    print(f"{call.name} {cell.name}: at most {duration(seconds)} ...", flush=True)
    end = "the time of the call was over"
    if seconds > 0:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os._exit(_inside(cell, seconds, path, device, fault))
        end = _awaited(pid, seconds)
    took = time.monotonic() - began
    found: dict[str, Any] = read(path) or {"rows": [], "skipped": []}
    same = lambda row: (row["section"], row["name"]) == ("plan", cell.name)  # noqa: E731
    found["rows"] = [row for row in found["rows"] if not same(row)]
    row = {"section": "plan", "name": cell.name, "mode": call.name, "end": end}
    found["rows"].append(row | {"seconds": took, "limit_s": seconds})
    write_json(path, found)
    print(f"{call.name} {cell.name}: {end}, {took:.1f} s", flush=True)
    return end


def _inside(cell: Cell, seconds: float, path: Path, device: torch.device, fault: str) -> int:
    """Run a cell in the process that is its own, with its output in plan.log; an exit code."""
    os.setsid()
    log = os.open(path.with_name("plan.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.dump_traceback_later(STACK_AT * seconds, file=log)
    try:
        record = PlantedRecord(path, device, seconds, device.type == "cpu")
        record.fault = fault
        record.go_on()
        cell.run(record)
        record.save()
        return LOST if record.lost else 0
    except BaseException:  # the process ends here, whatever it was
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _awaited(pid: int, seconds: float) -> str:
    """Return how a process ended; past its limit it is killed, with the processes it started."""
    status = _status(pid, seconds)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        _status(pid, DYING_S)
        return "hung"
    if os.WIFSIGNALED(status):
        return f"crashed: {signal.Signals(os.WTERMSIG(status)).name}"
    names = {0: "done", LOST: "lost the device"}
    return names.get(os.WEXITSTATUS(status), "failed: plan.log has the error")


def _status(pid: int, seconds: float) -> int | None:
    """Return the status of a process once it ends; None: it still runs after so long."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    return None
