"""Exported weights stand alone: same values, every tensor once, damage and mismatch refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megacpp.blocks.attention.config import AttentionConfig, YarnConfig
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.errors import CheckpointError
from megacpp.model.fp32 import contract_parameters
from megacpp.state import export
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import (
    export_weights,
    load_exported,
    load_trained,
    read_model_config,
)
from megacpp.state.manifest import Manifest, write_manifest
from megacpp.state.published import overtaken
from megacpp.state.tensors import is_persistent, model_tensors
from tests.ranks import run_ranks
from tests.state.gathered import gather_weights
from tests.state.small import SMALL, build, loss
from tests.state.toy import differences, toy_model


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_comes_back_whole(tmp_path: Path, tied: bool) -> None:
    ahead = MTPConfig(depths=2, shared=False)
    model = build(dataclasses.replace(SMALL, tie_embeddings=tied, mtp=ahead)).eval()
    export_weights(model, tmp_path / "final", model.config, {"steps": 9})
    back = load_exported(tmp_path / "final")
    assert back.config == model.config and not back.training
    assert not differences(dict(model_tensors(model)), dict(model_tensors(back)))
    tables = {n: b for n, b in model.named_buffers() if not is_persistent(model, n)}
    assert not differences(tables, {n: back.get_buffer(n) for n in tables})
    assert torch.equal(loss(model), loss(back))
    assert json.loads((tmp_path / "final" / "config.json").read_text())["steps"] == 9
    names = load_file(tmp_path / "final" / "model.safetensors").keys()
    assert names == model_tensors(model).keys()
    assert ("embed.weight" in names) and tied != any(name.startswith("head.") for name in names)


def test_persistent_buffers_are_among_the_weights() -> None:
    """Check that the router's selection bias is learned; else the test above would miss it."""
    assert any("bias" in name for name in model_tensors(build(SMALL)).keys() - _parameters())


def _parameters() -> set[str]:
    return {name for name, _ in build(SMALL).named_parameters()}


def test_narrow_weights_widen_on_loading(tmp_path: Path) -> None:
    export_weights(build(SMALL).bfloat16(), tmp_path / "final", SMALL)
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert {t.dtype for t in stored.values()} >= {torch.bfloat16, torch.float32}
    back = load_exported(tmp_path / "final", dtype=torch.float64)
    for name, p in back.named_parameters():
        assert p.dtype == torch.float64 and torch.equal(p, stored[name].double())


def test_contract_parameters_stay_wide(tmp_path: Path) -> None:
    export_weights(build(SMALL), tmp_path / "final", SMALL)
    back = load_exported(tmp_path / "final", dtype=torch.bfloat16)
    contract = {name for name, _ in contract_parameters(back)}
    assert contract
    for name, p in back.named_parameters():
        assert p.dtype == (torch.float32 if name in contract else torch.bfloat16), name


def test_large_weights_are_split_with_an_index(tmp_path: Path) -> None:
    model = build(SMALL)
    export_weights(model, tmp_path / "final", SMALL, file_bytes=3000)
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in set(index["weight_map"].values()):
        content = load_file(tmp_path / "final" / file)
        assert {name for name, f in index["weight_map"].items() if f == file} == content.keys()
        sizes[file] = sum(t.numel() * t.element_size() for t in content.values())
        assert sizes[file] <= 3000 or len(content) == 1
    assert index["metadata"]["total_size"] == sum(sizes.values()) and len(sizes) > 3
    assert sorted(sizes)[0] == f"model-00001-of-{len(sizes):05d}.safetensors"
    assert torch.equal(loss(load_exported(tmp_path / "final")), loss(model.eval()))


