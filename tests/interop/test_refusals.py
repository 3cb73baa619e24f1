"""Settings that no class expresses: one line that names one of them and what to set instead."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.cli.main import main
from megacpp.config.arguments import read_run, replace_keys
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.errors import ConfigError
from megacpp.interop.classes import class_of, dropped
from megacpp.interop.features import FEATURES
from megacpp.interop.links import links, our_shapes, rows_in
from megacpp.interop.table import CLASSES
from tests.figures import Record
from tests.interop.models import (
    CASES,
    LATENT,
    MLA,
    SOFTMAX,
    SPARSE,
    TURNS,
    WIDE,
    YARN,
    built,
    final_folder,
    model_of,
)
from tests.model.small import small

# name -> (pattern, settings below `model`, start of the line, words in it)
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "two in a row": ("AFF", {}, "model.pattern=AFF", "a pair, A or G and then E or F"),
    "odd depth": ("AFA", {}, "model.pattern=AFA", "an even --model.depth"),
    "softcap": ("AF", {"attention.softcap": 30.0}, "model.attention.softcap=30.0", "softcap none"),
    "turns with a temperature": (
        "AF",
        {**WIDE, "attention.yarn": dataclasses.replace(TURNS, mscale=1.0)},
        "model.attention.yarn.mscale=1.0",
        "--model.attention.yarn.mscale 0",
    ),
    "biases": (
        "AF",
        {"attention.qkv_bias": True},
        "model.attention.qkv_bias=True",
        "--model.attention.qkv-bias false",
    ),
    "part of a head": (
        "AF",
        {"attention.rope_fraction": 0.5},
        "model.attention.rope_fraction=0.5",
        "--model.attention.rope-fraction 1",
    ),
    "part of a head with a temperature": (
        "AE",
        {**WIDE, "attention.yarn": YARN, "attention.rope_fraction": 0.5},
        "model.attention.yarn.mscale=0.7",
        "--model.attention.yarn.mscale 0",
    ),
    "output gate": (
        "AE",
        {"attention.output_gate": True},
        "model.attention.output_gate=True",
        "--model.attention.output-gate false",
    ),
    "window": (
        "AE",
        {"attention.window": 8},
        "model.attention.window=8",
        "--model.attention.window 0",
    ),
    "window in each layer": (
        "AF",
        {"attention.qk_norm_wide": True, "post_norm": True, "attention.window": 8},
        "model.attention.window=8",
        "--model.attention.window 0",
    ),
    "norms on both sides of the classes": (
        "AE",
        {"post_norm": True},
        "model.post_norm=True",
        "--model.post-norm false",
    ),
    "logits": ("AF", {"logit_softcap": 30.0}, "model.logit_softcap=30.0", "--model.logit-softcap"),
    "nulls": ("AE", {"moe.null_rho": 0.5}, "model.moe.null_rho=0.5", "--model.moe.null-rho 1"),
    "relu2 experts": ("AE", {"moe.activation": "relu2"}, "model.moe.activation=relu2", "swiglu"),
    "streams": (
        "AF",
        {"mhc": HyperConnectionConfig(streams=2)},
        "model.mhc.streams=2",
        "streams 1",
    ),
    "engram": ("AF", {"engram": EngramConfig(layers="0")}, "model.engram.layers=0", "memories"),
    "ngram": ("AF", {"ngram": NgramConfig(heads=2)}, "model.ngram.heads=2", "ngram.heads 0"),
    "capacity": (
        "AE",
        {**SOFTMAX, "moe.capacity_factor": 1.25},
        "model.moe.capacity_factor=1.25",
        "add --dropless",
    ),
    "softmax with groups": (
        "AE",
        {**SOFTMAX, "moe.num_groups": 2},
        "model.moe.num_groups=2",
        "--model.moe.num-groups 1",
    ),
    "sigmoid, gated shared": (
        "AE",
        {"moe.shared_gate": True},
        "model.moe.shared_gate=True",
        "--model.moe.shared-gate false",
    ),
    "sparse gqa": (
        "AE",
        {"attention.sparse": SPARSE},
        "model.attention.sparse.layers=all",
        "--model.attention.sparse.layers ''",
    ),
    "some sparse": (
        "AEAE",
        {**LATENT, "attention.sparse": dataclasses.replace(SPARSE, layers="1")},
        "model.attention.sparse.layers=1",
        "--model.attention.sparse.layers",
    ),
    "sparse without latent": (
        "AE",
        {**MLA, "attention.sparse": SPARSE},
        "model.attention.q_lora_rank=0",
        "--model.attention.q-lora-rank 64",
    ),
    "relu2 with norms": (
        "AF",
        {"mlp.activation": "relu2"},
        "model.mlp.activation=relu2",
        "--model.mlp.activation swiglu",
    ),
    "heads": (
        "AF",
        {"attention.qk_norm": False, "attention.num_heads": 10},
        "model.attention.num_heads=10",
        "--model.attention.num-heads 8",
    ),
    "latent softmax post": (
        "AE",
        {**MLA, **SOFTMAX},
        "model.moe.softmax_order=post",
        "softmax-order pre",
    ),
    "E before F": ("AEAF", {}, "model.moe.score=sigmoid", "--model.moe.score softmax"),
}


def changed(pattern: str, changes: dict[str, Any]) -> Config:
    base = dataclasses.replace(Config(), model=small(pattern, dim=24))
    return replace_keys(base, {f"model.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("what", REFUSED)
def test_one_line_with_a_setting_and_a_fix(what: str, record_property: Record) -> None:
    pattern, changes, start, words = REFUSED[what]
    config = changed(pattern, changes)
    with pytest.raises(ConfigError) as error:
        class_of(config.model)
    line = str(error.value)
    assert line.startswith(f"{start}: ") and words in line and ". Fix: " in line
    assert "\n" not in line and len(line) < 400
    fixed = replace_keys(config, typed(line))
    if "even --model.depth" in line:
        fixed = replace_keys(fixed, {"model.depth": 2})
    assert class_of(fixed.model)
    record_property("models without a class refused with a fix that works", 1)


def typed(line: str) -> dict[str, Any]:
    """Return what the fix of a line sets, read as the command line reads it."""
    found = re.findall(r"(--model\.[a-z0-9.-]+) ([\w']+)", line.rpartition("Fix: ")[2])
    words = [f"{flag}={value.strip(chr(39))}" for flag, value in found]
    return read_run(["tiny", *words]).given


def test_every_preset_has_a_class_or_a_line() -> None:
    found = {}
    for name, make in PRESETS.items():
        try:
            found[name] = class_of(make().model)[0].name
        except ConfigError as error:
            found[name] = str(error).partition("=")[0]
    assert found.pop("dense_110m") == "Qwen3ForCausalLM"
    assert found.pop("moe_small") == "Qwen3NextForCausalLM"
    assert found["tiny"] == found["nam56r"] == "MegacppForCausalLM"
    assert set(found.values()) == {"MegacppForCausalLM", "model.moe.capacity_factor"}


def test_the_class_is_printed_with_its_reason(tmp_path: Path, capsys: Any) -> None:
    model = dataclasses.replace(model_of("glm4"), mtp=MTPConfig(depths=1))
    final = final_folder(tmp_path / "run", built(model))
    capsys.readouterr()
    assert main(["export", str(final), "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "class Glm4MoeForCausalLM: attention: gqa, feed-forward: E alone, router: sigmoid, "
        "shared expert: plain, groups of experts, qk_norm left out: multi-token prediction"
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Left out: multi-token prediction" in card
    assert main(["export", str(final), "--out", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_dropless_is_accepted_by_name(tmp_path: Path) -> None:
    config = changed("AE", {**SOFTMAX, "moe.capacity_factor": 1.25})
    assert class_of(config.model, dropless=True)[0].name == "Qwen3NextForCausalLM"


def test_indexers_of_the_warm_up_are_left_out() -> None:
    sparse = dataclasses.replace(SPARSE, stage="dense")
    model = changed("AE", {**LATENT, "attention.sparse": sparse}).model
    assert class_of(model)[0].name == "DeepseekV3ForCausalLM"
    assert "indexers are left out" in dropped(model)[0]


def test_links_hold_every_row_of_ours_once() -> None:
    """Every case, every tensor: each row of ours is one row of theirs, the others are zeros."""
    for name in CASES:
        model = model_of(name)
        rows: dict[str, int] = {}
        for link in links(class_of(model)[0], model):
            for part in link.parts:
                rows[part.name] = rows.get(part.name, 0) + part.count
            inverse = link.rows_of_ours()
            if inverse is not None:
                assert (inverse >= 0).all() and len(inverse.unique()) == len(inverse), link.name
        shapes = our_shapes(model)
        assert rows == {key: rows_in(shapes[key]) for key in rows}, name
        biases = (
            {k for k in shapes if k.endswith("expert_bias")} if name in SOFTMAX_CASES else set()
        )
        assert shapes.keys() - rows.keys() == biases, name


SOFTMAX_CASES = {name for name in CASES if CASES[name][2].get("moe.score") == "softmax"}


def test_rows_of_the_table_name_known_features() -> None:
    for one in CLASSES:
        assert one.fits.keys() <= FEATURES.keys()
        assert not one.fits or one.fits.keys() >= FEATURES.keys() - {"qk_norm", "router"}
    assert {one.name.removesuffix("ForCausalLM") for one in CLASSES if one.fits} == {
        kind for kind, _, _ in CASES.values()
    }
