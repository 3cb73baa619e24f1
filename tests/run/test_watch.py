"""Runs are watched from their files alone, whole or torn, and served to who may see them."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.cli.watch import lines_of, sparkline
from megacpp.config.arguments import parse_run
from megacpp.errors import ConfigError
from megacpp.outcome import write_status
from megacpp.run.lock import take
from megacpp.run.monitor import TOKEN, serve
from megacpp.run.vitals import prometheus, vitals
from parallel.boundary import AccumulationBoundary
from tests.launch import ROOT, forked
from tests.test_run import SMALL


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {"run": {"steps": 40}}}))
    rows = [
        {"step": n, "loss": 5 - n / 10, "step_s": 2.0, "tokens_per_s": 50.0, "grad_norm": 1.5}
        for n in range(30)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "goodput.jsonl").write_text('{"s": {"step": 60.0}}\n{"s": {"step": 1, "data": 2}}\n')
    (folder / "stragglers.jsonl").write_text('{"step": 28, "rank": 3}\n{"step": 25, "rank": 3}\n')
    (folder / "checkpoints/latest").write_text("step-000020\n")
    write_status(folder)
    return folder


def test_a_full_disk_is_no_kill(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is written into the file that is there, and no pending one stays."""
    there = sorted(run.iterdir())
    write = Path.write_text

    def full(self: Path, text: str) -> int:
        write(self, "")  # a full disk takes an empty file
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    for line in ("no space left on device. Fix: free disk space.", ""):  # longer, and shorter
        write_status(run, 4, line)
        told = json.loads((run / "status.json").read_text())
        assert (told["state"], told["code"], told["message"]) == ("ended", 4, line)
        assert vitals(run)["state"] == "ended" and sorted(run.iterdir()) == there
    (run / "status.json").unlink()
    write_status(run, 4, "nothing to write into")
    assert sorted(run.iterdir()) == [path for path in there if path.name != "status.json"]


def test_a_run_in_two_or_three_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = vitals(run)
    assert (found["state"], found["step"], found["left_s"]) == ("running", 30, 20.0)
    assert found["spent_s"] == {"step": 61.0, "data": 2.0} and found["stragglers"] == [3]
    assert main(["watch", str(run), str(run), "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{run}: running\n") == 2 and out.count("stragglers: ranks 3") == 2
    assert "step 30/40  loss 2.1000  50 tok/s  eta 20 s" in out.replace("0:20", "20 s")
    assert main(["watch", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "step-000020"
    assert main(["watch", str(run / "none")]) == 2
    (run / "calibration").mkdir()
    assert main(["watch", str(run), str(run / "calibration"), "--once"]) == 0
    assert f"note: {run / 'calibration'} is left out: it holds no run" in capsys.readouterr().err


def test_on_a_terminal_runs_are_drawn_anew_until_they_end(run: Path) -> None:
    """A pseudo-terminal: each look is drawn over the one before, and the last one stays."""
    lock, (mine, theirs) = take(run), os.openpty()
    command = [sys.executable, "-m", "megacpp", "watch", str(run), "--every", "0.1"]
    wide = os.environ | {"COLUMNS": "400"}  # lines end at the screen's edge
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=wide)
    os.close(theirs)
    text = ""
    try:
        while text.count("\x1b[J") < 2:
            text += os.read(mine, 4096).decode()
        assert process.poll() is None, "the run goes on"
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 30, "loss": 1.5}\n')
        write_status(run, 0)
        lock.release()
        with suppress(OSError):  # the last writer has closed it
            while more := os.read(mine, 4096):
                text += more.decode()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    first, *others = text.replace("\r\n", "\n").split("\x1b[J")
    assert first.startswith(f"{run}: running\n"), text
    assert all(one.startswith(f"{run}: ") for one in others), text
    height = first.count("\n")
    assert text.count(f"\x1b[{height}A") == len(others) and height == 3
    assert f"{run}: ended with 0\n" in others[-1] and "step 31/40  loss 1.5000" in others[-1]


def test_a_killed_run_is_told_from_one_that_goes_on(run: Path) -> None:
    lock = take(run)
    assert vitals(run)["state"] == "running"
    lease = json.loads((run / "run.lock").read_text())
    (run / "run.lock").write_text(json.dumps(lease | {"ticks": 1}))
    assert vitals(run)["state"] == "killed"
    lock.release()
    write_status(run, 6, "rank 1 lost")
    assert lines_of(vitals(run))[0].endswith("run: ended with 6")
    assert lines_of(vitals(run))[-1] == "  rank 1 lost"


def test_torn_and_damaged_files_are_left_out(run: Path) -> None:
    rng, names = random.Random(0), [path for path in run.rglob("*") if path.is_file()]
    whole = {path: path.read_bytes() for path in names}
    junk = [b"", b"null", b"[" * 9999, b"\xff\0{", b'{"step": {}, "s": 3, "loss": "x"}\n', b"1\n"]
    for _ in range(60):
        for path in names:
            raw = whole[path]
            path.write_bytes(rng.choice([raw, raw[: rng.randrange(len(raw))], rng.choice(junk)]))
        found = vitals(run)
        assert lines_of(found) and prometheus(found) and json.dumps(found)


def test_losses_as_bars() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 8.0]) == "▁▂ █" and sparkline([]) == ""
    assert len(sparkline([float(n) for n in range(1000)])) <= 24


