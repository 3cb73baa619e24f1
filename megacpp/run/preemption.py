"""Signals: a run that is told to stop saves after its step; one that is told twice leaves at once.

SIGTERM, SIGHUP    save after this step and leave with 75; told again: the same
SIGINT (Ctrl-C)    leave with 130, saving nothing; told again: within 2 seconds in any case
launcher killed    the kernel ends the ranks, saving nothing (megacpp/outcome.py)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from megacpp.outcome import PEER_LOST, launcher
from megacpp.terminal.screen import INTERRUPTED

INTERRUPT = bytes([signal.SIGINT])
GRACE_S = 1.0  # from a second Ctrl-C to the end, whatever the main thread waits for


class StopRequest:
    """Flag that records a request to stop until the current step is over.

    Ranks receive the signal at different moments, some not at all. They agree by a number in the
    all-reduce of the gradient norm (`AccumulationBoundary`), and all exit after the same step.
    Further requests are ignored: a scheduler may signal every process, and torchrun then signals
    its ranks once more. torchrun kills remaining ranks after 30 seconds.

    Python runs handlers between two instructions of the main thread, which may be waiting in a
    collective. A second Ctrl-C is therefore heard by a thread of its own.
    """

    def __init__(self) -> None:
        self.heard = ""
        self._launcher = launcher()
        signal.signal(signal.SIGTERM, self._hear)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, self._hear)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_leave_when_told_twice, args=(reader,), daemon=True).start()

    def __call__(self) -> bool:
        """Return whether to leave after this step; end the process if its launcher has died."""
        if self._launcher and os.getppid() != self._launcher:
            os._exit(PEER_LOST)
        return bool(self.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or signal.Signals(number).name
        if number == signal.SIGHUP:  # the terminal is gone: writing to it fails
            for stream in (sys.stdout, sys.stderr):
                if stream.isatty():
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _leave_when_told_twice(reader: int) -> None:
    """End the process after the second Ctrl-C.

    torchrun passes the first one on, and a SIGTERM at the second.
    """
    heard = b""
    while not {signal.SIGINT, signal.SIGTERM}.intersection(heard.partition(INTERRUPT)[2]):
        heard += os.read(reader, 64)
    time.sleep(GRACE_S)
    os._exit(INTERRUPTED)
