"""Every exported folder has the keys and the names that vLLM's and llama.cpp's loaders read."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megacpp.cli.main import main
from megacpp.interop.table import CLASSES
from tests.interop.models import CASES, built, final_folder, model_of

LIST = tomllib.loads(Path(__file__).with_name("served.toml").read_text())
LAYER, EXPERT = re.compile(r"^model\.layers\.\d+\."), re.compile(r"\.experts\.\d+\.")


def names_in(groups: list[str]) -> set[str]:
    return {name for group in groups for name in LIST["groups"][group]}


def test_the_list_has_every_class() -> None:
    assert LIST["classes"].keys() == {kind for kind, *_ in CASES.values()}
    classes = {one.name.removesuffix("ForCausalLM") for one in CLASSES}
    assert LIST["classes"].keys() == classes


@pytest.mark.parametrize("name", CASES)
def test_keys_and_names_are_those_of_the_loaders(name: str, tmp_path: Path) -> None:
    final = final_folder(tmp_path / "run", built(model_of(name)))
    assert main(["export", str(final), "--out", str(tmp_path / "out")]) == 0
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = LIST["classes"][CASES[name][0]]
    assert not {*LIST["keys"], *wanted["keys"]} - config.keys()
    for key, value in wanted.get("values", {}).items():
        assert config.get(key) == value, key
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = {EXPERT.sub(".experts.E.", key) for key in file.keys()}  # noqa: SIM118 - no mapping
    layers = {LAYER.sub("", key) for key in names if LAYER.match(key)}
    outside = {key for key in names if not LAYER.match(key)}
    required = names_in(wanted["has"])
    assert not required - layers, "missing"
    assert not layers - required - names_in(wanted.get("may", [])), "unknown"
    assert not set(LIST["names"]) - outside and not outside - {*LIST["names"], *LIST["may"]}
    assert ("lm_head.weight" in outside) != config["tie_word_embeddings"]
