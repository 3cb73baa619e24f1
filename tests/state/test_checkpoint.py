"""Saved state comes back bit for bit on any number of ranks, and only what was asked for."""

from __future__ import annotations

import errno
import json
import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megacpp.errors import CheckpointError
from megacpp.state import checkpoint
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.manifest import hash_file, read_manifest, write_manifest
from megacpp.state.published import latest_checkpoint, latest_text
from megacpp.state.rng import rng_state, set_rng_state
from tests.ranks import run_ranks
from tests.state.toy import differences, local, toy_model, toy_state, world_size

EXTRA = {"step": 7, "loss": 0.1 + 0.2, "config": {"lr": 3e-3, "name": "tiny"}}


def on_ranks(world: int, fn: Any, *args: Any) -> list[Any]:
    """Run on ranks; one rank means one process without a process group."""
    return [fn(0, 1, *args)] if world == 1 else run_ranks(fn, world, *args)


def save(rank: int, world: int, folder: Path) -> None:
    save_checkpoint(folder, 7, toy_state(seed=1), EXTRA, keep=0)


def load(rank: int, world: int, path: Path) -> tuple[list[str], dict[str, Any], bool]:
    """Load over other values; return differences, extra, and whether storages stayed in place."""
    state = toy_state(seed=2)
    before = {name: _pointer(t) for name, t in state.items()}
    extra = load_checkpoint(path, state)
    in_place = all(_pointer(t) == before[name] for name, t in state.items())
    return differences(local(state), local(toy_state(seed=1))), extra, in_place


