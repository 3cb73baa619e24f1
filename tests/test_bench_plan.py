"""The plan for the first minutes on a GPU, rehearsed on a CPU with faults in three cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.__main__ import STORED, main
from bench.gpu.carried import BUILT, CACHES, PARTS, WHEELS, pack, prepare, unpack
from bench.gpu.plan import DYING_S, FIRST, PACKING_S, PLANTED, SCALE
from bench.gpu.record import GpuRecord, read
from bench.gpu.tables import COLUMNS, HEADING, as_markdown, write_section
from tests.docs.test_benchmarks import unmarked

ROOT = Path(__file__).parents[1]
CELLS = [(call.name, cell.name) for call in FIRST for cell in call.cells]
ENDS = {"crash": "crashed: SIGABRT", "hang": "hung", "sticky": "lost the device"}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("plan")
    command = [sys.executable, "-m", "bench.gpu", "--plan", "first", "--rehearse"]
    command += ["--carried", str(out / "nothing")]
    folders = {"OUT": str(out), "TMPDIR": str(tmp_path_factory.mktemp("work"))}
    env = {**os.environ, **folders, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-2000:]
    return out, json.loads((out / "gpu.json").read_text())


def test_a_fault_costs_one_cell(rehearsal: tuple[Path, dict[str, Any]]) -> None:
    """All cells of all calls run in their order; three go wrong after a row, which stays."""
    out, found = rehearsal
    ran = [row for row in found["rows"] if row["section"] == "plan"]
    assert [(row["mode"], row["name"]) for row in ran] == CELLS
    ends = {row["name"]: row["end"] for row in ran}
    assert ends == {name: ENDS.get(PLANTED.get(name, ""), "done") for _, name in CELLS}
    hung = next(row for row in ran if row["end"] == "hung")
    assert SCALE * 20 <= hung["seconds"] <= SCALE * 20 + DYING_S
    for section, name in (("ceilings", "machine"), ("kernels", "experts"), ("levers", "R")):
        rows = [r for r in found["rows"] if (r["section"], r["name"]) == (section, name)]
        assert len(rows) == 1, (section, name)
    why = [r["why"] for r in found["skipped"] if (r["section"], r["name"]) == ("levers", "R")]
    assert ["illegal memory access" in why[0], *why[1:]] == [True] + 2 * [LOST]
    log = (out / "plan.log").read_text()
    assert "[100%]" in log and "in add" in log.partition("Timeout")[2], "where the cell hung"
    assert {p.name for p in out.iterdir()} == {"gpu.json", "machine.json", "plan.log", f"{PARTS}00"}


LOST = "the device was lost before"


def test_cells_measure_what_they_are_for(rehearsal: tuple[Path, dict[str, Any]]) -> None:
    rows = rehearsal[1]["rows"]
    assert {row["section"] for row in rows} == set(COLUMNS) - {"recompute"}
    modes = {(row["name"], row["mode"]) for row in rows if row["section"] == "models"}
    modes |= {(row["name"], row["mode"]) for row in rehearsal[1]["skipped"]}
    for name in ("dense_1b", "hybrid_13"):
        assert {(name, mode) for mode in ("inductor", "inductor, graph", "eager")} <= modes
    levers = {row["name"] for row in rows if row["section"] == "levers"}
    assert levers == {"loss", "attention", "muon", "R"}
    counts = [row for row in rows if row["section"] == "tests"]
    assert len(counts) == 2 and all(row["passed"] >= 3 and not row["failed"] for row in counts)
    for row in (row for row in rows if row["section"] == "predicted"):
        assert row["step_off"] == row["predicted_s"] / row["step_s"] - 1
    table = as_markdown(rehearsal[1])
    assert all(f"`{section}`" in table for section in COLUMNS) and "| B | profile | done |" in table


FORKS = os.getpid()  # of the process whose forks are the cells


def none_here() -> bool:
    """Return that there is no GPU; an error where a driver must not start."""
    assert os.getpid() != FORKS, "CUDA can't be used in a fork of a process that has asked for it"
    return False


def test_the_driver_is_asked_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.cuda.is_available` alone starts the driver: no cell would reach the GPU."""
    monkeypatch.setattr(sys.modules[__name__], "FORKS", os.getpid())
    monkeypatch.setattr(torch.cuda, "is_available", none_here)
    monkeypatch.setattr(torch.cuda, "device_count", none_here)
    monkeypatch.setattr("bench.gpu.__main__.run_plan", lambda *_: 7)
    assert main(["--plan", "first", "--rehearse", "--out", str(tmp_path)]) == 7
    assert main(["--plan", "first", "--device", "cuda"]) == 2


