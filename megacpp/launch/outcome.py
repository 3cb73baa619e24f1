"""The message and exit code of a rank, in the file that torchrun reads; no torch import."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def note(code: int, line: str) -> None:
    """Write the exit code and the message of this rank where its launcher looks for them.

    The format is that of torch.distributed.elastic.multiprocessing.errors; nothing without it.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": {"message": line, **more}}))


def wait_quietly() -> None:
    """Wait until the first rank has printed and the launcher ends this one.

    A rank that torchrun ends so, and that then leaves with 0, is no failure in its table.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        # The first rank of another node leaves soon: launchers end together, or miss each other.
        time.sleep(1.0 if os.environ.get("LOCAL_RANK") == "0" else 5.0)
    else:
        time.sleep(1.0)
