"""Folder of a trained run in transformers: equal ids, equal greedy text, each file of it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp.cli.main import main
from megacpp.config.schema import Config, DataConfig
from megacpp.data.corpus import Corpus
from megacpp.interop.places import locate
from megacpp.interop.start import other_words
from megacpp.run.sample import generate
from megacpp.state.export import load_exported
from tests.interop.models import tokenizer
from tests.launch import forked

transformers = pytest.importorskip("transformers")

WORDS = """moe_small --model.dim 32 --model.depth 4 --model.vocab-size 400
 --model.attention.num-heads 4 --model.attention.num-kv-heads 2 --model.attention.head-dim 8
 --model.moe.hidden-dim 24 --model.moe.num-experts 8 --model.moe.top-k 2
 --model.moe.shared-hidden-dim 48 --mesh.ep 2 --data.seq-len 64 --train.device-batch-size 2
 --train.tokens-per-step 256 --run.sample-tokens 0 --optim.lr 3e-3 --optim.muon-lr 1e-2
 --run.steps 40 --checkpoint.every 20"""
PROMPT = "#pragma once"


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for a few steps on two ranks; export to `hf` beside the run's folder."""
    run = tmp_path_factory.mktemp("runs") / "run"
    words = f"{WORDS} --data.path {corpus} --run.dir {run}"
    done = forked(*words.split(), ranks=2)
    assert done.returncode == 0, done.stderr
    old = os.umask(0o027)
    try:
        command = ["export", str(run), "--out", str(run.with_name("hf")), "--dtype", "fp32"]
        assert main([*command, "--check"]) == 0
    finally:
        os.umask(old)
    return run


def test_greedy_text_is_that_of_sample(run: Path, capsys: Any) -> None:
    words = ["sample", str(run), "--prompt", PROMPT, "--temperature", "0", "--json"]
    assert main([*words, "--max-tokens", "200", "--device", "cpu"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf"))
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(run.with_name("hf"), dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(made, skip_special_tokens=True) == wanted["text"]
    assert len(made) == wanted["tokens"] + wanted["ended"]
    exact = load_exported(run / "final")
    assert generate(exact, ids.tolist(), 200, stop_id=3) == [made.tolist()[: wanted["tokens"]]]


def test_ids_of_the_corpus_are_equal(run: Path, corpus: Path) -> None:
    found = Corpus(corpus, seq_len=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf"))
    texts = [*found.validation_documents(), "<eos> <bos> a\n\tb", "d'été ∑ 𝔘", "", " "]
    headers = Path(torch.__file__).parent / "include"
    files = sorted((headers / "c10").rglob("*.h"))
    more = (headers / "ATen" / "ops").glob("*.h")  # the longest of its many short ones
    files += sorted(more, key=lambda path: path.stat().st_size)[-1000:]
    texts += [path.read_text(errors="replace")[:20_000] for path in files]
    assert len(texts) > 1000
    for text in texts:
        wanted = found.tokenizer.encode(text).tolist()
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted
        assert tokenizer(text)["input_ids"] == [found.tokenizer.specials.bos, *wanted]
        assert tokenizer.decode(wanted) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3, 0)


def test_files_of_a_folder(run: Path) -> None:
    folder = run.with_name("hf")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(names, 0o640)
    config = json.loads((folder / "config.json").read_text())
    assert (config["megacpp"]["step"], config["eos_token_id"], config["dtype"]) == (
        40,
        3,
        "float32",
    )
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    generation = json.loads((folder / "generation_config.json").read_text())
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    assert generation == ids | {"do_sample": False}
    card = (folder / "README.md").read_text()
    assert "| steps | 40 |" in card and "| tokens | 10,240 |" in card
    assert "bits per byte (gzip " in card and "`Qwen3NextForCausalLM`" in card


def test_a_checkpoint_and_final_weights_are_the_same_file(run: Path) -> None:
    home = run.parent
    for of, out in (("latest", "hf-latest"), ("20", "hf-20")):
        words = ["export", str(run), "--checkpoint", of, "--out", str(home / out)]
        assert main([*words, "--dtype", "fp32"]) == 0
    files = [home / name / "model.safetensors" for name in ("hf", "hf-latest", "hf-20")]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert json.loads((home / "hf-20/config.json").read_text())["megacpp"]["step"] == 20
    assert "| steps | 20 |" in (home / "hf-20/README.md").read_text()


def test_bf16_rounds_once(run: Path) -> None:
    home = run.parent
    assert main(["export", str(run), "--out", str(home / "bf16")]) == 0
    fp32 = transformers.AutoModelForCausalLM.from_pretrained(home / "hf")
    bf16 = transformers.AutoModelForCausalLM.from_pretrained(home / "bf16")
    assert bf16.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(fp32.named_parameters(), bf16.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_other_words_are_told(run: Path, corpus: Path, tmp_path: Path) -> None:
    folder = locate(str(run.with_name("hf")), "")
    tokenizer().save(tmp_path / "tokenizer.json")
    for path, lines in ((corpus, 0), (tmp_path, 1)):
        config = dataclasses.replace(Config(), data=DataConfig(path=str(path)))
        assert len(other_words(folder, config)) == lines
