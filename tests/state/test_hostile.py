"""Hostile folders: everything hashes, nothing is true; each ends in one line, at once."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.errors import CheckpointError, MegacppError
from megacpp.interop.places import locate, read_model
from megacpp.state import manifest as manifests
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint
from megacpp.state.export import export_weights, load_exported
from megacpp.state.manifest import hash_file
from megacpp.state.published import candidates, read_extra
from tests.figures import Record
from tests.state.small import SMALL, build
from tests.state.test_training import config_of, make

DEEP = "[" * 100_000
MOST_S = 2
OTHERS = (2**62, -1, "x", 0, None, [], 1e300)


@contextmanager
def at_once(seconds: int = 20) -> Iterator[None]:
    """End a block that waits for a pipe."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def one_line(act: Callable[[], object]) -> str:
    with at_once(), pytest.raises(MegacppError) as error:
        act()
    text = str(error.value)
    assert "\n" not in text and ". Fix: " in text and len(text) < 600, text
    return text


def rehashed(folder: Path, **changes: Any) -> None:
    """Give the manifest other values, and the hashes that all files have now."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    for name in content["files"]:
        if (folder / name).is_file():
            entry = hash_file(folder / name)
            content["files"][name] = {"bytes": entry.bytes, "sha256": entry.sha256}
    path.write_text(manifests._to_text(content | changes))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = make(tmp_path, config_of())
    run.steps(1)
    return run.state.save(keep=0)


def resume(path: Path) -> None:
    make(path.parent / "none", config_of()).state.resume(str(path))


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
@pytest.mark.parametrize("name", ["manifest.json", "extra.json", "latest", "shard"])
def test_pipes_and_devices_in_place_of_files(
    saved: Path, name: str, kind: str, record_property: Record
) -> None:
    path = next(saved.glob("*.safetensors")) if name == "shard" else saved / name
    path = saved.parent / name if name == "latest" else path
    path.unlink()
    make_it = {
        "fifo": os.mkfifo,
        "device": lambda path: os.symlink("/dev/zero", path),
        "folder": Path.mkdir,
        "loop": lambda path: os.symlink(path, path),
    }
    make_it[kind](path)
    if name == "latest":
        with at_once():
            assert candidates(saved.parent) == [saved]
            resume(saved)
    else:
        assert path.name in one_line(lambda: resume(saved))
    record_property("pipes, devices, folders and loops in place of a file, one line each", 1)


def without(key: str) -> Callable[[Any], None]:
    return lambda extra: extra.pop(key)


def with_value(key: str, value: Any) -> Callable[[Any], None]:
    return lambda extra: extra.update({key: value})


CHANGES = {
    **{f"{k}=-1": with_value(k, -1) for k in ("step", "updates", "bad_steps", "rows", "steps")},
    **{f"no {k}": without(k) for k in ("step", "updates", "seed", "config", "data_fingerprint")},
    **{f"{k}=7": with_value(k, 7) for k in ("config", "others", "data_fingerprint", "step")},
    "others": with_value("others", {"health": {"average": []}}),
    "model": with_value("config", {"model": 7, "data": {}, "optim": {}}),
    "policy": with_value("config", {"model": {}, "data": {}, "optim": {}, "recompute": []}),
    "step=2**70": with_value("step", 2**70),
    "tokens": with_value("tokens_per_step", -1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_counters_that_no_run_has(
    saved: Path, change: Callable[[Any], None], record_property: Record
) -> None:
    path = saved / "extra.json"
    content = json.loads(path.read_text())
    change(content["extra"])
    path.write_text(json.dumps(content))
    rehashed(saved)

    class Counter:
        def state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: Any) -> None:
            state["weight"]

    def act() -> None:
        make(saved.parent / "none", config_of(), health=Counter()).state.resume(str(saved))

    assert str(saved) in one_line(act)
    record_property("forged counters refused", 1)


@pytest.mark.parametrize("text", [DEEP, "7", "[]", "{}", '{"extra": 1}', '{"a":' * 900 + "1"])
def test_an_extra_of_anything_else(saved: Path, text: str) -> None:
    (saved / "extra.json").write_text(text)
    rehashed(saved)
    assert "extra.json" in one_line(lambda: resume(saved))
    assert "extra.json" in one_line(lambda: read_extra(saved))


TENSOR = {"dtype": "float32", "shape": [5, 4]}
MANIFESTS: list[dict[str, Any]] = [
    {"step": -1},
    {"world_size": 0},
    {"world_size": "2"},
    {"files": []},
    {"files": {"extra.json": 7}},
    {"files": {"a\0b": {"bytes": 0, "sha256": ""}}},
    {"tensors": 7},
    {"tensors": {"model.w": {**TENSOR, "dtype": "load"}}},
    {"tensors": {"model.w": {**TENSOR, "dtype": ["float32"]}}},
    {"tensors": {"model.w": {**TENSOR, "shape": [-1, 4]}}},
    {"tensors": {"model.w": {**TENSOR, "shape": [2**40, 2**40]}}},
    {"tensors": {"model.w": {**TENSOR, "shape": "54"}}},
    {"more": 1},
]


@pytest.mark.parametrize("changes", MANIFESTS, ids=str)
def test_manifests_that_hash(saved: Path, changes: dict[str, Any], record_property: Record) -> None:
    rehashed(saved, **changes)
    assert "manifest.json: " in one_line(lambda: resume(saved))
    record_property("forged manifests refused", 1)


def test_deep_nesting_in_a_manifest(saved: Path) -> None:
    """Depths that Python reads and can't write, and that it can't read."""
    for depth in (900, 985, 990, 1000, 100_000):
        (saved / "manifest.json").write_text('{"sha256": "", "version": ' + "[" * depth)
        one_line(lambda: resume(saved))
        nested = "[" * depth + "]" * depth
        (saved / "manifest.json").write_text('{"sha256": "", "version": ' + nested + "}")
        one_line(lambda: resume(saved))


def test_a_checkpoint_of_a_huge_tensor_allocates_nothing(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.zeros(2)}, {}, 1)
    rehashed(path, tensors={"model.w": {"dtype": "float32", "shape": [2**40]}})
    assert "model.w is float32 [1099511627776]" in one_line(
        lambda: load_checkpoint(path, {"model.w": torch.zeros(2)})
    )


# ---- exports ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "final"
    export_weights(build(SMALL), folder, SMALL)
    return folder


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting."""
    if not isinstance(values, dict):
        yield path
        return
    for key, value in values.items():
        yield from leaves(value, (*path, key))


