"""Message and exit code of a rank, in the file that torchrun reads; imports no torch."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def note(code: int, line: str) -> None:
    """Write this rank's exit code and message to torchrun's error file, if there is one.

    The format is that of torch.distributed.elastic.multiprocessing.errors.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": {"message": line, **more}}))


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