def _pointer(t: Tensor) -> int:
    return (t.to_local() if isinstance(t, DTensor) else t).data_ptr()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the same state saved by 1, 2 and 4 ranks."""
    folders = {}
    for world in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"by-{world}")
        on_ranks(world, save, folder)
        folders[world] = folder / "step-000007"
    return folders


@pytest.mark.parametrize(
    ("savers", "loaders"), [(1, 1), (2, 2), (4, 4), (2, 1), (1, 2), (2, 4), (4, 2), (1, 4), (4, 1)]
)
def test_round_trip_is_bit_exact(saved: dict[int, Path], savers: int, loaders: int) -> None:
    for different, extra, in_place in on_ranks(loaders, load, saved[savers]):
        assert not different
        assert in_place
        assert (extra["rng"] is not None) == (savers == loaders)
        assert {k: v for k, v in extra.items() if k != "rng"} == EXTRA


def test_the_two_toy_states_differ_everywhere() -> None:
    """Else the round trip would prove nothing."""
    same = set(toy_state(1)) - set(differences(toy_state(1), toy_state(2)))
    assert same == {"optim.nothing"}


def test_a_rank_without_a_row_stores_nothing_of_it(saved: dict[int, Path]) -> None:
    rows: dict[str, int] = {}
    for file in saved[4].glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                shape = reader.get_slice(name).get_shape()
                rows[name] = rows.get(name, 0) + (shape[0] if shape else 1)
    assert rows["model.last.weight"] == 1
    assert rows["model.first.weight"] == 5
    assert rows["optim.strided"] == 4  # replicated tensors are stored once


def test_non_finite_bits_survive(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, 1, -(2**31)], dtype=torch.int32)
    path = save_checkpoint(tmp_path, 0, {"x": bits.view(torch.float32)}, {}, keep=1)
    back = torch.zeros(5)
    load_checkpoint(path, {"x": back})
    assert torch.equal(back.view(torch.int32), bits)


def test_replicated_shards_and_other_dims(tmp_path: Path) -> None:
    """dp_replicate x dp_shard meshes and tensors cut in columns or in both dims, 4 to 1 ranks."""
    full = torch.arange(48.0).view(4, 12)
    names = ("replicate_rows", "columns", "blocks")

    def write(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        cuts = ([Replicate(), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Shard(1)])
        tensors = {n: distribute_tensor(full, mesh, c) for n, c in zip(names, cuts, strict=True)}
        save_checkpoint(tmp_path, 1, tensors, {}, keep=1)

    run_ranks(write, 4)
    back = {name: torch.zeros(4, 12) for name in names}
    load_checkpoint(tmp_path / "step-000001", back)
    assert all(torch.equal(t, full) for t in back.values())
    files = (tmp_path / "step-000001").glob("*.safetensors")
    assert sum(p.stat().st_size for p in files) < 3 * full.numel() * 4 + 4 * 1000


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, world: int) -> None:
    def steps(model: torch.nn.Module, adam: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            model(x).square().sum().backward()
            adam.step()
            adam.zero_grad()

    def tensors(model: torch.nn.Module, adam: torch.optim.Optimizer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            found[f"model.{name}"] = p
            found |= {f"optim.{name}.{k}": t for k, t in adam.state[p].items()}
        return found

    def body(rank: int, world: int) -> list[str]:
        model = toy_model(seed=3)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(model, adam, range(3))
        path = save_checkpoint(tmp_path, 3, tensors(model, adam), {}, keep=1)
        steps(model, adam, range(3, 6))
        other = toy_model(seed=4)
        again = torch.optim.AdamW(other.parameters(), lr=0.1)
        steps(other, again, range(10, 11))  # makes its state, of other values
        load_checkpoint(path, tensors(other, again))
        steps(other, again, range(3, 6))
        return differences(local(tensors(model, adam)), local(tensors(other, again)))

    assert on_ranks(world, body) == [[]] * world


def test_weights_alone_by_prefix(saved: dict[int, Path]) -> None:
    state = {n: t for n, t in toy_state(seed=2).items() if n.startswith("model.")}
    load_checkpoint(saved[2], state, prefix="model.")
    wanted = {n: t for n, t in toy_state(seed=1).items() if n.startswith("model.")}
    assert not differences(state, wanted)


def _without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {n: t for n, t in state.items() if n != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: _without(s, "optim.flags"), "has a tensor optim.flags that this run lacks"),
        (lambda s: {**s, "model.new": torch.ones(1)}, "has no tensor model.new"),
        (
            lambda s: {**s, "model.first.weight": torch.ones(5, 3)},
            "model.first.weight is float32 [5, 4], this run needs float32 [5, 3]",
        ),
        (
            lambda s: {**s, "model.first.weight": torch.ones(5, 4, dtype=torch.float64)},
            "model.first.weight is float32 [5, 4], this run needs float64 [5, 4]",
        ),
        (
            lambda s: {**_without(s, "optim.updates"), "a": torch.ones(1), "b": torch.ones(1)},
            "has no tensor a (and 2 more)",
        ),
    ],
)
def test_other_tensors_are_refused_untouched(
    saved: dict[int, Path], change: Any, message: str
) -> None:
    state = change(toy_state(seed=2))
    before = local(state)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(saved[1], state)
    assert message in str(error.value) and "Fix: " in str(error.value)
    assert "\n" not in str(error.value) and error.value.exit_code == 4
    assert not differences(local(state), before)


def test_generators_go_on_where_they_were() -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)  # caches half a pair each
    state = json.loads(json.dumps(rng_state()))
    wanted = (random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist())
    random.seed(6), np.random.seed(6), torch.manual_seed(6)
    set_rng_state(state)
    assert (random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()) == wanted


def test_every_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[float, float]:
        torch.manual_seed(100 + rank)
        path = save_checkpoint(tmp_path, 1, {"x": torch.ones(2)}, {}, keep=1)
        wanted = torch.rand(()).item()
        torch.manual_seed(0)
        set_rng_state(load_checkpoint(path, {"x": torch.ones(2)})["rng"])
        return wanted, torch.rand(()).item()

    pairs = run_ranks(body, 2)
    assert all(wanted == got for wanted, got in pairs)
    assert pairs[0] != pairs[1]


def test_headers_are_sorted_and_older_ones_are_read(saved: dict[int, Path], tmp_path: Path) -> None:
    """Checkpoints of earlier versions have the metadata of a header in any order."""
    folder = shutil.copytree(saved[2], tmp_path / "step-000007")
    manifest = read_manifest(folder, "checkpoint")
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        names = list(header["__metadata__"])
        assert names == sorted(names) and len(names) > 1
        header["__metadata__"] = {name: header["__metadata__"][name] for name in reversed(names)}
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        path.write_bytes(raw[:8] + text + raw[8 + size :])
        assert path.stat().st_size == len(raw) and hash_file(path) != manifest.files[path.name]
        manifest.files[path.name] = hash_file(path)
    write_manifest(folder, manifest)
    assert verify(folder) == [] and load(0, 1, folder)[0] == []


# ---- no pickle ----------------------------------------------------------------------------------


def _forbid_pickle(patch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    for name in names:
        patch.setattr(pickle, name, refuse)
    patch.setattr(torch, "load", refuse)
    patch.setattr(torch, "save", refuse)


def test_one_process_never_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("load", "loads", "dump", "dumps", "Pickler", "Unpickler", "_Unpickler")
    _forbid_pickle(monkeypatch, names)
    path = save_checkpoint(tmp_path, 7, toy_state(seed=1), EXTRA, keep=0)
    assert load(0, 1, path)[0] == []


def test_ranks_never_pickle_to_or_from_a_file(tmp_path: Path) -> None:
    """Between living ranks torch's object collectives pickle in memory; `loads` stays allowed."""

    def body(rank: int, world: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            _forbid_pickle(patch, ("load", "dump"))
            save(rank, world, tmp_path)
            return load(rank, world, tmp_path / "step-000007")[0]

    assert run_ranks(body, 2) == [[], []]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_file_is_json_or_safetensors(saved: dict[int, Path], world: int) -> None:
    files = sorted(p for p in saved[world].parent.rglob("*") if p.is_file())
    assert {p.name for p in files} >= {"latest", "extra.json", "manifest.json"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as reader:
                header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
                sizes = [_size(reader.get_tensor(n)) for n in reader.keys()]  # noqa: SIM118
            assert path.stat().st_size == header + sum(sizes)  # no byte besides tensors
        else:
            assert path.name == "latest" and path.read_text() == latest_text("step-000007")
        with pytest.raises(Exception):  # noqa: B017 - whatever pickle makes of it
            pickle.loads(path.read_bytes())


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


def test_saving_and_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_checkpoint(tmp_path, 7, toy_state(seed=1), EXTRA, keep=0)
        load(0, 1, path)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert verify(path) == [] and latest_checkpoint(tmp_path) == path


def test_large_states_are_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the files: DCP holds one file twice in host memory."""
    monkeypatch.setattr("megacpp.state.checkpoint._FILE_BYTES", 200)
    path = save_checkpoint(tmp_path, 7, toy_state(seed=1), EXTRA, keep=0)
    total = sum(t.numel() * t.element_size() for t in toy_state(seed=1).values())
    assert len(list(path.glob("*.safetensors"))) >= total // 200
    assert load(0, 1, path)[0] == [] and world_size() == 1


@pytest.mark.parametrize("stage", ["_prepare", "_write_tensors", "hash_file", "_name_slow_disks"])
def test_a_save_that_fails_says_what_and_how_to_mend_it(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, stage, full)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, 7, toy_state(seed=1), EXTRA, keep=0)
    said = str(error.value)
    assert said.startswith(f"{tmp_path}/") and ": cannot be saved: " in said
    assert "No space left on device" in said and ". Fix: free disk space or choose" in said
    assert latest_checkpoint(tmp_path) is None
