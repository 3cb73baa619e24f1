"""Screen output: 80 columns, progress, rejected outputs, commands without torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacpp.cli.main import COMMANDS, main
from megacpp.config.help import run_help
from megacpp.config.schema import Config, RunConfig
from megacpp.errors import ConfigError
from megacpp.launch.record import print_header
from megacpp.launch.start import _mesh_line
from megacpp.run.metrics import MetricsLog, StepRecord
from megacpp.terminal import progress
from megacpp.terminal.screen import check_folder, check_writable, columns, labelled, table, wrapped

ROOT = Path(__file__).parents[1]
MODEL = "tiny --model.pattern AEMR --model.depth 5 --data.seq-len 32".split()
SMALL = [*MODEL, *"--world 4 --mesh.tp 2".split()]
GIVEN = "--world 2 --memory 2GiB --tokens-per-step 8192 --explain".split()
LONG = {
    "activations": [*MODEL, "--recompute.norms"],
    "memory trace": MODEL,
    "dry-run": SMALL,
    "explain": SMALL,
    "plan": ["tiny", *GIVEN],
}
REPORTS = [
    ["presets"],
    ["show", "nam56r_base"],
    ["validate", *SMALL, "--mesh.ep", "2"],
    ["validate", "tiny", "--memory.device-gib", "40"],
    ["plan", *"nam56r --world 8 --memory 1GiB --tokens-per-step 1048576 --mesh.tp 8".split()],
    ["doctor", "--no-self-test"],
    *([*name.split(), "--help"] for name in COMMANDS),
    [],
]
# A command line, a path and a setting are one word each; nothing else may be wider.
WHOLE = ("/", "--", "http", " = ")


@pytest.mark.parametrize("words", REPORTS, ids=lambda words: " ".join(words[:2]))
def test_reports_fit_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) in (0, 1, 2)
    out = capsys.readouterr().out
    assert out and not too_wide(out)


def too_wide(text: str) -> list[str]:
    """Lines of more than 80 characters that could have been wrapped."""
    lines = text.splitlines()
    return [line for line in lines if len(line) > 80 and not any(w in line for w in WHOLE)]


def test_help_of_a_run_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        longest = max(map(len, run_help("train.py").splitlines()))
        assert width - 12 < longest <= width


def test_what_is_wider_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["name", "bytes"], ["blocks.11.mixer.shared.w1.weight" * 3, "12"]]
    for width, lines in ((60, 4), (140, 3)):
        monkeypatch.setenv("COLUMNS", str(width))
        found = table(rows)
        assert columns() == width and max(map(len, found)) <= width and len(found) >= lines
    text = "".join(line[: line.rfind("  ") if line.endswith("12") else None] for line in found)
    assert rows[1][0] in text
    assert wrapped("a " * 100, "")[0].strip() and len(labelled("x", "a " * 100, 20)) == 2
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    assert columns() == 80  # a file


# ---- a run --------------------------------------------------------------------------------------


def record(**changed: float) -> StepRecord:
    values = {"step": 9, "loss": 3.25, "bits_per_byte": 1.5, "grad_norm": 2.0, "lr": 1e-3}
    values |= {"tokens": 4096, "valid_tokens": 4000, "tokens_per_s": 123456.0, "step_s": 1.5}
    values |= {"peak_bytes": 50 << 30, "grad_accum": 2, "nonfinite": 0, "skipped": False}
    return StepRecord(**(values | changed))  # type: ignore[arg-type]


def test_the_line_of_a_step_drops_what_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path, Config(run=RunConfig(steps=100000)), 0, active=False)
    for mfu in (None, 0.4):
        for width in (80, 100, 140):
            monkeypatch.setenv("COLUMNS", str(width))
            line = log.line(record(mfu=mfu, skipped=True))  # type: ignore[arg-type]
            assert len(line) <= width and line.startswith("step     10/100000  loss 3.2500  ")
            assert "123,456 tok/s" in line and "eta " in line and line.endswith("SKIPPED")
    assert "bpb 1.5000" in line and "1.50 s" in line and "51,200 MiB" in line  # 140 columns


def test_the_remaining_time_is_that_of_the_steps_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumed at step 5 of 10 prints what is left after 3 seconds."""
    log = MetricsLog(tmp_path, Config(run=RunConfig(steps=10)), 4, active=False)
    monkeypatch.setattr("time.perf_counter", lambda: log.began + 3.0)
    for step, left in ((4, "0:15"), (6, "0:03"), (9, "0:00")):
        assert log.line(record(step=step)).endswith(f"eta {left}"), step


