"""`--config FILE`: a run's own config.json, TOML and YAML; every mistake names file and key."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp.blocks.attention.config import YarnConfig
from megacpp.cli.main import main
from megacpp.config.arguments import Resolved, flatten, parse_run, read_run
from megacpp.config.settings import as_json
from megacpp.errors import ConfigError

TOML = """
preset = "tiny"
optim.lr = 1e-3
[run]
steps = 7
tensorboard = false
[model.moe]
top-k = 1
"""
YAML = """
preset: tiny
optim.lr: 1e-3
run:
  steps: 7
  tensorboard: no
model: {moe: {top_k: 1}}
memory: {gate: off}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def run_file(path: Path, resolved: Resolved) -> Path:
    """config.json as a run writes it."""
    content = {
        "config": as_json(resolved.config),
        "provenance": resolved.provenance,
    }
    return written(path, json.dumps(content))


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_a_subset_and_flags_over_it(name: str, text: str, tmp_path: Path) -> None:
    if name != "a.toml":
        pytest.importorskip("yaml")
    file = str(written(tmp_path / name, text))
    resolved = parse_run(["--config", file, "--run.steps", "9"], 1)
    config, source = resolved.config, resolved.provenance
    assert (config.optim.lr, config.run.steps, config.run.tensorboard) == (1e-3, 9, False)
    assert config.model.moe.top_k == 1 and config.memory.gate == ("on" if "toml" in name else "off")
    assert source["optim.lr"] == source["model.moe.top_k"] == "config file"
    assert source["run.steps"] == "command line" and source["optim.beta1"] == "default"
    assert "optim.lr" in resolved.given and "run.steps" in resolved.given
    assert read_run(["tiny", f"--config={file}"]).base == read_run(["tiny"]).base


@pytest.mark.parametrize(
    "words",
    [
        "tiny --optim.lr 1e-3 --mesh.tp 2 --run.sample-prompt=x",
        "tiny --train.grad-accum 4",
        "nam56r_base --train.device-batch-size 1 --model.logit-softcap 30",
        "tiny --model.attention.kind mla --model.attention.no-qk-norm"
        " --model.attention.yarn.factor 8",
    ],
)
def test_a_run_repeats_itself(words: str, tmp_path: Path) -> None:
    """Compare all settings but the folder, and the file when it is saved again."""
    first = parse_run([*words.split(), "--run.dir", "runs/x"], 4)
    file = str(run_file(tmp_path / "config.json", first))
    again = parse_run(["--config", file, "--run.dir", "runs/y"], 4)
    assert flatten(again.config) == flatten(first.config) | {"run.dir": "runs/y"}
    assert set(first.given) <= set(again.given)
    third = parse_run(["--config", str(run_file(tmp_path / "c.json", again))], 4)
    assert third.config == again.config


def test_another_world_derives_again(tmp_path: Path) -> None:
    first = parse_run(["tiny"], 4)
    file = str(run_file(tmp_path / "config.json", first))
    again = parse_run(["--config", file], 2)
    assert again.config == dataclasses.replace(parse_run(["tiny"], 2).config, run=again.config.run)
    assert again.config.mesh.dp_shard == 2 and again.provenance["mesh.dp_shard"] == "derived"


def test_what_a_fit_found_stays(tmp_path: Path) -> None:
    asked = parse_run(["tiny", "--fit", "auto"], 2)
    fitted = dataclasses.replace(asked.config.recompute, norms=True)
    found = Resolved(
        dataclasses.replace(asked.config, recompute=fitted),
        asked.provenance | {"recompute.norms": "fitted"},
    )
    again = parse_run(["--config", str(run_file(tmp_path / "config.json", found))], 2)
    assert again.config.recompute.norms and again.config.memory.fit == "off"


def test_yarn_of_a_file(tmp_path: Path) -> None:
    text = "model.attention.kind = 'mla'\nmodel.attention.qk_norm = false\n"
    text += "[model.attention.yarn]\nfactor = 8\n"
    config = parse_run(["--config", str(written(tmp_path / "y.toml", text))], 1).config
    assert config.model.attention.yarn == YarnConfig(factor=8.0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "run.step = 3", "run.step: no such setting. Fix: did you mean 'run.steps'"),
        ("a.toml", "[optim]\nlearning_rate = 3", "optim.learning_rate: no such setting. Fix: see"),
        ("a.toml", "[run]\nsteps = 'many'", "run.steps=many: must be a whole number"),
        ("a.toml", "[run]\nsteps = 1.5", "run.steps=1.5: must be a whole number"),
        ("a.toml", "[run]\nsteps = true", "run.steps=true: must be INT"),
        ("a.toml", "[run]\nsteps = [3]", "run.steps=[3]: must be INT"),
        ("a.toml", "[run]\ntensorboard = 'maybe'", "run.tensorboard=maybe: must be true or false"),
        ("a.toml", "[run]\ndir = 3", 'run.dir=3: must be TEXT in quotes. Fix: write run.dir = "'),
        ("a.toml", "[optim]\nname = 'adam'", "optim.name=adam: must be one of muon_adamw, adamw"),
        ("a.toml", "[run\nsteps = 3", "is not TOML (Expected ']'"),
        ("a.json", "{", "is not JSON ("),
        ("a.json", "[1]", "must be a table of settings"),
        ("a.json", '{"optim": {"lr": NaN}}', "optim.lr=nan: must be a finite number"),
        ("a.json", '{"preset": "tinny"}', "preset=tinny: no such preset"),
        ("a.ini", "", "must end in .json, .toml, .yaml, .yml"),
        ("a.yaml", "run: {steps: none}", "run.steps=none: must be a whole number"),
        ("a.yaml", "run: [", "is not YAML (while parsing"),
    ],
)
def test_mistakes_name_file_and_key(name: str, text: str, words: str, tmp_path: Path) -> None:
    if name == "a.yaml":
        pytest.importorskip("yaml")
    file = written(tmp_path / name, text)
    with pytest.raises(ConfigError) as caught:
        parse_run(["--config", str(file)], 1)
    line = str(caught.value)
    assert words in line and str(file) in line and "\n" not in line and "Fix" in line
    assert caught.value.exit_code == 2


def test_every_mistake_of_a_file_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "a.toml", "run.step = 3\noptim.lr = 'x'\n")
    for command in (["validate"], ["show"], ["explain"], ["plan", "--world", "2"]):
        assert main([*command, "--config", str(file)]) == 2
        lines = "".join(capsys.readouterr()).splitlines()
        assert len(lines) == 2 and all(line.startswith(f"error: {file}: ") for line in lines)


def test_files_that_are_not_there_and_presets_that_differ(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read \(No such file"):
        parse_run(["--config", str(tmp_path / "none.toml")], 1)
    file = str(written(tmp_path / "a.toml", TOML))
    with pytest.raises(ConfigError, match=r"^preset=nam56r: .* is of the preset tiny"):
        parse_run(["nam56r", "--config", file], 1)


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    absent: Any = lambda name, *rest: None if name == "yaml" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ConfigError, match=r"needs PyYAML, .* Fix: run `pip install pyyaml`, or use TOML"
    ):
        parse_run(["--config", str(written(tmp_path / "a.yaml", YAML))], 1)