def test_no_setting_of_a_model_makes_an_export_large_or_slow(
    exported: Path, tmp_path: Path
) -> None:
    """Two values that no run has for every setting: one line in two seconds, or the same model."""
    folder = tmp_path / "final"
    shutil.copytree(exported, folder)
    original = json.loads((exported / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, path in enumerate(leaves(original["model"])):
        for value in (10**9, OTHERS[number % len(OTHERS)]):
            content = json.loads(json.dumps(original))
            at = content["model"]
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(content))
            rehashed(folder)
            began = time.process_time()
            with at_once():
                try:
                    load_exported(folder)
                except MegacppError as error:
                    assert "\n" not in str(error) and ". Fix: " in str(error), error
            assert time.process_time() - began < MOST_S, (path, value)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 << 10, f"{grown_kib >> 10} MiB"


@pytest.mark.parametrize("text", [DEEP, "7", "[]", "{}", '{"model": 7}', '{"model": {}}'])
def test_a_config_of_anything_else(exported: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "final"
    shutil.copytree(exported, folder)
    (folder / "config.json").write_text(text)
    rehashed(folder)
    one_line(lambda: load_exported(folder))
    if text != '{"model": {}}':  # settings that an older version lacked have defaults
        one_line(lambda: read_model(locate(str(folder), "checkpoint.init")))


def test_weights_that_are_not_what_the_manifest_says(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "final"
    shutil.copytree(exported, folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[:8] = (2**40).to_bytes(8, "little")
    file.write_bytes(raw)
    rehashed(folder)
    assert "model.safetensors: " in one_line(lambda: load_exported(folder))
    other = json.loads((exported / "manifest.json").read_text())["tensors"]
    name = next(iter(other))
    other[name] = {**other[name], "dtype": "int64"}
    shutil.copyfile(exported / "model.safetensors", file)
    rehashed(folder, tensors=other)
    with pytest.raises(CheckpointError, match=r"is int64, not torch\.float32"):
        load_exported(folder)
