"""Predicted steps as timelines, and beside profiles and records of runs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.cli.speed import work_of
from megacpp.config.arguments import parse_run
from megacpp.home import HOME
from megacpp.run.predicted import TEN, Prediction, check_mfu, foresee, machine_of, verdict
from megacpp.speed.against import compare, measured_steps, profiled
from megacpp.speed.hardware import Rates, gpu, known
from megacpp.speed.step import StepTime, predict
from megacpp.speed.timeline import chrome, svg, timeline

TIME = StepTime(0.010, {"products": 0.006, "exposed data": 0.003, "bubble": 0.001}, {}, 1e5, 0.4)


def event(name: str, ts: float, dur: float, cat: str = "kernel", tid: int = 1) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--mesh.pp", "2", "--train.device-batch-size", "2"),
        ("--mesh.pp", "4", "--train.device-batch-size", "2"),
        ("--mesh.pp", "4", "--mesh.tp", "2", "--train.device-batch-size", "2"),
    ],
)
def test_a_timeline_is_the_simulated_step(words: tuple[str, ...]) -> None:
    config = parse_run(["dense_110m", *words, "--train.device", "cuda"], 8).config
    machine = gpu("H100")
    work = work_of(config, 8, machine)
    spans = timeline(work, machine, Rates())
    for stream in ("compute", "link"):
        own = [s for s in spans if s.stream == stream]
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(own))
    end = max(s.start + s.seconds for s in spans)
    found = predict(work, machine, Rates())
    assert end == pytest.approx(found.step_s, rel=1e-4)
    named = {span.name for span in spans if span.name.endswith(" data")}
    assert named == {n for n in found.parts if n.endswith(" data") and (words or n[:2] != "ex")}
    assert ("exposed data" in named) is (bool(words) and "--mesh.tp" not in words)
    events = json.loads(chrome(spans))["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(spans)
    assert svg(spans).count("<title>") == len(spans)


def test_a_profile_is_sorted_into_parts() -> None:
    found = profiled(
        [
            event("step 11", 0, 1000, "user_annotation"),
            event("sm90_gemm_bf16", 0, 300),
            event("flash_fwd", 300, 200),
            event("ncclAllGather", 400, 300),  # 200 us of it beside nothing
            event("vectorized_add", 800, 100),
        ]
    )
    wanted = {"products": 300, "attention": 200, "communication": 200, "memory-bound": 100}
    assert found == pytest.approx({k: v * 1e-6 for k, v in (wanted | {"idle": 200}).items()})


def test_operators_count_without_what_they_call() -> None:
    found = profiled(
        [
            event("step 2", 0, 100, "user_annotation"),
            event("aten::matmul", 10, 60, "cpu_op"),
            event("aten::mm", 20, 40, "cpu_op"),
            event("aten::add", 80, 10, "cpu_op", 2),
        ]
    )
    assert found["products"] == pytest.approx(60e-6)
    assert found["memory-bound"] == pytest.approx(10e-6)
    assert found["idle"] == pytest.approx(30e-6)


def test_a_run_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": n, "step_s": 0.02}) for n in range(5))
    )
    assert compare(TIME, tmp_path).step_ms == pytest.approx((10.0, 20.0))
    events = [event("step 11", 0, 20000, "user_annotation"), event("gemm", 0, 15000)]
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/steps-11-11-rank-0.json.gz").write_bytes(
        gzip.compress(json.dumps({"traceEvents": events}).encode())
    )
    largest = compare(TIME, tmp_path).largest
    assert largest[0] == ("products", pytest.approx(6.0), pytest.approx(15.0))
    assert [name for name, *_ in largest] == ["products", "idle", "communication"]
    assert main(["speed", "dense_110m", "--against", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out and "warning" not in out
    (tmp_path / "launch.json").write_text(json.dumps({"device": "cpu", "world_size": 2}))
    assert main(["speed", "dense_110m", "--against", str(tmp_path)]) == 0
    assert "warning: measured on 2 x cpu, predicted for 1 x" in capsys.readouterr().out
    assert main(["speed", "dense_110m", "--against", str(tmp_path / "none")]) == 2
    assert main(["speed", "dense_110m", "--timeline", str(tmp_path / "a.png")]) == 2


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


STEP = json.dumps({"step": 1, "step_s": 0.02})


def test_a_half_written_last_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        f'{STEP}\n{STEP}\n{{"step": 3, "x": "\u00e9'.encode()[:-1]
    )
    assert measured_steps(tmp_path) == [0.02, 0.02]
    assert main(["speed", "dense_110m", "--against", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "metrics.jsonl",
            f"{STEP[:-3]}\n{STEP}\n".encode(),
            "line 1 of metrics.jsonl can't be read",
        ),
        ("metrics.jsonl", f"{STEP}\n[1]\n".encode(), "line 2 of metrics.jsonl"),
        ("metrics.jsonl", b'{"step_s": "abc"}\n', "line 1 of metrics.jsonl"),
        ("metrics.jsonl", b'{"step_s": -1.0}\n', "line 1 of metrics.jsonl"),
        ("metrics.jsonl", b'{"step_s": NaN}\n', "line 1 of metrics.jsonl"),
        ("profile/a-rank-0.json.gz", b"no gzip", "its profile a-rank-0.json.gz can't be read"),
        ("profile/a-rank-0.json.gz", packed(b"{}" * 99)[:-20], "its profile"),
        ("profile/a-rank-0.json.gz", packed(b"[1]"), "its profile"),
        ("profile/a-rank-0.json.gz", packed(b'{"traceEvents": []}'), "no step is in it"),
        ("profile/a-rank-0.json.gz", packed(b'{"traceEvents": [1]}'), "its profile"),
        (
            "profile/a-rank-0.json.gz",
            packed(b'{"traceEvents": [{"ph": "X", "dur": 1, "cat": "kernel"}]}'),
            "its profile",
        ),
    ],
)
def test_a_damaged_run_is_one_line(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / name).write_bytes(content)
    assert main(["speed", "dense_110m", "--against", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: against=") and words in line and "Fix: " in line


def test_a_step_that_cannot_run_is_said_not_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU of 40 GiB, and one of 141 GiB that has enough."""
    flags = ["--model.depth", "4", "--train.grad-accum", "1", "--train.tokens-per-step", "0"]
    words = ["speed", "dense_110m", *flags, "--train.device-batch-size", "640"]
    for name, wanted in (("A100-40GB", "does_not_fit"), ("H200", "fits")):
        assert main([*words, "--gpu", name, "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        assert memory["verdict"] == wanted
        assert main([*words, "--gpu", name]) == 0
        text = " ".join(capsys.readouterr().out.split())
        needed = f"memory: doesn't fit: it needs {memory['point'] / 2**30:.1f} GiB of 40 GiB"
        assert (needed in text) is (wanted == "does_not_fit")


def test_ten_steps_say_what_is_off() -> None:
    ahead = Prediction(gpu("H100"), TIME).as_dict()
    assert verdict(ahead, [0.5, 0.010] + [0.0101] * (TEN - 2)).endswith("within the range")
    assert "products is the largest" in verdict(ahead, [0.02] * TEN)
    assert "steps vary, the slowest takes 90.0 ms" in verdict(ahead, [0.02] * (TEN - 1) + [0.09])


def test_a_layout_that_cannot_be_fast_is_refused() -> None:
    words = ["dense_110m", "--train.device", "cuda", "--speed.min-mfu", "0.5"]
    config = parse_run(words, 1).config
    found = Prediction(gpu("H100"), TIME)
    (line,) = check_mfu(config, found)
    assert "predicted MFU is 40.0%" in line and "exposed data takes 30%" in line
    assert "isn't known" in check_mfu(config, None)[0]
    config = parse_run([*words, "--speed.gate", "refuse"], 1).config
    with pytest.raises(Exception, match=r"speed\.min_mfu=0\.5: predicted MFU is 40\.0%"):
        check_mfu(config, found)
    fast = Prediction(gpu("H100"), StepTime(0.01, TIME.parts, {}, 1e5, 0.49))
    assert check_mfu(config, fast) == []  # within the range


def test_devices_are_known_by_their_drivers_names(tmp_path: Path) -> None:
    for name, wanted in {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA B200": "B200",
    }.items():  # fmt: skip
        found = known(name)
        assert found is not None and found.name == wanted
    assert known("NVIDIA GeForce RTX 4090") is None
    from bench.gpu.__main__ import main as bench

    words = ["--calibrate", "--tiny", "--device", "cpu"]
    assert bench([*words, "--out", str(tmp_path / "m.json")]) == 0
    machine = gpu(str(tmp_path / "m.json"))
    assert machine.on_host and machine.bf16_tflops > 0 and machine.figures["sms"].value == 1
    config = parse_run(["tiny", "--train.device", "cpu"], 1).config
    found = predict(work_of(config, 1, machine), machine, Rates())
    assert found.parts["host"] > 0 and 0 < found.mfu < 1


def test_processes_of_a_cpu_have_a_file_for_each_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that measure at once measure their exchange as well; a run of three isn't foreseen."""
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "bench.gpu", "--calibrate", "--tiny"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HOME, check=True)
    assert done.stdout.count("written to") == 1
    for ranks in (1, 2, 3):
        machine = machine_of("cpu", "", ranks)
        assert (machine is not None) is (ranks == 2)
        assert machine is None or (machine.node_latency_us > 0 and machine.nvlink_gbs != 2.0)


def test_what_is_foreseen() -> None:
    """Every known schedule on a known machine, and nothing of a machine that isn't known."""
    flags = ["dense_110m", "--train.device", "cuda", "--train.device-batch-size", "2"]
    for words, known_time in (
        ([], True),
        (["--mesh.pp", "2"], True),
        (["--mesh.pp", "2", "--mesh.pp-schedule", "dualpipe"], False),
    ):
        config = parse_run([*flags, *words], 8).config
        assert (foresee(config, 8, "cuda", "NVIDIA H100 80GB HBM3") is not None) is known_time
    assert foresee(parse_run(flags, 8).config, 8, "cuda", "another device") is None
