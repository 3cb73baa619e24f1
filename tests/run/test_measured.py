"""Measurement of the first step: live tensors on a CPU, invented figures of a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from checkpointing.tracing.watch import StepWatch
from megacpp.config.arguments import parse_run
from megacpp.config.batch_schedule import BatchSchedule
from megacpp.launch.gate import Estimator, memory_budget
from megacpp.memory.calibration import read_records
from megacpp.run.forensics import Forensics
from megacpp.run.measured import Calibrator
from megacpp.run.records import Records
from tests.run.test_gate import GIB, flat

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WEIGHTS = 4 * (300 * 200 + 300)
STATE = 2 * WEIGHTS + 2 * 4  # moments and two step counters


class Rig:
    """Model of one layer with its optimizer, a recorder of steps, and a calibrator."""

    def __init__(self, folder: Path, to: str | None = None, rank: int = 0, factor: int = 1) -> None:
        to = str(folder / "calibration") if to is None else to
        self.config = parse_run(["tiny", f"--memory.calibration={to}"], 1).config
        admission = Estimator(self.config, 1, CPU, flat(2, 2)).admission(self.config)
        self.model = nn.Linear(200, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.model(torch.ones(1, 200)).sum().backward()
        self.optimizer.step()  # ours has its state from the start
        self.optimizer.zero_grad()
        self.folder, self.to = folder, Path(to)
        self.steps, self.followed = 0, 0
        self.forensics = Forensics(folder, self.config, rank, CPU, self.watch)
        self.calibrator = Calibrator(
            admission, CPU, lambda values: values.mul_(factor), rank, folder
        )

    def watch(self) -> StepWatch:
        return StepWatch(self.model, self.optimizer)

    def step(self, updated: bool = True, full: bool = True) -> list[str]:
        self.forensics.begin(self.steps, asked=self.calibrator.waiting)
        self.followed += self.forensics._running is not None
        self.model(torch.ones(2, 200)).sum().backward()
        if updated:
            self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.forensics.end(self.steps) == []
        self.steps += 1
        return self.calibrator.after_step(updated, full, self.forensics.seen)

    def stored(self) -> dict[str, Any]:
        (path,) = self.to.iterdir()
        content = json.loads(path.read_text())
        own = json.loads((self.folder / "memory/measured.json").read_text())
        assert own.items() <= content.items(), "the run keeps what the next launch learns from"
        return content


def test_the_first_step_that_updates_is_measured_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.step(updated=False) == [] and list(tmp_path.iterdir()) == []
    assert rig.step() == []
    content = rig.stored()
    parts = {name: pair["measured"] for name, pair in content["components"].items()}
    assert parts["parameters"] == parts["gradients"] == WEIGHTS
    assert parts["optimizer_state"] == STATE
    assert parts["activations"] == 0, "followed: nothing of it was there"
    assert parts["runtime_reserved"] is None, "not measured is not nothing"
    resting = WEIGHTS + STATE
    assert parts["tensors_of_a_step"] == content["measured_bytes"] - resting >= WEIGHTS
    assert content["measured_bytes"] < 6 * WEIGHTS, "tensors, not the process"
    assert content["peaks"]["process"] > 100 * content["measured_bytes"]
    assert content["components"]["activations"]["predicted"] == 2 * GIB
    assert content["predicted_bytes"] == 2 * GIB and content["measures"] == "tensors"
    assert content["step"] == 2 and rig.followed == 2
    assert rig.step() == [] and rig.followed == 2, "the first step alone"
    assert [p.name for p in (tmp_path / "memory").iterdir()] == ["measured.json"], "no snapshot"


def test_a_step_of_a_batch_warmup_is_not_stored(tmp_path: Path) -> None:
    """The estimate is of all microbatches; the calibrator waits for the first full step."""
    rig = Rig(tmp_path)
    for _ in range(2):
        assert rig.step(full=False) == [] and rig.calibrator.waiting
    assert list(tmp_path.iterdir()) == []
    assert rig.step() == [] and rig.stored()["step"] == 3 and not rig.calibrator.waiting


def test_only_full_steps_are_traced_for_the_calibrator() -> None:
    """Three warmup steps of 1, 2 and 3 microbatches cost no tracing; steps of all four do."""
    told: list[bool] = []
    records: Any = object.__new__(Records)
    records.clock = SimpleNamespace(step=lambda step: None)
    records.profile = SimpleNamespace(begin=lambda step: None)
    records.forensics = SimpleNamespace(begin=lambda step, asked: told.append(asked))
    records.calibrator = SimpleNamespace(waiting=True)
    records.launch = SimpleNamespace(batches=BatchSchedule(1, grad_accum=4, warmup_steps=3))
    for step in range(5):
        records.begin(step)
    assert told == [False, False, False, True, True]


def test_the_peak_by_component_is_that_of_the_step(tmp_path: Path) -> None:
    """Two matrices of 1 MiB, alive together while a third is made of them."""

    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = (torch.full((512, 512), float(n)) for n in (1, 2))
            return super().forward(x) + (a + b).mean()

    rig = Rig(tmp_path)
    rig.model.__class__ = Wide
    rig.step()
    parts = {name: pair["measured"] for name, pair in rig.stored()["components"].items()}
    in_forward = WEIGHTS + STATE + 3 * 2**20
    assert in_forward <= rig.stored()["measured_bytes"] < in_forward + 10_000
    assert (
        sum(v or 0 for n, v in parts.items() if n != "tensors_of_a_step")
        == (rig.stored()["measured_bytes"])
    )


def test_the_largest_rank_and_the_parts_of_the_estimated_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "one", rank=1)
    rig.step()
    assert not (tmp_path / "one").exists(), "the first rank writes"
    own = rig.calibrator._of_rank(rig.forensics._snapshot(1, None))
    assert own["parameters"] == WEIGHTS
    assert rig.calibrator._over_ranks(own)["parameters"] == 0, "rank 0 was estimated"
    Rig(tmp_path / "main", factor=3).step()
    ((record,), bad) = read_records(tmp_path / "main/calibration")
    assert record.components["parameters"]["measured"] == 3 * WEIGHTS and not bad


def test_what_waits_on_the_host_is_not_of_the_device() -> None:
    """Use a model on another device (`meta` instead of a GPU), and a tensor on the host."""
    model = nn.Linear(200, 300, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with (watch := StepWatch(model, optimizer)):
        waits = torch.full((1 << 20,), 1.0)
        made = torch.ones(64, 200, device="meta") * 2
    assert len(waits) == 1 << 20 and made.numel() == 64 * 200
    assert watch.stream().peak()[1] == WEIGHTS + 2 * 64 * 200 * 4


def test_without_a_folder_nothing_is_followed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, to="")
    assert rig.step() == [] and not rig.followed and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--train.compile=inductor"], ["--kernels.attention=flex"]])
def test_what_cannot_be_followed_is_not_called_nothing(tmp_path: Path, flags: list[str]) -> None:
    rig = Rig(tmp_path)
    config = parse_run(["tiny", *flags], 1).config
    rig.forensics = Forensics(tmp_path, config, 0, CPU, rig.watch)
    assert rig.step() == [] and not rig.followed
    found = rig.forensics.seen
    assert found is not None
    own = rig.calibrator._of_rank(found)
    assert own["parameters"] == WEIGHTS and own["activations"] is None and own["total"] is None
    assert not rig.calibrator.waiting and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "calibration").write_text("")
    (line,) = Rig(tmp_path).step()
    assert line.startswith(
        f"memory.calibration={tmp_path / 'calibration'}: no record was written ("
    )


def test_figures_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved at most 90, allocated 80; the device has 100 in use of which 60 are reserved now."""
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda _: {"reserved_bytes.all.current": 60 * GIB}
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (41 * GIB, 141 * GIB))
    rig = Rig(tmp_path)
    rig.step()
    assert rig.forensics.seen is not None
    rig.calibrator.device = GPU
    seen = replace(rig.forensics.seen, allocated_bytes=80 * GIB, reserved_bytes=90 * GIB)
    found = rig.calibrator._of_rank(seen)
    assert found["runtime_reserved"] == 40 * GIB and found["total"] == 130 * GIB
    assert found["allocator_overhead"] == 10 * GIB and found["peak_allocated"] == 80 * GIB
    assert (
        found["activations"] == 0
        and found["tensors_of_a_step"] == seen.peak_bytes - 3 * (WEIGHTS) - 2 * 4
    )
    blind = rig.calibrator._of_rank(replace(seen, followed=False))
    assert (
        blind["activations"] is None
        and blind["tensors_of_a_step"] == 80 * GIB - 3 * (WEIGHTS) - 2 * 4
    )


def test_the_smallest_gpu_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [141, 80, 24]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(total_memory=sizes[i] * GIB),
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    room = memory_budget(parse_run(["tiny"], 2).config, GPU)
    assert room.device_bytes == 80 * GIB and str(room).startswith("80.0 GiB of NVIDIA H200")
