"""Lock of a run folder: one start at a time, and who that is; no torch import here.

    run.lock    {"host": ..., "pid": ..., "start": ..., "beats": 17, "ended": false, ...}

The first rank holds the file by `flock`, which the kernel frees when the process dies. Some shared
file systems don't carry a lock from one machine to another. So the file is a lease too: its holder
counts `beats` up, and a newcomer on another machine watches for `LEASE_S` whether they move. No two
clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacpp.errors import ConfigError, config_error
from megacpp.outcome import note, started_ticks, this_node
from megacpp.state.files import parsed

FILE = "run.lock"
BEAT_S, LEASE_S, POLL_S = 2.0, 10.0, 0.2
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
MOST_BYTES = 1 << 12


class RunLock:
    """Lock that this process holds on a run folder until it releases it or dies.

    Attributes:
        followed: the start before this one ended without a word: it was killed.
    """

    def __init__(self, folder: Path, handle: int, followed: bool) -> None:
        self.path, self.followed, self._handle = folder / FILE, followed, handle
        node, host = this_node()
        self._lease: dict[str, Any] = {
            "host": host,
            "node": node,
            "pid": os.getpid(),
            "ticks": started_ticks(os.getpid()),
            "start": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": uuid.uuid4().hex,
            "beats": 0,
            "ended": False,
        }
        self._write()
        os.register_at_fork(after_in_child=self._forget)  # a child must not hold it longer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="run.lock")
        self._thread.start()

    def release(self, refused: bool = False) -> None:
        """End the lease and free the lock.

        Args:
            refused: the start is refused, so no trace of it is left.
        """
        self._stop.set()
        self._thread.join()  # a beat that is late would write over the end, or miss the file
        if self._handle >= 0 and self.owned():
            self._lease["ended"] = True
            with suppress(OSError):
                if refused and not self.followed:
                    self.path.unlink()
                self._write()
        self._forget()

    def owned(self) -> bool:
        """Return whether the file is still this start's: nobody has taken the folder over."""
        return _read(self.path).get("token") == self._lease["token"]

    def _forget(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._lease["beats"] += 1
            with suppress(OSError):  # a disk that is full or gone ends the run elsewhere
                if self.path.exists() and not self.owned():
                    line = f"run.dir={self.path.parent}: taken over by {_who(_read(self.path))}"
                    note(ConfigError.exit_code, line)
                    print(f"error: {line}", file=sys.stderr, flush=True)
                    os._exit(ConfigError.exit_code)
                self._write()

    def _write(self) -> None:
        text = json.dumps(self._lease).ljust(512) + "\n"
        os.pwrite(self._handle, text.encode(), 0)
        os.fsync(self._handle)


def take(folder: Path, force: bool = False, wait_s: float = 0.0) -> RunLock:
    """Return the lock of a run folder.

    Args:
        folder: folder of the run; it is made if it is missing.
        force: take it from a holder whose lease has run out although its lock is still there.
        wait_s: seconds to wait for a holder that is about to end.

    Raises:
        ConfigError: another start holds it; its host, process and start are named.
        OSError: the folder isn't writable.
    """
    path, deadline = folder / FILE, time.monotonic() + wait_s
    while True:
        folder.mkdir(parents=True, exist_ok=True)  # a start that held it may have moved it aside
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        granted = _flock(handle)
        holder = _read(path)
        if granted and _is_at(path, handle):
            if not _lives(path, holder):
                return RunLock(folder, handle, followed=holder.get("ended") is False)
            granted = False  # this file system doesn't carry the lock
        os.close(handle)
        if granted or time.monotonic() < deadline:
            time.sleep(POLL_S)
        elif force and not _beats(path, holder):
            with suppress(FileNotFoundError):
                path.unlink()
        else:
            raise config_error(
                "run.dir",
                folder,
                f"is in use by {_who(holder)}",
                "wait for that run, stop it, or choose another --run.dir; --run.force takes the "
                f"folder over once that process has given no sign of life for {LEASE_S:g} s",
            )


def _is_at(path: Path, handle: int) -> bool:
    """Return whether an open file is at its path: its holder hasn't deleted or moved it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _flock(handle: int) -> bool:
    """Return whether the lock was granted; it counts as granted where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in UNSUPPORTED:
            raise
    return True


def _lives(path: Path, holder: Mapping[str, Any]) -> bool:
    """Return whether the holder of a lease is alive, by its process or else by its beats."""
    if holder.get("ended") is not False:
        return False
    if holder.get("node") == this_node()[0]:  # elsewhere this pid is another process
        ticks = started_ticks(holder["pid"])
        return holder["pid"] != os.getpid() and ticks is not None and ticks == holder.get("ticks")
    return _beats(path, holder)


def _beats(path: Path, holder: Mapping[str, Any]) -> bool:
    """Return whether a lease changes within `LEASE_S`."""
    deadline = time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if _read(path) != holder:  # opened again, so that network caches are refreshed
            return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """Return the lease in a file; empty if there is none that can be read."""
    with suppress(OSError), path.open("rb") as file:
        found = parsed(file.read(MOST_BYTES))
        return found if type(found.get("pid")) is int else {}
    return {}


def _who(holder: Mapping[str, Any]) -> str:
    if not holder:
        return "another start"
    return f"process {holder['pid']} on {holder.get('host')} since {holder.get('start')}"
