"""Launch gate: a machine's memory, rejections, calibration records; then real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.presets import preset
from megacpp.config.schema import Config
from megacpp.errors import ConfigError
from megacpp.launch.gate import Estimator, memory_budget, set_allocator
from megacpp.launch.record import all_versions
from megacpp.memory.budget import host_available_bytes, resident_bytes, words
from megacpp.memory.calibration import OF_A_STEP, Record, write_record
from megacpp.memory.estimate import MemoryEstimate
from megacpp.report.data import gather
from megacpp.state.manifest import read_manifest
from tests.launch import Done, forked
from tests.test_run import SMALL, records

GIB = 1 << 30
CPU = torch.device("cpu")


def machine(root: Path, available_kib: int, groups: str, **files: str) -> Path:
    """Write an imitation of /proc and /sys."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_a_machine_has_left(tmp_path: Path) -> None:
    free = machine(tmp_path / "free", 1000, "0::/\n")
    assert host_available_bytes(free) == 1000 * 1024
    assert host_available_bytes(tmp_path / "nothing") is None
    here = host_available_bytes()
    assert here is not None and here > 1 << 20 and resident_bytes() > 1 << 20


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(tmp_path: Path, version: int) -> None:
    """Use the tightest limit of a group and its parents; cached files count as free."""
    names = {
        1: ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("", "memory.max", "memory.current", "inactive_file"),
    }
    base, limit, usage, cached = names[version]
    lines = {1: "5:cpu:/a/b\n4:memory:/a/b\n", 2: "0::/a/b\n"}[version]
    files = {
        f"{base}a/b/{limit}": "max\n" if version == 2 else "9223372036854771712\n",
        f"{base}a/b/{usage}": "300000\n",
        f"{base}a/{limit}": "500000\n",
        f"{base}a/{usage}": "400000\n",
        f"{base}a/memory.stat": f"{cached} 50000\nother 1\n",
        f"{base}{limit}": "900000\n",
    }
    root = machine(tmp_path, 1000, lines, **files)
    assert host_available_bytes(root) == 500000 - 400000 + 50000
    (root / "sys/fs/cgroup" / base / "a" / usage).write_text("600000\n")
    assert host_available_bytes(root) == 0, "over its limit: nothing is left"


def config_of(*flags: str) -> Config:
    return parse_run(["tiny", "--memory.calibration=", *flags], 2).config


def test_the_room_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given = memory_budget(config_of("--memory.device-gib", "10", "--memory.headroom", "0.2"), CPU)
    assert given.device_bytes == 10 * GIB and given.budget_bytes == 8 * GIB
    monkeypatch.setattr("megacpp.launch.gate.host_available_bytes", lambda: 8 * GIB)
    assert memory_budget(config_of(), CPU).device_bytes == 8 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_budget(config_of(), CPU).device_bytes == 2 * GIB
    monkeypatch.setattr("megacpp.launch.gate.host_available_bytes", lambda: None)
    unknown = memory_budget(config_of(), CPU)
    assert unknown.device_bytes is None and unknown.budget_bytes is None


def flat(point: float, upper: float) -> Callable[..., MemoryEstimate]:
    """Return an estimator with one result for every configuration, in GiB."""

    def estimate(config: Config, size: int, rank: int, budget: int | None) -> MemoryEstimate:
        sizes = int(point * GIB), int(upper * GIB)
        return MemoryEstimate({"activations": sizes[0]}, {}, "", {}, 0, *sizes, budget, ())

    return estimate


def estimator_of(point: float, upper: float) -> Estimator:
    return Estimator(config_of("--memory.device-gib", "10"), 2, CPU, flat(point, upper))


@pytest.mark.parametrize(
    ("point", "upper", "verdict"),
    [(9, 9, "fits"), (8, 9.5, "at_risk"), (9.01, 9.5, "does_not_fit")],
)
def test_ten_percent_stay_free(point: float, upper: float, verdict: str) -> None:
    of = estimator_of(point, upper)
    found = of.admission(config_of())
    assert found.estimate.verdict == verdict
    if verdict != "does_not_fit":
        of.check(found)
        return
    with pytest.raises(ConfigError, match=r"memory.gate=on: rank 0 of 2 needs 9.01 GiB") as caught:
        of.check(found)
    assert "9.00 GiB may be used (10.0 GiB given, 10% headroom). Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_gate_can_be_off_and_says_so() -> None:
    of = estimator_of(9.5, 9.5)
    found = of.admission(config_of("--memory.gate", "off"))
    of.check(found)
    assert any("DOES NOT FIT; memory.gate=off" in line for line in found.lines())
    assert found.as_dict()["gate"] == "off"
    assert found.as_dict()["estimate"]["verdict"] == "does_not_fit"


