"""Uploads behind the steps: one thread of rank 0 copies saves to `checkpoint.remote`.

One upload is in flight at a time. A save that comes meanwhile waits, and a newer one takes its
place; retention spares both (`held`).
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

from megacpp.state.remote import GoneError, RemoteRun, size
from megacpp.urls import one_line

NEWS_S = 10.0  # between lines while the end of a run waits


class Uploads:
    """Uploads of one run.

    Args:
        remote: where they go.
        keep, keep_every: retention there, as in `save_checkpoint`.

    Attributes:
        failed: line about the last upload; empty if the store has it.
    """

    def __init__(self, remote: RemoteRun, keep: int, keep_every: int) -> None:
        self.remote, self.keep, self.keep_every = remote, keep, keep_every
        self.failed = ""
        self._lock = threading.Lock()
        self._current: Path | None = None
        self._next: Path | None = None
        self._thread: threading.Thread | None = None
        self._sent = (0, 0)

    @property
    def held(self) -> frozenset[Path]:
        """Checkpoints that an upload still reads."""
        with self._lock:
            return frozenset(p for p in (self._current, self._next) if p is not None)

    def offer(self, path: Path) -> None:
        """Upload a published checkpoint, after the one that is in flight."""
        with self._lock:
            self._next = path
            if self._current is None:
                self._current, self._next = path, None
                self._thread = threading.Thread(target=self._run, daemon=True, name="upload")
                self._thread.start()

    def finish(self, run: Path, within_s: float = math.inf) -> bool:
        """Wait for the last upload, with lines of progress; return whether it has succeeded.

        Args:
            run: run folder; its files go along once more, and its final weights if there is time.
            within_s: seconds to wait.
        """
        began = time.monotonic()
        while (thread := self._thread) is not None and thread.is_alive():
            left = within_s - (time.monotonic() - began)
            if left <= 0:
                _say(f"warning: left before the upload to {self.remote.url} was over")
                return False
            thread.join(min(NEWS_S, left))
            if thread.is_alive():
                done, total = self._sent
                _say(f"uploading to {self.remote.url}: {size(done)} of {size(total)}")
        if not self.failed:
            try:
                self.remote.upload_beside(run)
                began = time.monotonic()
                if math.isinf(within_s) and (sent := self.remote.upload_final(run, self._progress)):
                    self._said("final", sent, began)
            except Exception as error:  # each file system has errors of its own
                self.failed = f"files of {run} aren't at {self.remote.url} ({one_line(error)})"
        if self.failed:
            _say(f"warning: {self.failed}. Fix: start the same command again, it uploads it.")
        return not self.failed

    def _run(self) -> None:
        """Upload until nothing waits."""
        while (path := self._current) is not None:
            self._upload(path)
            with self._lock:
                self._current, self._next = self._next, None

    def _upload(self, path: Path) -> None:
        began, self._sent = time.monotonic(), (0, 0)
        try:
            sent = self.remote.upload(path, self.keep, self.keep_every, self._progress)
        except GoneError:  # a newer save took its place
            return
        except Exception as error:  # each file system has errors of its own
            self.failed = f"{path.name} isn't at {self.remote.url} ({one_line(error)})"
            _say(f"warning: {self.failed}: the next save is tried")
            return
        self.failed = ""
        if sent:
            self._said(path.name, sent, began)

    def _said(self, name: str, sent: int, began: float) -> None:
        took = time.monotonic() - began
        _say(f"uploaded {name} to {self.remote.url}: {size(sent)} in {took:.1f} s")

    def _progress(self, done: int, total: int) -> None:
        self._sent = (done, total)


def _say(line: str) -> None:
    print(line, flush=True)
