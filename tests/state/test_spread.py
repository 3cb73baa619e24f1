"""Stages of a pipeline: whole exports from any mesh, and one error for all of its ranks."""

from __future__ import annotations

import errno
import json
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from megacpp.config.schema import MeshConfig
from megacpp.errors import CheckpointError
from megacpp.model.hybrid import HybridLM
from megacpp.state import export
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.export import export_weights, load_exported
from megacpp.state.published import latest_checkpoint
from megacpp.state.tensors import model_tensors
from parallel.build import build_model
from tests.ranks import LONG_S, run_ranks
from tests.state.gathered import gather_weights
from tests.state.meshes import config_of, fill, model_config, state_of, world_of
from tests.state.toy import differences, local

MESHES = {
    "fsdp2 tp2": MeshConfig(dp_shard=2, tp=2),
    "efsdp2 ep2": MeshConfig(dp_shard=4, ep=2),
    "pp2 tp2 ep2": MeshConfig(pp=2, dp_shard=1, tp=2, ep=2),
    "pp2 fsdp2 interleaved": MeshConfig(pp=2, dp_shard=2, pp_schedule="interleaved"),
    "pp2 fsdp2 zbv": MeshConfig(pp=2, dp_shard=2, pp_schedule="zbv"),
    "pp4": MeshConfig(pp=4, dp_shard=1),
}
TIED = {
    "tied fsdp2 tp2": MeshConfig(dp_shard=2, tp=2),
    "tied pp2 interleaved": MeshConfig(pp=2, dp_shard=2, pp_schedule="interleaved"),
}
PIPE = MeshConfig(pp=2, dp_shard=1)
ONE = MeshConfig(dp_shard=1)


def model_on(mesh: MeshConfig, world: int, tied: bool = False) -> HybridLM:
    config = config_of(mesh, model_config(tied=tied))
    model = build_model(config, world_of(mesh, world))
    fill(model_tensors(model), seed=3)
    return model


