"""How a start goes and how it ended: for the launcher, and in status.json; imports no torch.

status.json    {"state": "running" | "ended", "code": 75, "message": ..., "host": ..., ...}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

STATUS = "status.json"
PR_SET_PDEATHSIG = 1
PEER_LOST, PREEMPTED = 6, 75
UNSAVED = "stopped before another save: start the same command again"


def note(code: int, line: str) -> None:
    """Write this rank's exit code and message to torchrun's error file, if there is one.

    The format is that of torch.distributed.elastic.multiprocessing.errors.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it
            Path(path).write_text(json.dumps({"message": {"message": line, **more}}))


def write_status(folder: Path, code: int | None = None, message: str = "", **more: Any) -> None:
    """Write status.json, atomically; a folder that can't be written is left as it is.

    A full disk takes no new file: there the file is written in place, into the block that it has.

    Args:
        folder: folder of the run.
        code: exit code; None: the run goes on.
        message: line that the run ended with.
        more: further values.
    """
    content = {
        "state": "running" if code is None else "ended",
        "code": code,
        "message": message,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        **more,
    }
    pending, text = folder / f".{STATUS}.{os.getpid()}.tmp", json.dumps(content, indent=1) + "\n"
    try:
        pending.write_text(text)
        pending.replace(folder / STATUS)
    except OSError:
        with contextlib.suppress(OSError):
            pending.unlink(missing_ok=True)
        with contextlib.suppress(OSError), (folder / STATUS).open("r+") as file:
            file.write(text)
            file.truncate()


def this_node() -> tuple[str, str]:
    """Return machine and process namespace, within which a pid is one process, and the host."""
    space, host = "", socket.gethostname()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{host} {space}", host


def started_ticks(pid: int) -> int | None:
    """Return when a process of this node began, in clock ticks; None: it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])  # field 22 of proc(5)


def launcher() -> int:
    """Return the process of torchrun's agent; 0 without one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies; 0: it has none.

    A rank whose launcher has died saves nothing: a restarted run may already be there.
    """
    if parent:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has it
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(PEER_LOST)


def end_when_told() -> None:
    """Let SIGTERM and SIGHUP end this process with 75 at once, until StopRequest hears them.

    Nothing is there to be saved before the first step. The rank of a launcher says nothing, because
    the launcher also sends SIGTERM to the ranks beside one that has failed.
    """
    speaks = "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("RANK", "0") == "0"

    def leave(_: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(2, f"{UNSAVED}\n".encode() if speaks else b"")
        os._exit(PREEMPTED)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, leave)


def wait_quietly() -> None:
    """Wait until the first rank has printed and the launcher ends this one.

    A rank that torchrun ends and that exits with 0 isn't a failure in its table.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        # The first rank of a node exits soon, so that launchers end together.
        time.sleep(1.0 if os.environ.get("LOCAL_RANK") == "0" else 5.0)
    else:
        time.sleep(1.0)
