"""Folders with code: transformers alone computes what the run's model computes, from our source."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.cli.main import main
from megacpp.config.arguments import replace_keys
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config, ModelConfig
from megacpp.interop.classes import as_exported
from megacpp.interop.code.write import code_files
from megacpp.interop.compare import WITHIN, load_model, our_logits
from megacpp.interop.places import locate, read_model
from megacpp.model.fp32 import contract_parameters
from megacpp.run.sample import generate
from megacpp.state.export import load_exported
from megacpp.state.tensors import model_tensors
from tests.interop.models import LATENT, TURNS, WIDE, YARN, built, final_folder
from tests.model.small import SMALL_ENGRAM, SPARSE, small
from tests.state.toy import differences

pytest.importorskip("transformers")

# name -> (pattern, settings below `model`)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("AEMR", {}),
    "ranks": ("MF", {"tie_embeddings": True, "mamba3.mimo_rank": 2, "mamba3.out_norm": True}),
    "taps": ("MFRFAE", {"depth": 4, "mamba3.conv_kernel": 3, "mlp.activation": "relu2"}),
    "delta": (
        "GMAF",
        {
            **WIDE,
            "attention.softcap": 20.0,
            "attention.yarn": TURNS,
            "attention.qkv_bias": True,
            "logit_softcap": 30.0,
        },
    ),
    "nulls": ("AEME", {"moe.score": "softmax", "moe.null_rho": 0.5, "moe.shared_gate": True}),
    "plain": (
        "AFAF",
        {
            **WIDE,
            "logit_softcap": 30.0,
            "attention.window": 7,
            "attention.full_layers": "every:2",
            "attention.yarn": YARN,
        },
    ),
    "sparse": ("AMAF", {**LATENT, "attention.sparse": dataclasses.replace(SPARSE, share=2)}),
    "memories": (
        "AEMR",
        {
            "engram": SMALL_ENGRAM,
            "ngram.heads": 2,
            "ngram.table_size": 20,
            "mhc": HyperConnectionConfig(streams=2),
        },
    ),
}
IDS = torch.randint(4, 300, (2, 48), generator=torch.Generator().manual_seed(3))
PROMPTS = [IDS[0, :5].tolist(), IDS[1, :11].tolist(), IDS[0, :11].tolist()]

# Runs where nothing of megacpp can be imported: each folder's results, by its name.
ALONE = """
import sys
sys.modules["megacpp"] = None
import torch
from transformers import AutoModelForCausalLM

def load(folder, dtype=torch.float32):
    auto = AutoModelForCausalLM.from_pretrained
    model, info = auto(folder, dtype=dtype, trust_remote_code=True, output_loading_info=True)
    wrong = {k: v for k, v in info.items() if v and k != "error_msgs"}
    assert not wrong and not info["error_msgs"], info
    return model.eval()

def operators(model):
    values = vars(sys.modules[type(model).__module__]).values()
    return {v._qualname for v in values if isinstance(v, torch.library.CustomOpDef)}