def test_sharded_models_export_the_same_file(tmp_path: Path) -> None:
    whole = toy_model(seed=1)
    export_weights(whole, tmp_path / "one", SMALL)

    def body(rank: int, world: int) -> dict[str, Tensor] | None:
        model = toy_model(seed=1)
        export_weights(model, tmp_path / "four", SMALL)
        return gather_weights(model)

    gathered = run_ranks(body, 4)
    assert gathered[1:] == [None] * 3
    assert not differences(gathered[0], {n: t.detach() for n, t in model_tensors(whole).items()})
    files = [tmp_path / name / "model.safetensors" for name in ("one", "four")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "table" not in gathered[0] and "counts" in gathered[0]


def test_files_that_belong_to_the_weights_are_published_with_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    export_weights(build(SMALL), tmp_path / "final", SMALL, beside=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "final" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "final" / "tokenizer.json").write_text("{1")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is corrupt"):
        load_exported(tmp_path / "final")


def test_a_new_export_replaces_the_old_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        export_weights(build(SMALL, seed), tmp_path / "final", SMALL)
        assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert torch.equal(loss(load_exported(tmp_path / "final")), loss(build(SMALL, 2).eval()))


def test_a_failed_export_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_weights(build(SMALL, 1), tmp_path / "final", SMALL)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be exported: No space left on device. Fix"):
        export_weights(build(SMALL, 2), tmp_path / "final", SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert torch.equal(loss(load_exported(tmp_path / "final")), loss(build(SMALL, 1).eval()))


def edit_config(folder: Path, **changes: Any) -> None:
    """Another config.json, with a manifest that agrees."""
    from megacpp.state import manifest as manifests

    content = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        content["model"].pop(key) if value is None else content["model"].update({key: value})
    (folder / "config.json").write_text(json.dumps(content))
    old = manifests.read_manifest(folder, "export")
    files = {**old.files, "config.json": manifests.hash_file(folder / "config.json")}
    manifests.write_manifest(folder, dataclasses.replace(old, files=files))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 41}, "embed.weight is [40, 16], not [41, 16]"),
        ({"depth": 6}, "has no tensor blocks.5.mixer."),
        ({"depth": 4}, "has a tensor blocks.4.mixer."),
        ({"colour": 1}, "model.colour: is unknown in config.json"),
        ({"dim": None}, "model.dim: is missing in config.json"),
        ({"moe": {}}, "model.moe.activation: is missing in config.json"),
    ],
)
def test_weights_that_are_not_of_the_model(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    export_weights(build(SMALL), tmp_path / "final", SMALL)
    edit_config(tmp_path / "final", **changes)
    with pytest.raises(CheckpointError) as error:
        load_exported(tmp_path / "final")
    assert message in str(error.value) and ". Fix: " in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_and_missing_exports(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"final: no such folder. Fix:"):
        load_exported(tmp_path / "final")
    export_weights(build(SMALL), tmp_path / "final", SMALL)
    file = tmp_path / "final" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: is corrupt \(SHA-256 differs\)"):
        load_exported(tmp_path / "final")


def test_the_model_of_a_training_checkpoint(tmp_path: Path) -> None:
    model = build(SMALL, dtype=torch.float64).eval()
    tensors = {f"model.{name}": t for name, t in model_tensors(model).items()}
    tensors |= {"optim.embed.weight.momentum": torch.ones(40, 16)}
    path = save_checkpoint(tmp_path, 5, tensors, {}, keep=1)
    back = load_trained(path, SMALL, dtype=torch.float64)
    assert torch.equal(loss(back), loss(model)) and not back.training
    with pytest.raises(CheckpointError, match="step-000006: no such folder"):
        load_trained(tmp_path / "step-000006", SMALL)


def test_configurations_survive_json() -> None:
    for config in (SMALL, dataclasses.replace(SMALL, attention=AttentionConfig(yarn=YarnConfig()))):
        assert read_model_config(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_final_weights_that_a_run_went_on_from_are_named(tmp_path: Path) -> None:
    for name, kind, step in (("final", "export", 3), ("checkpoints/step-000011", "checkpoint", 11)):
        assert overtaken(tmp_path) == ""
        (tmp_path / name).mkdir(parents=True)
        write_manifest(tmp_path / name, Manifest(kind, step, 1, {}, {}))
    assert overtaken(tmp_path) == (
        f"note: {tmp_path}/final has the weights of step 3; --checkpoint latest has step 11"
    )