def fetch(port: int, path: str, token: str = "") -> tuple[int, str]:
    head = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=head)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_the_endpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve("0", run)
    try:
        port = server.server_address[1]
        assert server.server_address[0] == "127.0.0.1"
        assert f"http://127.0.0.1:{port}/status" in capsys.readouterr().out
        assert json.loads(fetch(port, "/status")[1])["step"] == 30
        text = fetch(port, "/metrics")[1]
        assert "megacpp_up 1\n" in text and "megacpp_loss 2.1\n" in text
        assert 'megacpp_seconds_total{class="step"} 61\n' in text
        assert fetch(port, "/../config.json")[0] == 404 and not (run / TOKEN).exists()
        with pytest.raises(ConfigError, match=f"run.monitor={port}: nothing can listen there"):
            serve(str(port), run)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_run_with_an_endpoint_answers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked in its fourth step, at a port that was free a moment before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    accumulate = AccumulationBoundary.accumulate

    def asked(self: AccumulationBoundary, batches: Any, step: int = 0) -> Any:
        if step == 3:
            answers = [fetch(port, path) for path in ("/status", "/metrics")]
            (tmp_path / "answers").write_text(json.dumps(answers))
        return accumulate(self, batches, step)

    monkeypatch.setattr(AccumulationBoundary, "accumulate", asked)
    flags = [*SMALL, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    flags += ["--run.steps", "5", "--run.monitor", str(port), "--train.device-batch-size", "2"]
    done = forked("tiny", *flags)
    assert done.returncode == 0, done.stderr
    assert f"monitor: http://127.0.0.1:{port}/status and /metrics" in done.stdout
    (code, status), (other, metrics) = json.loads((tmp_path / "answers").read_text())
    assert code == other == 200 and "megacpp_up 1\n" in metrics
    found = json.loads(status)
    assert (found["state"], found["steps"]) == ("running", 5) and 1 <= found["step"] <= 3
    with pytest.raises(urllib.error.URLError):
        fetch(port, "/status")


def test_other_addresses_need_the_token(run: Path) -> None:
    server = serve("0.0.0.0:0", run)
    try:
        port, token = server.server_address[1], (run / TOKEN).read_text().strip()
        assert stat.S_IMODE(os.stat(run / TOKEN).st_mode) == 0o600 and len(token) > 20
        assert fetch(port, "/status")[0] == fetch(port, "/metrics", "x" + token)[0] == 401
        assert fetch(port, "/status", token)[0] == 200
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("text", ["x", ":80", "70000", "host:", "-1", "1.5"])
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.monitor=.*: must be a port, or HOST:PORT"):
        parse_run(["--run.monitor", text], 1)
