"""Which sockets a run listens on: none, but for its health endpoint (SECURITY.md)."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from megacpp.lessons.launch import ADAMW, SMALL
from tests.launch import background, until
from tests.test_run import records

LISTENS = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Return (address, port) of the TCP sockets on which a process listens, IPv4 and IPv6."""
    own = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(handle))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in own:
                address, port = local.split(":")
                words = [bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("monitor", [False, True], ids=["none", "monitor"])
def test_what_a_run_listens_on(corpus: Path, tmp_path: Path, monitor: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.listen()
        assert listening(os.getpid()) >= {("127.0.0.1", port)}
    folder = tmp_path / "run"
    flags = [*SMALL, *ADAMW, "--memory.calibration=", "--run.steps", "100000"]
    flags += ["--data.path", str(corpus), "--run.dir", str(folder)]
    flags += ["--run.monitor", str(port)] if monitor else []
    with background("tiny", *flags) as process:
        until(lambda: (folder / "metrics.jsonl").exists() and bool(records(folder)), process)
        assert listening(process.pid) == ({("127.0.0.1", port)} if monitor else set())
        if monitor:
            where = f"http://127.0.0.1:{port}"
            with urllib.request.urlopen(f"{where}/status", timeout=30) as answer:
                status = json.load(answer)
            with urllib.request.urlopen(f"{where}/metrics", timeout=30) as answer:
                metrics = answer.read().decode()
            assert status["state"] == "running" and status["step"] >= 1
            assert "megacpp_up 1\n" in metrics and "megacpp_step " in metrics
