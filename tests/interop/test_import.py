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
from megacpp.interop.keys import FULL
from megacpp.interop.layer_types import SLIDING
from megacpp.interop.places import locate, read_model
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
