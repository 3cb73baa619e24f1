"""`--check` refuses a folder that transformers reads as another model, and needs transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.model import ModelConfig
from megacpp.errors import CheckpointError, ConfigError
from megacpp.interop import compare, orders
from megacpp.interop.compare import our_logits as ours
from megacpp.interop.start import check_start
from tests.interop.models import built, final_folder, model_of

pytest.importorskip("transformers")

KEY = "model.layers.1.self_attn.o_proj.weight"


ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
TURNS = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}

# Keys of config.json without which, or changed, transformers computes something else and says
# nothing: name -> (model, keys that are taken away, keys that change, setting that is named)
WRONG: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "partial": ("glm4", ("partial_rotary_factor",), {}, "model.attention.rope_fraction=0.5"),
    "interleave": ("deepseek_v3", (), {"rope_interleave": False}, "rope_interleave=False"),
    "norm of top k": ("qwen3_moe", ("norm_topk_prob",), {}, "model.moe.softmax_order=pre"),
    "rope": ("llama", ROPE, {}, "model.attention.rope_theta=10000.0"),
    "rope of experts": ("mixtral", ROPE, {}, "model.attention.rope_theta=1000000.0"),
    "rope by turns": ("llama", (), {"rope_scaling": TURNS}, "model.attention.yarn.beta_fast=4"),
    "eps": ("llama", ("rms_norm_eps",), {}, "model.norm_eps=1e-06"),
}


def plant(wrong: str, folder: Path) -> None:
    """Make a key of a folder's config.json wrong."""
    _, away, changes, _ = WRONG[wrong]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for values in (config, config["rope_parameters"]):
        for key in away:
            values.pop(key, None)
    path.write_text(json.dumps(config | changes))


def export(folder: Path, *more: str, name: str = "qwen3_tied") -> int:
    final = final_folder(folder / "run", built(model_of(name)))
    return main(["export", str(final), "--out", str(folder / "hf"), "--dtype", "fp32", *more])


def show(folder: Path) -> int:
    return main(["show", "--from", str(folder / "hf"), "--check"])


def test_one_permuted_tensor_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permuted for transformers alone, as a wrong entry in our table would have it."""
    assert export(tmp_path) == 0 and show(tmp_path) == 0
    assert "100.0% of the likeliest tokens equal" in " ".join(capsys.readouterr().out.split())
    import transformers

    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained

    def permuted(folder: Path, **settings: Any) -> Any:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors[KEY] = tensors[KEY].flip(0).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
        return loaded(folder, **settings)

    monkeypatch.setattr(auto, "from_pretrained", permuted)
    assert show(tmp_path) == 4
    said = capsys.readouterr().err.splitlines()[-1]  # behind the bar of transformers
    assert said.startswith(f"error: {tmp_path / 'hf'}: transformers ")
    assert "differ by at most" in said and "Fix: don't use it" in said


def test_an_export_in_a_wrong_order_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways with the same mistake: the folder comes back, and only numbers show it."""

    def as_they_are(model: ModelConfig, rows: Any) -> torch.Tensor:
        return torch.arange(sum(rows))

    monkeypatch.setitem(orders.ORDERS, "halves", as_they_are)  # type: ignore[arg-type]
    assert export(tmp_path, "--check") == 4
    assert "differ by at most" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", WRONG)
def test_a_key_that_disagrees_with_our_settings_is_refused(
    wrong: str, tmp_path: Path, capsys: Any
) -> None:
    assert export(tmp_path, name=WRONG[wrong][0]) == 0
    plant(wrong, tmp_path / "hf")
    capsys.readouterr()
    assert main(["show", "--from", str(tmp_path / "hf")]) == 2
    said = capsys.readouterr().err
    words = f"error: {tmp_path / 'hf' / 'config.json'}: its keys say {WRONG[wrong][-1]}, its key"
    assert said.startswith(words) and said.count("\n") == 1 and "Fix: remove 'megacpp'" in said


@pytest.mark.parametrize("wrong", WRONG)
def test_a_key_that_transformers_alone_reads_is_refused(
    wrong: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong for transformers alone, as a class without a key in our table would have it."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained

    def planted(folder: Path, **settings: Any) -> Any:
        plant(wrong, folder)
        model, info = loaded(folder, output_loading_info=True, **settings)
        assert not any(info.values()), "it loads clean"
        return model

    monkeypatch.setattr(auto, "from_pretrained", planted)
    assert export(tmp_path, "--check", name=WRONG[wrong][0]) == 4
    assert "differ by at most" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_compares_its_first_weights(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank alone; a difference, a folder of another format or no folder is one line."""
    assert export(tmp_path) == 0
    flags = ["tiny", "--checkpoint.init-check", "--run.dir", str(tmp_path / "none")]
    config = parse_run([*flags, "--checkpoint.init", str(tmp_path / "hf")], 1).config
    capsys.readouterr()
    check_start(config, False)
    assert capsys.readouterr().out == ""
    check_start(config, True)
    assert "100.0% of the likeliest tokens equal" in capsys.readouterr().out
    final = parse_run([*flags, "--checkpoint.init", str(tmp_path / "run")], 1).config
    fix = "isn't a Hugging Face folder. Fix: leave out --checkpoint.init-check"
    with pytest.raises(ConfigError, match=fix):
        check_start(final, True)
    with pytest.raises(ConfigError, match="init_check=True: needs a Hugging Face folder"):
        parse_run(flags, 1)
    monkeypatch.setattr(compare, "our_logits", lambda model, ids_BT: 1.001 * ours(model, ids_BT))
    with pytest.raises(CheckpointError, match="differ by at most"):
        check_start(config, True)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "error: check: transformers isn't installed. Fix: pip install 'megacpp[hf]'.\n"
    assert export(tmp_path, "--check") == 1
    assert capsys.readouterr().err == message
    assert show(tmp_path) == 1
    assert capsys.readouterr().err == message
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen3"
