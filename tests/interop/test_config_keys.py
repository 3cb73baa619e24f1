"""Keys of a config.json: those that no setting expresses, odd values, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.errors import ConfigError
from megacpp.interop.hf_class import HFClass
from megacpp.interop.hf_config import read_hf_config
from megacpp.interop.keys import FULL
from megacpp.interop.layer_types import SLIDING
from megacpp.interop.table import CLASSES
from tests.interop.models import final_folder
from tests.interop.test_import import COMMON, DEEPSEEK, LLAMA3, ROUTED, YARN, transformers

# A config.json of an acceptable llama, with one change -> the key that is refused
LLAMA = {**COMMON, "model_type": "llama", "rms_norm_eps": 1e-6}
GLM = {
    **{**LLAMA, **ROUTED, "model_type": "glm4_moe"},
    "n_routed_experts": 8,
}
OLMO = {**LLAMA, "model_type": "olmo3", "layer_types": [SLIDING, FULL, SLIDING]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type=dynamic"),
    "turns": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.5}}, "high_freq_factor=2.5"),
    "short": ({"rope_scaling": LLAMA3, "max_position_embeddings": 32}, "max_position_embeddings"),
    "rope 5": ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, "rope_type=linear"),
    "truncate": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "truncate=False",
    ),
    "fewer turns": ({"rope_scaling": {**YARN, "beta_slow": 1.5}}, "beta_slow=1.5"),
    "no factor": ({"rope_scaling": {"rope_type": "yarn"}}, "factor=: is missing"),
    "shorter": ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor=0.5"),
    "temperature of a latent": (
        {
            **DEEPSEEK,
            "model_type": "deepseek_v3",
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "attention_factor": 1.3,
            },
        },
        "attention_factor=1.3",
    ),
    "bias": ({"attention_bias": True}, "attention_bias=True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias=True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=fp8"),
    "type": ({"model_type": "lama"}, "model_type=lama"),
    "size": ({"vocab_size": None}, "vocab_size=: is missing"),
    "sliding": ({"model_type": "mixtral", "sliding_window": 64}, "sliding_window=64"),
    "windows": ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=True"),
    "layer types": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
        "layer_types=sliding_attention",
    ),
    "theta of windows": ({**OLMO, "rope_theta": 1e6}, "rope_theta=500000.0"),
    "scaled windows": ({**OLMO, "rope_parameters": {SLIDING: YARN}}, "rope_type=yarn"),
    "partial": ({**GLM, "rope_scaling": YARN}, "partial_rotary_factor=0.5"),
    "mscale": (
        {
            **DEEPSEEK,
            "model_type": "deepseek_v3",
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
        },
        "mscale=1.0",
    ),
    "granite": (
        {
            "model_type": "granitemoeshared",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.01,
        },
        "attention_multiplier=0.01",
    ),
    "groups": (
        {**DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
        "topk_method=group_limited_greedy",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_key_that_no_setting_expresses_is_named(what: str, tmp_path: Path, capsys: Any) -> None:
    changes, words = REFUSED[what]
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["show", "--from", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'config.json'}: {words}") and said.count("\n") == 1
    assert "Fix: " in said


ODD_VALUES: dict[str, dict[str, Any]] = {
    "a word for a number": {"num_hidden_layers": "3"},
    "no layer": {"num_hidden_layers": 0},
    "rope is a list": {"rope_parameters": [1]},
    "factor is a word": {"rope_scaling": {**YARN, "factor": "two"}},
    "eps is a word": {"rms_norm_eps": "1e-5"},
    "ids are a word": {"vocab_size": "300"},
    "a broken width": {"hidden_size": 32.0},
    "our key is a list": {"megacpp": []},
    "our model is a number": {"megacpp": {"model": 5}},
}


@pytest.mark.parametrize("what", ODD_VALUES)
def test_odd_values_are_one_line(what: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **ODD_VALUES[what]}))
    assert main(["show", "--from", str(tmp_path)]) in (2, 4)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "Fix: " in said


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.model_type)
def test_defaults_are_those_of_transformers(one: HFClass, tmp_path: Path) -> None:
    """Keys that config.json leaves out: a wrong value would load clean."""
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "model_type": one.model_type}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rope, seen = theirs.rope_parameters.get(FULL, theirs.rope_parameters), set()
    for key, value in one.defaults.items():
        found = rope[key] if key in rope else getattr(theirs, key, "no such key")
        if found != "no such key":
            assert found == value, key
            seen.add(key)
    assert {"rms_norm_eps", "rope_theta", "hidden_act"} <= seen


def test_a_head_dim_that_is_left_out(tmp_path: Path) -> None:
    for kind, dim in (("llama", 8), ("qwen3", 128), ("mistral", 8)):
        values = {**LLAMA, "model_type": kind, "sliding_window": None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert read_hf_config(tmp_path).model.attention.head_dim == dim, kind


def test_our_settings_must_agree_with_the_other_keys(tmp_path: Path) -> None:
    from tests.interop.models import built, model_of

    final = final_folder(tmp_path / "run", built(model_of("qwen3_moe")))
    assert main(["export", str(final), "--out", str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    del config["megacpp"]["model"]["logit_softcap"]  # as an older version wrote it
    path.write_text(json.dumps(config))
    assert read_hf_config(tmp_path / "hf").model == model_of("qwen3_moe")
    path.write_text(json.dumps({**config, "norm_topk_prob": False}))
    with pytest.raises(ConfigError, match=r"model.moe.softmax_order=pre, its key 'megacpp' says"):
        read_hf_config(tmp_path / "hf")
