"""Folders that transformers itself writes: read here, same logits; written again, same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megacpp.cli.main import main
from megacpp.errors import ConfigError
from megacpp.interop.compare import WITHIN, load_model, our_logits
from megacpp.interop.hf_class import HFClass
from megacpp.interop.hf_config import read_hf_config
from megacpp.interop.keys import FULL
from megacpp.interop.layer_types import SLIDING
from megacpp.interop.places import locate, read_model
from megacpp.interop.table import CLASSES
from tests.interop.models import final_folder
from tests.interop.real_text import assert_equal_on_text

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN_MOE = {**COMMON, **ROUTED, "num_experts": 6, "head_dim": 12}
DEEPSEEK = {
    **{**COMMON, **ROUTED, "num_key_value_heads": 4},
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
WIDE_MLA = {"hidden_size": 48, "q_lora_rank": 24}

# name -> (class, its configuration, what save_pretrained is given)
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", COMMON, {}),
    "llama_wide_heads": ("Llama", {**COMMON, "head_dim": 12, "rope_theta": 5e5}, {}),
    "llama_yarn": ("Llama", {**COMMON, "rope_parameters": YARN}, {}),
    "llama_yarn_mscale": (
        "Llama",
        {**COMMON, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {},
    ),
    "llama3": ("Llama", {**COMMON, "rope_parameters": LLAMA3}, {}),
    "qwen2": ("Qwen2", COMMON, {}),
    "mistral": ("Mistral", {**COMMON, "sliding_window": None}, {}),
    "mistral_window": ("Mistral", {**COMMON, "sliding_window": 9}, {}),
    "arcee": ("Arcee", {**COMMON, "rms_norm_eps": 1e-5}, {}),
    "qwen3_tied": ("Qwen3", {**COMMON, "tie_word_embeddings": True, "head_dim": 16}, {}),
    "qwen3_sharded": ("Qwen3", {**COMMON, "head_dim": 16}, {"max_shard_size": "20KB"}),
    "olmo2": ("Olmo2", COMMON, {}),
    "olmo3": ("Olmo3", {**COMMON, "num_hidden_layers": 5, "sliding_window": 9}, {}),
    "olmo3_yarn": (
        "Olmo3",
        {
            **COMMON,
            "sliding_window": 9,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        },
        {},
    ),
    "olmoe": ("Olmoe", {**COMMON, "num_experts": 6, "num_experts_per_tok": 2}, {}),
    "mixtral": ("Mixtral", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE, {}),
    "qwen3_moe_step": (
        "Qwen3Moe",
        {**QWEN_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True, "num_hidden_layers": 4},
        {},
    ),
    "qwen3_moe_only": ("Qwen3Moe", {**QWEN_MOE, "mlp_only_layers": [1]}, {}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **COMMON,
            **ROUTED,
            "num_experts": 6,
            "shared_expert_intermediate_size": 28,
            "qkv_bias": False,
        },
        {},
    ),
    "qwen2_moe_bias": (
        "Qwen2Moe",
        {**COMMON, **ROUTED, "num_experts": 6, "shared_expert_intermediate_size": 28},
        {},
    ),
    "granite": (
        "GraniteMoeShared",
        {
            **COMMON,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "attention_multiplier": 8**-0.5,
        },
        {},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **QWEN_MOE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 28,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 8,
        },
        {},
    ),
    "glm4": (
        "Glm4Moe",
        {
            **COMMON,
            **ROUTED,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "use_qk_norm": True,
            "partial_rotary_factor": 1.0,
            "num_mtp_layers": 0,
        },
        {},
    ),
    "glm4_published": (
        "Glm4Moe",
        {
            **COMMON,
            **ROUTED,
            "n_routed_experts": 8,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
        {},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**DEEPSEEK, "n_group": None, "topk_group": None, "n_shared_experts": 1},
        {},
    ),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "num_mtp_layers": 0}, {}),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_interleave": False, "q_lora_rank": None, "num_mtp_layers": 0},
        {},
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
            "num_mtp_layers": 0,
        },
        {},
    ),
    "deepseek_v32": ("DeepseekV32", {**DEEPSEEK, **INDEX}, {}),
    "glm_dsa": (
        "GlmMoeDsa",
        {
            **DEEPSEEK,
            **INDEX,
            "indexer_types": ["full", "shared", "shared", "full"],
            "num_hidden_layers": 4,
        },
        {},
    ),
}
IDS = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(5))
ROTATED = tuple(f"{name}.weight" for name in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"))


def saved(name: str, folder: Path) -> Any:
    """Write a random model of transformers, norms and biases included; return it."""
    kind, values, how = FOLDERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, t in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in key:
                t.copy_(0.75 + torch.rand(t.shape))
                if kind == "Qwen3Next":  # published in bf16; 1 is added to these
                    t.copy_((t - 1).bfloat16())
            elif "inv_freq" not in key:
                t.mul_(6).add_(0.05 * torch.randn(t.shape) if "bias" in key else 0)
    model.save_pretrained(folder, **how)
    return model


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_transformers_is_read_and_written_again(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "hf")
    place = locate(str(tmp_path / "hf"), "from")
    settings = read_model(place)
    ours = load_model(place, settings)
    with torch.no_grad():
        wanted = theirs(IDS).logits
    assert wanted.std() > 0.1
    assert (our_logits(ours, IDS) - wanted).abs().max() <= WITHIN * wanted.abs().max()
    assert_equal_on_text(ours, theirs)
    final = final_folder(tmp_path / "run", ours)
    assert main(["export", str(final), "--out", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    written, first = tensors(tmp_path / "out"), tensors(tmp_path / "hf")
    assert written.keys() == first.keys()
    for key in first:
        # Rows that rope pairs as halves are written in the order of pairs.
        if name == "deepseek_v3_halves" and key.endswith(ROTATED):
            assert sorted(written[key].tolist()) == sorted(first[key].tolist())
        else:
            assert torch.equal(written[key], first[key]), key


def test_null_is_false_as_for_transformers(tmp_path: Path) -> None:
    saved("deepseek_v3_halves", tmp_path)
    path, found = tmp_path / "config.json", []
    values = json.loads(path.read_text())
    for value in (False, None, True):
        path.write_text(json.dumps(values | {"rope_interleave": value}))
        place = locate(str(tmp_path), "from")
        found.append(our_logits(load_model(place, read_model(place)), IDS))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_value_that_breaks_a_rule_of_the_model_is_named(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"n_group": 3}))
    with pytest.raises(ConfigError) as error:
        read_model(locate(str(tmp_path), "from"))
    assert f"{path}: model.moe.num_groups=3: " in str(error.value) and ". Fix: " in str(error.value)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.parametrize(
    "name", ["llama_yarn", "llama3", "deepseek_v3_yarn", "glm4", "glm4_published", "mixtral"]
)
def test_keys_of_version_4_alone(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config |= {"partial_rotary_factor": p} if (p := rope.pop("partial_rotary_factor", None)) else {}
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    path.write_text(json.dumps(config))
    place = locate(str(tmp_path / "hf"), "from")
    ours = load_model(place, read_model(place))
    with torch.no_grad():
        wanted = theirs(IDS).logits
    assert (our_logits(ours, IDS) - wanted).abs().max() <= WITHIN * wanted.abs().max()


AS_THERE: dict[str, tuple[str, dict[str, Any]]] = {
    "no quantisation": ("llama", {"quantization_config": None}),
    "named layers outweigh a window": ("mistral_window", {"layer_types": [FULL] * 3}),
    "halves that one class alone reads": ("deepseek_v32", {"rope_interleave": False}),
    "halves of indexed layers": ("glm_dsa", {"rope_interleave": False}),
}


@pytest.mark.parametrize("what", AS_THERE)
def test_a_key_means_what_transformers_takes_it_for(what: str, tmp_path: Path) -> None:
    name, changes = AS_THERE[what]
    saved(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    place = locate(str(tmp_path), "from")
    ours = load_model(place, read_model(place))
    with torch.no_grad():
        wanted = theirs(IDS).logits
    assert (our_logits(ours, IDS) - wanted).abs().max() <= WITHIN * wanted.abs().max()


def test_bf16_weights_are_read_as_they_are(tmp_path: Path) -> None:
    theirs = saved("qwen3_tied", tmp_path / "hf").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "bf16")
    place = locate(str(tmp_path / "bf16"), "from")
    ours = load_model(place, read_model(place))
    assert torch.equal(ours.embed.weight, theirs.model.embed_tokens.weight.float())


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