def export_twice(model: HybridLM, folder: Path) -> None:
    """In one file and in several."""
    export_weights(model, folder / "whole", model.config)
    export_weights(model, folder / "split", model.config, file_bytes=9000)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder per mesh and per model on one process, with the gathered weights."""
    folder = tmp_path_factory.mktemp("exports")
    for tied in (False, True):
        export_twice(model_on(ONE, 1, tied), folder / f"one {tied}")

    def body(rank: int, world: int) -> list[list[str] | None]:
        gathered = []
        for name, mesh in {**MESHES, **TIED}.items():
            model = model_on(mesh, world, name in TIED)
            export_twice(model, folder / name)
            weights = gather_weights(model)
            gathered.append(None if weights is None else list(weights))
        return gathered

    first, *others = run_ranks(body, 4, timeout_s=LONG_S)
    assert all(names is None for of_rank in others for names in of_rank)
    for name, names in zip([*MESHES, *TIED], first, strict=True):
        assert names == list(model_tensors(model_on(ONE, 1, name in TIED))), name
    return folder


@pytest.mark.parametrize("name", [*MESHES, *TIED])
def test_exports_are_those_of_one_process_byte_by_byte(exports: Path, name: str) -> None:
    for kind in ("whole", "split"):
        one = exports / f"one {name in TIED}" / kind
        files = sorted(p.name for p in one.iterdir())
        assert (len(files) > 6) == (kind == "split")
        assert sorted(p.name for p in (exports / name / kind).iterdir()) == files
        for file in set(files) - {"manifest.json"}:
            assert (exports / name / kind / file).read_bytes() == (one / file).read_bytes(), file
        mine, theirs = (
            json.loads((p / kind / "manifest.json").read_text())
            for p in (exports / name, one.parent)
        )
        assert mine["tensors"] == theirs["tensors"] and mine["files"] == theirs["files"]
        assert list(mine["tensors"]) == list(theirs["tensors"]) and mine["world_size"] == 4


def test_an_exported_pipeline_loads(exports: Path) -> None:
    back = load_exported(exports / "pp2 fsdp2 zbv" / "whole")
    wanted = {name: t.detach() for name, t in model_tensors(model_on(ONE, 1)).items()}
    assert not differences({n: t.detach() for n, t in model_tensors(back).items()}, wanted)
    assert load_file(exports / "pp4" / "whole" / "model.safetensors").keys() == wanted.keys()


def test_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    """On no rank is a gathered tensor still there when the next one is asked for."""

    def body(rank: int, world: int) -> int:
        model, gathered = model_on(MESHES["pp2 tp2 ep2"], world), []
        whole_on_main = export.whole_on_main

        def watched(t: Tensor | None, *args: Any) -> Tensor:
            assert all(reference() is None for reference in gathered)
            full = whole_on_main(t, *args)
            if full.numel() and full is not t:  # a plain tensor is whole where it is
                gathered.append(weakref.ref(full))
            return full

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "whole_on_main", watched)
            export_weights(model, tmp_path / "final", model.config)
        return len(gathered)

    held = run_ranks(body, 4)
    assert held[1:] == [0, 0, 0]
    # All but the router bias of the stage that rank 0 runs.
    assert held[0] == len(model_tensors(model_on(ONE, 1))) - 1


def test_exporting_is_quiet(tmp_path: Path) -> None:
    """DTensor warns of tensors that are cut twice; its level is left as it was."""

    def body(rank: int, world: int) -> tuple[int, int]:
        seen: list[logging.LogRecord] = []
        logger, handler = logging.getLogger("torch.distributed.tensor"), logging.Handler()
        handler.emit = lambda record: seen.append(record)
        logger.addHandler(handler)
        redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
        redistribute.setLevel(logging.WARNING)
        model = model_on(MESHES["fsdp2 tp2"], world)
        export_weights(model, tmp_path / "final", model.config)
        return len(seen), redistribute.level

    assert run_ranks(body, 4) == [(0, logging.WARNING)] * 4


# ---- errors of one rank -------------------------------------------------------------------------


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def one_line(lines: list[str]) -> str:
    """Return the message, the same on every rank."""
    assert len(set(lines)) == 1 and "\n" not in lines[0] and ". Fix: " in lines[0], lines
    return lines[0]


def state(world: int, seed: int) -> dict[str, Tensor]:
    mesh = PIPE if world == 2 else ONE
    tensors = state_of(config_of(mesh, model_config()), world_of(mesh, world))
    fill(tensors, seed)
    return tensors


def test_a_failed_export_of_a_pipeline(tmp_path: Path) -> None:
    """Rank 0 alone writes; what the other stage sent was in vain, and the old export stays."""
    export_twice(model_on(ONE, 1), tmp_path)
    old = (tmp_path / "whole" / "model.safetensors").read_bytes()

    def body(rank: int, world: int) -> str:
        model = model_on(PIPE, world)
        model.get_parameter(next(iter(dict(model.named_parameters())))).data.zero_()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(export, "save_file", full_disk)
            with pytest.raises(CheckpointError) as error:
                export_weights(model, tmp_path / "whole", model.config)
        return str(error.value)

    assert "cannot be exported: No space left on device" in one_line(run_ranks(body, 2))
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["split", "whole"]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_cannot_write(tmp_path: Path, stage: int) -> None:
    def body(rank: int, world: int) -> str:
        tensors = state(world, seed=1)
        save_checkpoint(tmp_path, 1, tensors, {}, keep=2)
        with pytest.MonkeyPatch.context() as patch:
            if rank == stage:
                patch.setattr(HuggingFaceStorageWriter, "write_data", full_disk)
            with pytest.raises(CheckpointError) as error:
                save_checkpoint(tmp_path, 2, tensors, {}, keep=2)
        return str(error.value)

    assert f"No space left on device on rank {stage}" in one_line(run_ranks(body, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    path = latest_checkpoint(tmp_path)
    assert path is not None and verify(path) == []


LAST = "model.head.weight"  # only the second stage has it


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["model.other.weight"] = tensors.pop(LAST)


def widened(tensors: dict[str, Tensor]) -> None:
    tensors[LAST] = torch.zeros(len(tensors[LAST]) + 1, 16)


def cast(tensors: dict[str, Tensor]) -> None:
    tensors[LAST] = tensors[LAST].double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "has no tensor model.other.weight (and 1 more)"),
        (lambda tensors: tensors.pop(LAST), f"has a tensor {LAST} that this run lacks"),
        (widened, f"tensor {LAST} is float32 [44, 16], this run needs float32 [45, 16]"),
        (cast, f"tensor {LAST} is float32 [44, 16], this run needs float64 [44, 16]"),
    ],
)
def test_what_one_stage_misses_stops_all(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    path = save_checkpoint(tmp_path, 1, state(1, seed=1), {}, keep=1)

    def body(rank: int, world: int) -> str:
        tensors = state(world, seed=2)
        if rank == 1:
            change(tensors)
        before = local(tensors)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path, tensors)
        assert not differences(local(tensors), before), "a tensor was touched"
        return str(error.value)

    assert message in one_line(run_ranks(body, 2))


def test_ranks_that_mean_different_tensors_by_one_name(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(AssertionError, match=r"x is float32 \[2\], but float32 \[3\] on rank"):
            save_checkpoint(tmp_path / "checkpoints", 1, {"x": torch.ones(2 + rank)}, {}, keep=1)

    run_ranks(body, 2)
    assert not (tmp_path / "checkpoints").exists()
