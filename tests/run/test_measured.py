"""What is measured of the first step, on live tensors and on made-up figures of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megacpp.arguments import parse_run
from megacpp.memory.calibration import read_records
from megacpp.run.gate import Assessor, room_of
from megacpp.run.measured import Calibrator, held_bytes
from tests.run.test_gate import GIB, flat

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WEIGHTS = 4 * (300 * 200 + 300)


class Rig:
    """A model of one layer, its optimizer and a calibrator."""

    def __init__(self, folder: str, is_main: bool = True, factor: int = 1) -> None:
        config = parse_run(["tiny", f"--memory.calibration={folder}"], 1).config
        admission = Assessor(config, 1, CPU, flat(2, 2)).assess(config)
        self.model = nn.Linear(200, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.of_all = lambda values: values.mul_(factor)
        self.calibrator = Calibrator(
            admission, self.model, self.optimizer, CPU, self.of_all, is_main
        )

    def step(self, updated: bool = True) -> list[str]:
        self.model(torch.ones(2, 200)).sum().backward()
        if updated:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.calibrator.after_step(updated)


def test_the_first_step_that_updates_is_measured_once(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path))
    assert rig.step(updated=False) == [] and list(tmp_path.iterdir()) == []
    assert rig.step() == []
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    parts = {name: pair["measured"] for name, pair in content["components"].items()}
    assert parts["parameters"] == content["peaks"]["gradients"] == WEIGHTS
    assert parts["gradients"] is None, "the fullest moment is another one than the optimizer's"
    assert parts["optimizer_state"] == 2 * WEIGHTS + 2 * 4, "moments and two step counters"
    assert parts["activations"] is None and parts["runtime_reserved"] is None
    assert content["components"]["activations"]["predicted"] == 2 * GIB
    assert content["measured_bytes"] >= 3 * WEIGHTS and content["predicted_bytes"] == 2 * GIB
    path.unlink()
    assert rig.step() == [] and list(tmp_path.iterdir()) == [], "the first step alone"
    assert not rig.optimizer._optimizer_step_pre_hooks


def test_the_most_over_all_ranks_is_kept_by_the_first(tmp_path: Path) -> None:
    Rig(str(tmp_path / "other"), is_main=False).step()
    assert not (tmp_path / "other").exists()
    Rig(str(tmp_path / "main"), factor=3).step()
    ((record,), bad) = read_records(tmp_path / "main")
    assert record.components["parameters"]["measured"] == 3 * WEIGHTS and not bad


def test_without_a_folder_nothing_is_measured() -> None:
    rig = Rig("")
    assert rig.step() == [] and not rig.optimizer._optimizer_step_pre_hooks


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = Rig(str(tmp_path / "file")).step()
    assert line.startswith(f"memory.calibration={tmp_path / 'file'}: no record was written (")


def test_figures_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved at most 90, allocated 80; the device has 100 in use of which 60 are reserved now."""
    stats = {
        "allocated_bytes.all.peak": 80 * GIB,
        "reserved_bytes.all.peak": 90 * GIB,
        "reserved_bytes.all.current": 60 * GIB,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (41 * GIB, 141 * GIB))
    rig = Rig(str(tmp_path))
    rig.model(torch.ones(2, 200)).sum().backward()
    rig.optimizer.step()
    rig.calibrator.device = GPU
    found = rig.calibrator._measure()
    assert found["runtime_reserved"] == 40 * GIB and found["total"] == 130 * GIB
    assert found["allocator_overhead"] == 10 * GIB and found["peak_allocated"] == 80 * GIB
    assert found["tensors_of_a_step"] == 80 * GIB - 3 * WEIGHTS - 2 * 4


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
    room = room_of(parse_run(["tiny"], 2).config, GPU)
    assert room.device_bytes == 80 * GIB and str(room).startswith("80.0 GiB of NVIDIA H200")


def test_packed_moments_count_as_what_they_are_packed_into() -> None:
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    packed = torchao.OptimState8bit.zeros((256, 256), True, 256)
    assert held_bytes([packed]) == 256 * 256 + 4 * 256 + 4 * 256, "codes, scales, the map"
    assert held_bytes([torch.zeros(3, dtype=torch.bfloat16)]) == 6
    whole: Tensor = torch.zeros(4)
    assert held_bytes([whole, whole[:1]]) == 20
