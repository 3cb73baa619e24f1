"""Launch record: versions of all that a run depends on, and records of earlier layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.utils import canonicalize_name

from megacpp.config.presets import tiny
from megacpp.errors import DataError
from megacpp.launch import record, schema
from megacpp.launch.record import all_versions, write_launch
from megacpp.launch.schema import MACHINE, PACKAGES, SCHEMA, current
from megacpp.model.count import count_parameters
from megacpp.report.files import read_launch
from tests.launch import ROOT

OPTIONAL = {"triton", "torchao", "tilelang", "mamba-ssm", "transformer-engine"}


def test_the_commit_is_that_of_the_checkout_wherever_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    assert (record.git_commit() or "").removesuffix("-dirty") == found.stdout.strip()


def test_a_look_at_the_checkout_writes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of git's index stays behind when a run is killed, and then nobody can commit."""
    file, index = tmp_path / "megacpp" / "launch" / "record.py", tmp_path / ".git" / "index"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    own = "git -c user.name=a -c user.email=b".split()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*own, *words], cwd=tmp_path, check=True)
    os.utime(file, (1, 1))  # git would note the new time in its index
    before = index.stat().st_ino
    monkeypatch.setattr(record, "__file__", str(file))
    assert not (record.git_commit() or "-dirty").endswith("-dirty")
    assert index.stat().st_ino == before


def written(folder: Path) -> dict[str, Any]:
    config = tiny()
    write_launch(folder, config, {"dp_shard": 1}, count_parameters(config.model), first_step=0)
    return json.loads((folder / "launch.json").read_text())


def test_versions_of_packages_and_of_the_machine(tmp_path: Path) -> None:
    """Each by what the package itself says; null where there is none."""
    found = written(tmp_path)["versions"]
    assert set(found) == {*PACKAGES, *MACHINE} and set(found) >= OPTIONAL
    there = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    for name in PACKAGES:
        assert found[name] == there.get(name), name
    # A wheel's own version may lack the `+cu132` that torch says of itself.
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["cuda"] == torch.version.cuda


def test_a_gpu_s_driver_and_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Record the driver's version (of a stand-in for nvidia-smi) and NCCL's."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint('570.86.15')\nprint('570.86.15')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    found = all_versions()
    assert (found["cuda driver"], found["nccl"]) == ("570.86.15", "2.27.5")


def test_a_package_that_is_not_there_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in OPTIONAL:
            raise metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(schema.metadata, "version", version)
    found = record.all_versions()
    assert {found[name] for name in OPTIONAL} == {None} and found["torch"] == "1.2"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    content = written(tmp_path)
    assert content["schema"] == SCHEMA == 2
    assert read_launch(tmp_path / "launch.json") == content == current(content)


def test_records_without_a_number_are_read(tmp_path: Path) -> None:
    """Read a record of the first layout: fields that it lacks are null."""
    path = tmp_path / "launch.json"
    old = {"versions": {"torch": "2.13.0", "numpy": "2.4.1"}, "world_size": 2, "mesh": {"tp": 2}}
    path.write_text(json.dumps(old))
    found = read_launch(path)
    assert found["schema"] == 2 and found["world_size"] == 2 and found["mesh"] == {"tp": 2}
    assert found["versions"]["torch"] == "2.13.0" and found["versions"]["nccl"] is None
    assert found["versions"].keys() == {*PACKAGES, *MACHINE}
    path.write_text('{"world_size": 1}')
    assert set(read_launch(path)["versions"].values()) == {None}
    assert read_launch(tmp_path / "none.json") == {}


@pytest.mark.parametrize("number", [3, 0, "2", True, None])
def test_a_record_of_a_later_layout_is_one_line(tmp_path: Path, number: Any) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"schema": number}))
    with pytest.raises(
        DataError, match=r"schema is .*, and this version reads 1 to 2\. Fix: "
    ) as e:
        read_launch(path)
    assert "\n" not in str(e.value)