def test_the_header_is_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_header([("batch", ["a long line " * 20, "short"])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batch" and lines[1].startswith("  a long") and lines[2].startswith("    ")
    assert max(map(len, lines)) <= 80
    for row in ("a table's    row".ljust(78, "."), "x"):  # the widest that fits is left as it is
        print_header([("batch", [row])])
        assert capsys.readouterr().out.splitlines()[1] == f"  {row}"


# ---- progress -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mesh", "device", "line"),
    [
        ({}, "cpu", "one process, no process group, on cpu"),
        ({"dp_shard": 2, "tp": 1, "ep": 1}, "cpu", "dp_shard 2, FSDP2 over gloo"),
        ({"dp_shard": 2, "tp": 2, "ep": 1}, "cuda", "dp_shard 2 x tp 2, FSDP2 over NCCL"),
        ({"dp_shard": 1, "ep": 1}, "cuda", "one rank, FSDP2 over NCCL"),
        ({"dp_shard": 4, "ep": 2}, "cuda", "dp_shard 4, experts on ep 2 of them, FSDP2 over NCCL"),
    ],
)
def test_the_header_names_the_mesh(mesh: dict[str, int], device: str, line: str) -> None:
    assert _mesh_line(mesh, torch.device(device)) == line


def test_progress_in_a_file_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    assert list(progress.counted("abcdefghij", "work", 10)) == list("abcdefghij")
    out, err = capsys.readouterr()
    # Two seconds a letter: the third, sixth and ninth are more than five seconds apart.
    assert out == "" and err.splitlines() == [
        "work: 30%, 0:14 left",
        "work: 60%, 0:08 left",
        "work: 90%, 0:02 left",
    ]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(progress.counted(range(3), "work", 3)) == [0, 1, 2]
    assert "work" in screen.getvalue() and "100%" in screen.getvalue()


@pytest.mark.parametrize("command", LONG)
def test_long_commands_show_progress_and_fit_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), *LONG[command]]) == 0
    out, err = capsys.readouterr()
    shares = [int(line.split(": ")[1].split("%")[0]) for line in err.splitlines()]
    assert all(line.startswith(f"{command}: ") for line in err.splitlines())
    assert len(shares) > 3 and shares == sorted(shares) and shares[-1] == 100
    assert out and not too_wide(out)


# ---- files that can't be written ----------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("as it was")
    assert check_writable("out", tmp_path / "there").read_text() == "as it was"
    assert not check_writable("out", tmp_path / "new").exists()
    for path in (tmp_path / "no" / "x", tmp_path / "there" / "x", tmp_path):
        with pytest.raises(ConfigError, match=r"^out=.* is not writable \(.*\)\. Fix: ") as caught:
            check_writable("out", path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["memory", "trace", "tiny", "--timeline", "/nope/x"], 2),
        (["report", "RUN", "--out", "/nope/x.html"], 2),
        (["data", "prepare", "--out", "/proc/nope/x"], 3),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused_before_the_work(
    words: list[str],
    exit_code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the function that would do the work is never called."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("megacpp.cli.trace.trace_step", work)
    monkeypatch.setattr("megacpp.cli.report.gather", work)
    monkeypatch.setattr("megacpp.data.prepare._build", work)
    code = main([str(tmp_path) if word == "RUN" else word for word in words])
    out, err = capsys.readouterr()
    assert code == exit_code and not out and err.startswith("error: ") and err.count("\n") == 1
    assert "writable" in err or "cannot be written" in err


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_folder("run.dir", tmp_path / "new" / "run")
    for path, rule in (
        (tmp_path / "file" / "run", rf"can't be made below {tmp_path}/file, which is a file\. "),
        (tmp_path / "file", r"is a file\. "),
        (tmp_path / ("long" * 99), r"is no path \(file name too long\)\. "),
    ):
        with pytest.raises(ConfigError, match=rf"^run\.dir=.*: {rule}Fix: choose a folder"):
            check_folder("run.dir", path)


# ---- without torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["presets", "show nam56r", "validate nam52_deep --world 8"])
def test_answers_without_torch(words: str) -> None:
    """Once the blocks of the model have been traced."""
    command = [sys.executable, "-m", "megacpp", *words.split()]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    code = (
        "import sys; from megacpp.cli.main import main; "
        f"code = main({words.split()!r}); "
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules); "
        "sys.exit(f'{heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