def test_the_host_copy_of_a_save_is_told(corpus: Path, tmp_path: Path) -> None:
    """Compare the bytes told with those of a checkpoint's tensors: one rank holds all of them."""
    saved = tmp_path / "run/checkpoints"
    flags = ["--data.path", str(corpus), "--run.dir", str(tmp_path / "run"), "--run.steps", "1"]
    done = forked("tiny", *SMALL, *flags, "--checkpoint.async")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "checkpoint.async:" in line)
    manifest = read_manifest(saved / "step-000001", "checkpoint")
    size = words(sum(t.num_bytes for t in manifest.tensors.values()))
    assert f"checkpoint.async: {size} more on the host of each rank" in line, (line, size)
    assert Estimator(config_of(), 2, CPU, flat(1, 1)).admission(config_of())._copy_line() == []


def test_one_rank_of_a_machine_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    of = estimator_of(9.5, 9.5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    of.check(of.admission(config_of()))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError):
        of.check(of.admission(config_of()))


@pytest.mark.parametrize(
    ("measured", "verdict"), [(8.8, "fits"), (8.39, "fits"), (9.1, "does_not_fit"), (4, "fits")]
)
def test_what_was_measured_widens_the_margin(tmp_path: Path, measured: float, verdict: str) -> None:
    """8 GiB of 10 fit with 10 % headroom; if 9.1 were measured before, they don't."""
    of = estimator_of(8, 8)
    asked = config_of(f"--memory.calibration={tmp_path}")
    where = of.admission(asked).situation
    known = Record(where.key, where.family, where.rows, 8 * GIB, int(measured * GIB), {})
    write_record(tmp_path, known, where)
    found = of.admission(asked)
    assert found.estimate.verdict == verdict
    extra = 0 if abs(measured / 8 - 1) <= 0.05 else max(0, int(measured * GIB) - 8 * GIB)
    assert found.margin.extra_bytes == extra
    assert found.estimate.budget == 9 * GIB - extra
    if verdict == "does_not_fit":
        with pytest.raises(ConfigError, match=r"1\.10 GiB for what was misjudged"):
            of.check(found)