@torch.no_grad()
def results(folder, given):
    model, ids, prompts = load(folder), given["ids"], given["prompts"]
    found = {"logits": model(ids).logits}
    model.generation_config.eos_token_id = None
    long = max(map(len, prompts))
    padded = torch.tensor([[0] * (long - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (long - len(p)) + [1] * len(p) for p in prompts])
    how = dict(max_new_tokens=200, do_sample=False, pad_token_id=0)
    found["together"] = model.generate(padded, attention_mask=mask, **how)[:, long:]
    how |= dict(max_new_tokens=30, use_cache=False)
    found["uncached"] = model.generate(padded, attention_mask=mask, **how)[:, long:]
    found["padded"] = model(padded, attention_mask=mask).logits[0, -len(prompts[0]):]
    found["alone"] = model(torch.tensor(prompts[:1])).logits[0]
    model.save_pretrained(folder + "-again")
    again = load(folder + "-again")
    found["again"] = again(ids).logits
    found["operators"] = [operators(model), operators(again)]
    narrow = load(folder, torch.bfloat16)
    found["narrow"] = narrow(ids).logits
    found["dtypes"] = {k: str(v.dtype) for k, v in narrow.named_parameters()}
    moved = load(folder).to(torch.bfloat16)
    found["moved"] = {k: str(v.dtype) for k, v in moved.named_parameters()}
    model.train()
    with torch.enable_grad():
        loss = model(ids, labels=ids).loss
        loss.backward()
    found["loss"] = loss.detach()
    found["gradients"] = {k: p.grad for k, p in model.named_parameters()}
    return found

given = torch.load(sys.argv[1])
torch.save({name: results(given["folder"] + name, given) for name in given["names"]}, sys.argv[2])
"""


def model_of(name: str) -> ModelConfig:
    """Return the settings of a case."""
    pattern, changes = CASES[name]
    values = {f"model.{key}": value for key, value in changes.items()}
    base = dataclasses.replace(Config(), model=small(pattern, dim=24, vocab_size=300))
    return replace_keys(base, values).model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported folders of all cases."""
    root = tmp_path_factory.mktemp("code")
    for name in CASES:
        final = final_folder(root / "runs" / name, built(model_of(name)))
        words = ["export", str(final), "--out", str(root / name), "--dtype", "fp32"]
        assert main([*words, "--to", "hf-code" if name == "plain" else "hf"]) == 0
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what transformers computes with the folders, in a process without megacpp."""
    given = {"ids": IDS, "prompts": PROMPTS, "folder": f"{folder}/", "names": list(CASES)}
    torch.save(given, folder / "given.pt")
    (folder / "alone.py").write_text(ALONE)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-P", "alone.py", "given.pt", "found.pt"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_without_megacpp(
    name: str, folder: Path, alone: dict[str, dict[str, Any]]
) -> None:
    found, model = alone[name], built(model_of(name))
    ours = our_logits(model, IDS)
    assert ours.std() > 0.1
    assert (ours - found["logits"]).abs().max() <= WITHIN * ours.abs().max()
    assert torch.equal(found["logits"], found["again"])
    made = generate(model, PROMPTS, 200)
    begun = [ids[:30] for ids in made]
    assert begun == [generate(model, [prompt], 30)[0] for prompt in PROMPTS]
    first, second = found["operators"]
    assert not first & second, (
        "torch frees the first folder's operator when the second has its name"
    )
    assert len(first) == len(second) and (bool(first) or name == "plain")
    assert found["together"].tolist() == made
    assert found["uncached"].tolist() == begun
    difference = (found["padded"] - found["alone"]).abs().max()
    assert difference <= WITHIN * found["alone"].abs().max()


def test_the_card_says_how_to_run_the_code(folder: Path) -> None:
    card = (folder / "mixed" / "README.md").read_text()
    assert "| class | `MegacppForCausalLM` |" in card and "| steps | 7 |" in card
    assert 'model="FOLDER", trust_remote_code=True)' in card
    assert "`modeling_megacpp.py`" in card and "llama.cpp" not in card


@pytest.mark.parametrize("name", CASES)
def test_bf16_keeps_the_fp32_contract(
    name: str, folder: Path, alone: dict[str, dict[str, Any]]
) -> None:
    found = alone[name]
    ours = load_exported(folder / "runs" / name / "final", dtype=torch.bfloat16)
    wide = {f"model.{key}" for key, _ in contract_parameters(ours)}
    for kind in ("dtypes", "moved"):
        assert {k for k, v in found[kind].items() if v == "torch.float32"} == wide
    assert torch.equal(found["narrow"], our_logits(ours, IDS))


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_from_a_folder(name: str, alone: dict[str, dict[str, Any]]) -> None:
    model = built(model_of(name))
    labels = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    out = model(IDS, labels)
    loss = out.loss_sum / out.valid_tokens
    loss.backward()
    assert abs(loss.item() - alone[name]["loss"].item()) <= WITHIN * loss.item()
    for key, p in model.named_parameters():
        there = alone[name]["gradients"][f"model.{key}"]
        if p.grad is None:
            assert there is None or not there.any()
        else:
            assert (there - p.grad).abs().max() <= 10 * WITHIN * p.grad.abs().max(), key


@pytest.mark.parametrize("preset", PRESETS)
def test_the_code_is_plain_torch_and_names_nothing_that_it_lacks(
    preset: str, tmp_path: Path
) -> None:
    model = PRESETS[preset]().model
    if model.moe.capacity_factor:
        model = replace_keys(Config(model=model), {"model.moe.capacity_factor": None}).model
    model = as_exported(model, own=True)
    for name, text in code_files(model).items():
        (tmp_path / name).write_text(text)
        # transformers itself needs numpy; tables of n-grams are made by it.
        assert packages(text) <= {"torch", "transformers", "numpy", *sys.stdlib_module_names}
    rules = ["--isolated", "--select", "F821,F822,F823,E9"]
    words = [sys.executable, "-m", "ruff", "check", "--no-cache", *rules, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def packages(text: str) -> set[str]:
    """Return the top names of what is imported anywhere, but from files beside it."""
    nodes = list(ast.walk(ast.parse(text)))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return {name.partition(".")[0] for name in whole | parts}


def test_check_runs_the_code_that_was_written_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "plain", tmp_path / "plain")
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "megacpp", "show", "--from", str(tmp_path / "plain"), "--check"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "100.0% of the likeliest tokens equal" in " ".join(done.stdout.split())
    code = tmp_path / "plain" / "modeling_megacpp.py"
    code.write_text(code.read_text() + "\n")
    assert main(["show", "--from", str(tmp_path / "plain"), "--check"]) == 4
    assert "isn't the code of this megacpp" in capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_a_folder_with_code_comes_back_bit_for_bit(name: str, folder: Path) -> None:
    place = locate(str(folder / name), "run")
    assert read_model(place) == as_exported(model_of(name), own=True)
    back = load_model(place, model_of(name))
    assert not differences(dict(model_tensors(built(model_of(name)))), dict(model_tensors(back)))


def test_the_code_is_the_same_in_every_process() -> None:
    """Sets of names have another order for another seed of hashes; this process has one, too."""
    words = (
        "import hashlib\n"
        "from megacpp.config.presets import tiny\n"
        "from megacpp.interop.code.write import code_files\n"
        "print(hashlib.sha256(str(code_files(tiny().model)).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", words],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "5")
    }
    own = hashlib.sha256(str(code_files(PRESETS["tiny"]().model)).encode()).hexdigest()
    assert found == {f"{own}\n"}
