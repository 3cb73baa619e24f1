"""Record of GPU measurements: rows that are written at once, and the tables made of them."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megacpp.kernels.host import installed
from megacpp.launch.record import device_name, driver_version, git_commit
from megacpp.state.files import write_json
from megacpp.terminal.screen import duration

Row = dict[str, Any]


@dataclass
class GpuRecord:
    """Rows of one run, in a file that is rewritten with each.

    Attributes:
        path: file of JSON; None: nothing is written.
        seconds: time limit of the run; nothing new is begun after it.
        rows, skipped: measured rows, and the others with the reason.
    """

    path: Path | None
    device: torch.device
    seconds: float
    tiny: bool = False
    rows: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)
    lost: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.monotonic() - self.began)

    def attempt(self, section: str, name: str, mode: str, run: Callable[[], Iterable[Row]]) -> bool:
        """Add the rows of one measurement; an error is one line of the record, and the run goes on.

        Args:
            section: section of the record.
            name: what is measured.
            mode: variant of it.
            run: yields rows.
        """
        self._forget(section, name, mode)
        if self.lost:
            self.skip(section, name, mode, "the device was lost before")
        elif self.left_s <= 0:
            self.skip(section, name, mode, f"the {self.seconds:.0f} s of this run were over")
        else:
            self.say(f"{section}: {name} {mode} ...")
            try:
                for row in run():
                    self.add({"section": section, "name": name, "mode": mode} | row)
                return True
            except Exception as error:  # an error of one row must not stop the others
                traceback.print_exc(limit=-6, file=sys.stderr)
                self.skip(section, name, mode, one_line(error))
                self.lost = self.lost or _lost(self.device)
        return False

    def go_on(self) -> None:
        """Take over the rows that the file has; what is measured again replaces its old rows.

        The file of another device is put aside, with its name at the end of the file's.
        """
        before = read(self.path) if self.path is not None else None
        if before is None or self.path is None:
            return
        other = before.get("device")
        if other not in (None, device_name(self.device)):
            words = re.sub(r"[^0-9A-Za-z]+", "-", str(other))
            self.path.rename(self.path.with_name(f"{self.path.stem}-{words}.json"))
        else:
            self.rows, self.skipped = before["rows"], before["skipped"]

    def _forget(self, section: str, name: str, mode: str) -> None:
        for rows in (self.rows, self.skipped):
            rows[:] = [
                row
                for row in rows
                if (row["section"], row["name"]) != (section, name) or mode not in ("", row["mode"])
            ]

    def add(self, row: Row) -> None:
        """Add a row; a non-finite figure is named in it and left out of tables."""
        bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        self.rows.append(row | dict.fromkeys(bad) | ({"not_finite": bad} if bad else {}))
        self.save()

    def skip(self, section: str, name: str, mode: str, why: str) -> None:
        """Add a measurement that isn't made, with the reason.

        Args:
            section: section of the record.
            name: what isn't measured.
            mode: variant of it.
            why: reason.
        """
        self.say(f"{section}: {name} {mode}: not run: {why}")
        self.skipped.append({"section": section, "name": name, "mode": mode, "why": why})
        self.save()

    def say(self, words: str) -> None:
        """Print a line of progress, with elapsed and remaining time."""
        gone = time.monotonic() - self.began
        print(f"[{duration(gone)}, {duration(self.left_s)} left] {words}", flush=True)

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            write_json(self.path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON."""
        packages = installed()
        return {
            **hardware(self.device),
            "torch": torch.__version__,
            "triton": packages.get("triton"),
            "python": platform.python_version(),
            "packages": packages,
            "commit": git_commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "tiny": self.tiny,
            "seconds": round(time.monotonic() - self.began, 1),
            "rows": self.rows,
            "skipped": self.skipped,
        }


def hardware(device: torch.device) -> dict[str, Any]:
    """Return name, capability, driver and memory of a device."""
    if device.type != "cuda":
        return {"device": device_name(device), "capability": None, "driver": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": device_name(device),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "memory_bytes": properties.total_memory,
    }


def one_line(error: BaseException) -> str:
    """Return an error as a line that fits a table."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def _lost(device: torch.device) -> bool:
    """Return whether a device no longer answers; every later call would then fail."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # any error means that it is lost
        return True
    return False


def read(path: Path) -> dict[str, Any] | None:
    """Return a stored record, or None."""
    return json.loads(path.read_text()) if path.exists() else None