@pytest.mark.parametrize(
    "name",
    [
        *("megacpp", "torch", "triton", "torchao", "tilelang", "mamba-ssm"),
        *("transformer-engine", "cuda driver", "nccl"),
    ],
)
def test_another_version_makes_another_launch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Kernels, the driver and NCCL allocate memory of their own, so each version is measured."""
    known = all_versions()
    assert name in known
    found = []
    for version in ("1.0", "1.1"):
        versions = known | {name: version}
        monkeypatch.setattr("megacpp.launch.gate.all_versions", lambda v=versions: v)
        found.append(estimator_of(8, 8).admission(config_of()).situation)
    assert found[0].family != found[1].family and found[0].key != found[1].key


def test_validate_shows_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["nam56r_base", "--world", "8", "--memory.device-gib"]
    assert main(["validate", *flags, "1000000"]) == 0
    assert "may be used: fits" in " ".join(capsys.readouterr().out.split())
    assert main(["validate", *flags, "1", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["errors"][0].startswith("memory.gate=on: rank 0 of 8 needs ")
    assert said["memory"]["estimate"]["verdict"] == "does_not_fit"
    assert main(["validate", *flags, "1", "--memory.gate", "off"]) == 0
    assert "does not fit (memory.gate=off)" in capsys.readouterr().out


# ---- real runs -----------------------------------------------------------------------------------


def run(corpus: Path, folder: Path, *flags: str, ranks: int = 1) -> Done:
    paths = ["--data.path", str(corpus), "--run.dir", str(folder / "run")]
    kept = [f"--memory.calibration={folder / 'calibration'}", "--train.device-batch-size", "1"]
    few = ["--run.steps", "2", "--run.eval-rows", "2", "--run.sample-tokens", "0"]
    return forked("tiny", *SMALL, *few, *paths, *kept, *flags, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_does_not_fit_leaves_nothing(corpus: Path, tmp_path: Path, ranks: int) -> None:
    done = run(corpus, tmp_path, "--memory.device-gib", "0.0001", ranks=ranks)
    assert done.returncode == 2, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and ours[0].startswith(f"error: memory.gate=on: rank 0 of {ranks} needs ")
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_runs_are_measured_and_the_next_one_knows(corpus: Path, tmp_path: Path) -> None:
    """Two ranks, gate off on a device that is much too small; then the same again."""
    flags = ["--memory.device-gib", "0.0001", "--memory.gate", "off"]
    done = run(corpus, tmp_path, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())  # lines are wrapped
    assert "DOES NOT FIT; memory.gate=off" in said
    assert "no launch of this kind is on record" in said
    launch = json.loads((tmp_path / "run/launch.json").read_text())
    memory = launch["memory"]
    assert memory["gate"] == "off" and memory["estimate"]["verdict"] == "does_not_fit"
    assert memory["budget"] == int(int(0.0001 * GIB) * 0.9)
    assert len(launch["config_hash"]) == 64 and launch["policy"] == launch["config"]["recompute"]
    assert launch["plan"] is None and launch["attempts"] == []

    (path,) = (tmp_path / "calibration").iterdir()
    assert path.stem == memory["calibration"]["key"]
    kept = json.loads(path.read_text())
    weights = launch["parameters"]["total"] * 4
    measured = {name: pair["measured"] for name, pair in kept["components"].items()}
    shard = measured["parameters"]  # the larger of two: half, and what doesn't divide evenly
    assert weights / 2 <= shard < weights * 0.52
    assert 0 < measured["optimizer_state"] <= 2 * shard + 8 * 100
    assert measured["activations"] > 0 and measured["communication"] > 0
    assert measured["runtime_reserved"] is None, "not measured is not nothing"
    assert kept["measured_bytes"] > shard + measured["optimizer_state"]
    assert kept["measures"] == "tensors" and kept["ranks"] == 2
    # Buffers of a collective live until a thread of gloo lets them go: up to two gathered layers.
    gathered = measured["communication"]
    assert -0.03 * kept["predicted_bytes"] < kept["measured_bytes"] - kept["predicted_bytes"]
    assert (
        kept["measured_bytes"] - kept["predicted_bytes"] < 0.03 * kept["predicted_bytes"] + gathered
    )

    shown = gather(tmp_path / "run")["memory"]
    known = {name: size for name, size in measured.items() if size is not None}
    assert shown["measured"].items() == known.items() - {(OF_A_STEP, known[OF_A_STEP])}
    assert shown["calibration"]["measured_bytes"] == kept["measured_bytes"]

    again = run(corpus, tmp_path, *flags, "--checkpoint.resume", "never", ranks=2)
    assert again.returncode == 0, again.stderr
    residual = kept["residual"]
    memory = json.loads((tmp_path / "run/launch.json").read_text())["memory"]
    assert memory["calibration"]["source"] == "record"
    extra = memory["calibration"]["extra_bytes"]
    assert extra == (0 if residual <= 0.05 else kept["measured_bytes"] - kept["predicted_bytes"])
    assert "calibration: this launch took " in again.stdout
    assert len(records(tmp_path / "run")) == 2


def test_one_process_takes_what_was_estimated(corpus: Path, tmp_path: Path) -> None:
    """Tensors are those of the closed forms, to 3 %: no gloo thread holds any.

    Eight rows: the closed forms route tokens evenly, and few tokens don't.
    """
    done = run(corpus, tmp_path, "--train.device-batch-size", "8")
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "run/memory/measured.json").read_text())
    assert abs(kept["measured_bytes"] / kept["predicted_bytes"] - 1) <= 0.03
    measured = [pair["measured"] or 0 for pair in kept["components"].values()]
    assert sum(measured) - kept["components"][OF_A_STEP]["measured"] == (kept["measured_bytes"])


def test_bytes_in_words() -> None:
    assert words(12.34 * GIB) == "12.3 GiB" and words(1.234 * GIB) == "1.23 GiB"
    assert words(5 * 2**20) == "5.0 MiB" and words(-0.5 * GIB) == "-0.50 GiB"


def test_segments_of_a_rank_s_own_gpu_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared next: a library's would run on the first GPU of the node."""
    said: list[Any] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    config, own = preset("tiny"), torch.device("cuda", 3)
    fixed = replace(config, memory=replace(config.memory, expandable_segments=False))
    for device in (torch.device("cpu"), own):
        for each in (config, fixed):
            set_allocator(each, device)
    assert said == [own, "expandable_segments:True", own, "expandable_segments:False"]
