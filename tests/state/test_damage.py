"""Damage is found before one tensor is touched and named in one line, alike on every rank."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megacpp.errors import CheckpointError
from megacpp.state import manifest as manifests
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.published import latest_checkpoint
from tests.figures import Record
from tests.ranks import run_ranks
from tests.state.toy import differences, local, toy_state

FILES = (
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
    "extra.json",
    "manifest.json",
)
FLIPS = 200


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 1 and 2, each written by two ranks."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"

    def body(rank: int, world: int) -> None:
        for step in (1, 2):
            save_checkpoint(folder, step, toy_state(seed=step), {"step": step}, keep=0)

    run_ranks(body, 2)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def error_of(path: Path) -> str:
    """Return the message that rejects `path`, after checking every rejection's invariants."""
    tensors = toy_state(seed=5)
    before = local(tensors)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, tensors)
    assert not differences(local(tensors), before), "a tensor was touched"
    assert "\n" not in str(error.value) and ". Fix: " in str(error.value)
    assert error.value.exit_code == 4
    return str(error.value)


def test_the_pristine_one_is_fine(folder: Path) -> None:
    path = folder / "step-000002"
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    assert verify(path) == [] and latest_checkpoint(folder) == path
    assert load_checkpoint(path, toy_state(seed=5))["step"] == 2


def test_every_flipped_bit_is_found(folder: Path, record_property: Record) -> None:
    path = folder / "step-000002"
    draw = random.Random(0)
    for trial in range(FLIPS):
        file = path / FILES[trial % len(FILES)]
        content = bytearray(file.read_bytes())
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        kept = file.read_bytes()
        file.write_bytes(content)
        problems = verify(path)
        assert len(problems) == 1 and file.name in problems[0], f"bit {bit} of {file.name}"
        file.write_bytes(kept)
    assert verify(path) == []
    record_property("flipped bits found, file named", FLIPS)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def deleted(file: Path) -> None:
    file.unlink()


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"}")


def swapped(file: Path) -> None:
    shutil.copyfile(file.parent.with_name("step-000001") / file.name, file)


@pytest.mark.parametrize("damage", [truncated, emptied, halved, deleted, longer, swapped])
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(
    folder: Path, name: str, damage: Callable[[Path], None], record_property: Record
) -> None:
    path = folder / "step-000002"
    damage(path / name)
    whole_manifest_of_another_step = name == "manifest.json" and damage is swapped
    if not whole_manifest_of_another_step:
        assert name in verify(path)[0]
        assert name in error_of(path)
    else:
        assert ": is corrupt (SHA-256 differs)" in error_of(path)
    assert f"--checkpoint.resume {folder / 'step-000001'}" in error_of(path)
    record_property("files truncated, emptied, halved, deleted, lengthened or swapped, named", 1)


def test_every_rank_refuses_with_the_same_line(folder: Path) -> None:
    """Only one rank hashes the damaged file; one rank only sees it missing."""
    file = folder / "step-000002" / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    lines = run_ranks(lambda rank, world: error_of(folder / "step-000002"), 2)
    assert lines[0] == lines[1] and f"{FILES[1]}: is corrupt" in lines[0]


def test_a_stray_tensor_file_is_refused(folder: Path) -> None:
    """It would be read as part of the checkpoint."""
    path = folder / "step-000002"
    shutil.copyfile(path / FILES[0], path / "shard-00003-model-00001-of-00001.safetensors")
    assert "shard-00003-model-00001-of-00001.safetensors: is not in manifest.json" in error_of(path)


def rewrite(path: Path, **changes: object) -> None:
    """Write a manifest with other values and a matching digest."""
    old = manifests.read_manifest(path, "checkpoint")
    manifests.write_manifest(path, dataclasses.replace(old, **changes))


def test_another_format_version(folder: Path) -> None:
    rewrite(folder / "step-000002", version=2)
    assert "has format version 2, this megacpp reads 1" in error_of(folder / "step-000002")


def test_exported_weights_are_no_checkpoint(folder: Path) -> None:
    rewrite(folder / "step-000002", kind="export")
    assert "is of the kind 'export', not 'checkpoint'" in error_of(folder / "step-000002")


@pytest.mark.parametrize("name", ["../step-000001/extra.json", "/etc/hostname", "a/b", ".."])
def test_a_manifest_may_not_name_files_elsewhere(folder: Path, name: str) -> None:
    path = folder / "step-000002"
    old = manifests.read_manifest(path, "checkpoint")
    rewrite(path, files={**old.files, name: manifests.FileEntry(0, "")})
    assert f"names the file {name!r} outside of its folder" in error_of(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{}", '{"sha256": 1}', "[" * 100_000, '{"version": 1, "sha256": ""}']
)
def test_a_manifest_of_anything_else(folder: Path, text: str) -> None:
    (folder / "step-000002" / "manifest.json").write_text(text)
    assert "manifest.json: is " in error_of(folder / "step-000002")


def test_missing_and_unfinished_checkpoints(folder: Path) -> None:
    assert "step-000007: no such folder" in error_of(folder / "step-000007")
    (folder / "step-000002").rename(folder / "step-000002.tmp")
    (folder / "step-000002.tmp" / "manifest.json").unlink()
    assert "has no manifest.json, so it is unfinished" in error_of(folder / "step-000002.tmp")
    assert latest_checkpoint(folder) == folder / "step-000001"


def test_advice_without_another_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "step-000001")
    deleted(folder / "step-000002" / "extra.json")
    assert "--checkpoint.resume never" in error_of(folder / "step-000002")


def test_a_run_given_as_a_checkpoint_names_its_newest_one(folder: Path) -> None:
    for given in (folder, folder.parent):
        assert f"Fix: use --checkpoint.resume {folder}/step-000002" in error_of(given)


def test_the_manifest_can_be_checked_by_hand(folder: Path) -> None:
    """Sizes, hashes, shapes and dtypes are plain JSON."""
    content = json.loads((folder / "step-000002" / "manifest.json").read_text())
    assert content["files"].keys() == set(FILES) - {"manifest.json"}
    assert content["step"] == 2 and content["world_size"] == 2
    assert content["tensors"]["model.first.weight"] == {"dtype": "float32", "shape": [5, 4]}
    assert content["tensors"]["optim.last.weight.second"]["dtype"] == "bfloat16"
    assert torch.float32 is getattr(torch, content["tensors"]["model.last.bias"]["dtype"])