@pytest.mark.parametrize("call", FIRST, ids=lambda call: call.name)
def test_cells_fit_their_call(call: Any) -> None:
    """A command may take ten minutes; should every cell take all its time, all still run."""
    assert sum(cell.seconds for cell in call.cells) <= call.seconds - PACKING_S
    assert call.seconds <= 570


def test_results_go_on_from_an_earlier_call(tmp_path: Path) -> None:
    """Replace rows that are measured again, and put a file of another device aside."""
    path, cpu = tmp_path / "gpu.json", torch.device("cpu")
    first = GpuRecord(path, cpu, 60.0)
    for mode in ("eager", "graph"):
        first.attempt("models", "dense_1b", mode, lambda: [{"tflops": 1.0}])
    first.skip("models", "moe_1b", "eager", "for a reason")
    again = GpuRecord(path, cpu, 60.0)
    again.go_on()
    again.attempt("models", "dense_1b", "graph", lambda: [{"tflops": 2.0}])
    again.attempt("models", "moe_1b", "eager", lambda: [{"tflops": 3.0}])
    stored = json.loads(path.read_text())
    assert [row["tflops"] for row in stored["rows"]] == [1.0, 2.0, 3.0] and not stored["skipped"]
    path.write_text(json.dumps({**stored, "device": "NVIDIA H100"}))
    other = GpuRecord(path, cpu, 60.0)
    other.go_on()
    assert other.rows == [] and (tmp_path / "gpu-NVIDIA-H100.json").exists() and not path.exists()


def test_caches_and_results_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in (*CACHES, "PYTHONPATH", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "")
    folders = [tmp_path / name for name in ("carried", "out", "work", "later", "again")]
    carried, out, work, later, again = folders
    for folder in (out, later):
        folder.mkdir()
    unpack(carried, out, work)
    assert os.environ["TRITON_CACHE_DIR"] == str(work / "triton")
    code = os.urandom(3000)  # doesn't get smaller
    (work / "triton/key").mkdir()
    (work / "triton/key/kernel.cubin").write_bytes(code)
    (out / "gpu.json").write_text("{}")
    assert pack(work, out, part_bytes=1000).endswith("4 files")
    unpack(out, later, again)
    assert (again / "triton/key/kernel.cubin").read_bytes() == code
    assert (later / "gpu.json").read_text() == "{}"
    assert "too large" in pack(work, out, part_bytes=500) and not list(out.glob(f"{PARTS}*"))


def test_wheels_are_fetched_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], check: bool, env: dict[str, str] | None = None) -> None:
        calls.append(command)
        assert check and (env is None or env["MAMBA_SKIP_CUDA_BUILD"] == "TRUE")

    assert prepare(tmp_path, run) == [] and [c[-1] for c in calls] == [*WHEELS, *BUILT]
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in (*CACHES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    import zipfile

    with zipfile.ZipFile(tmp_path / "wheels/made_up-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_up_package.py", "ANSWER = 42\n")
    unpack(tmp_path, tmp_path, tmp_path / "work")
    import made_up_package  # type: ignore[import-not-found]

    assert made_up_package.ANSWER == 42 and sys.path[-1] == os.environ["PYTHONPATH"]


def test_unknown_cells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    start = ["--plan", "first", "--rehearse"]
    assert main([*start, "--call", "D"]) == 2
    assert capsys.readouterr().err == "error: call=D: not of the plan. Fix: of A, B, C.\n"
    assert main([*start, "--call", "B", "--cells", "muon"]) == 2
    assert "error: cells=muon: not of the plan. Fix: of dense_1b" in capsys.readouterr().err


def test_tables_say_when_they_were_run() -> None:
    header = dict.fromkeys(("device", "capability", "driver", "torch", "triton"), "x")
    rows = [{"section": "models", "name": "dense_1b", "mode": "eager", "tflops": 1.0}]
    found = {**header, "commit": "7daa70a93", "date": "2026-11-25T21:00:00", "skipped": []}
    table = as_markdown({**found, "rows": rows})
    assert unmarked(table) == [] and table.count("Run 2026-11-25, 7daa70a:") == 2


def test_the_page_shows_what_is_stored(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    text = STORED.with_name("benchmarks.md").read_text()
    page.write_text(text)
    write_section(page, HEADING, as_markdown(read(STORED)))
    assert page.read_text() == text, "python -m bench.gpu --table --write"
