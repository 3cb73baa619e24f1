"""Folders of trained runs in transformers: equal ids, equal greedy text, a working pipeline."""

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

SIZES = """--model.dim 32 --model.depth 4 --model.vocab-size 400 --model.attention.num-heads 4
 --model.attention.num-kv-heads 2 --model.attention.head-dim 8 --data.seq-len 64
 --train.device-batch-size 2 --train.tokens-per-step 256 --run.sample-tokens 0 --optim.lr 3e-3
 --optim.muon-lr 1e-2 --run.steps 40 --checkpoint.every 20"""
RUNS = {
    "dense": ("dense_110m", "--model.mlp.hidden-dim 64", "qwen3"),
    "experts": (
        "moe_small",
        "--model.moe.hidden-dim 24 --model.moe.num-experts 8 --model.moe.top-k 2 "
        "--model.moe.shared-hidden-dim 48 --mesh.ep 2",
        "qwen3_next",
    ),
}
PROMPT = "#pragma once"


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train each for a few steps on two ranks, and export it."""
    home = tmp_path_factory.mktemp("runs")
    for name, (preset, more, _) in RUNS.items():
        words = f"{SIZES} {more} --data.path {corpus} --run.dir {home / name}"
        done = forked(preset, *words.split(), ranks=2)
        assert done.returncode == 0, done.stderr
        old = os.umask(0o027)
        try:
            command = ["export", str(home / name), "--out", str(home / f"hf-{name}")]
            assert main([*command, "--dtype", "fp32", "--check"]) == 0
        finally:
            os.umask(old)
    return {name: home / name for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_greedy_text_is_that_of_sample(name: str, runs: dict[str, Path], capsys: Any) -> None:
    folder = runs[name].with_name(f"hf-{name}")
    words = ["sample", str(runs[name]), "--prompt", PROMPT, "--temperature", "0", "--json"]
    assert main([*words, "--max-tokens", "200", "--device", "cpu"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    assert text == wanted["text"]
    assert len(made) == wanted["tokens"] + wanted["ended"]
    exact = load_exported(runs[name] / "final")
    assert generate(exact, ids.tolist(), 200, stop_id=3) == [made.tolist()[: wanted["tokens"]]]
    pipe = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float32)
    (out,) = pipe(PROMPT, max_new_tokens=200, do_sample=False)
    assert out["generated_text"] == PROMPT + wanted["text"]


@pytest.mark.parametrize("name", RUNS)
def test_ids_of_the_corpus_are_equal(name: str, runs: dict[str, Path], corpus: Path) -> None:
    found = Corpus(corpus, seq_len=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(runs[name].with_name(f"hf-{name}"))
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


def test_files_of_a_folder(runs: dict[str, Path]) -> None:
    folder = runs["dense"].with_name("hf-dense")
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
    card = (folder / "README.md").read_text()
    assert "| steps | 40 |" in card and "| tokens | 10,240 |" in card
    assert "bits per byte (gzip " in card and "`Qwen3ForCausalLM`" in card


def test_a_checkpoint_and_final_weights_are_the_same_file(runs: dict[str, Path]) -> None:
    run, home = runs["experts"], runs["experts"].parent
    for of, out in (("latest", "hf-latest"), ("20", "hf-20")):
        words = ["export", str(run), "--checkpoint", of, "--out", str(home / out)]
        assert main([*words, "--dtype", "fp32"]) == 0
    files = [home / f"hf-{n}" / "model.safetensors" for n in ("experts", "latest", "20")]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert json.loads((home / "hf-20/config.json").read_text())["megacpp"]["step"] == 20
    assert "| steps | 20 |" in (home / "hf-20/README.md").read_text()


def test_bf16_rounds_once(runs: dict[str, Path]) -> None:
    home = runs["dense"].parent
    assert main(["export", str(runs["dense"]), "--out", str(home / "bf16")]) == 0
    fp32 = transformers.AutoModelForCausalLM.from_pretrained(home / "hf-dense")
    bf16 = transformers.AutoModelForCausalLM.from_pretrained(home / "bf16")
    assert bf16.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(fp32.named_parameters(), bf16.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_a_run_starts_from_a_folder_and_goes_on(runs: dict[str, Path], corpus: Path) -> None:
    """On another mesh than the weights' own; the folder may go once a step is saved."""
    home = runs["dense"].parent
    source, run = home / "first", home / "second"
    (home / "hf-dense").rename(source)
    try:
        words = f"--data.path {corpus} --data.seq-len 64 --run.dir {run} --run.sample-tokens 0"
        words += " --train.device-batch-size 2 --train.tokens-per-step 256 --optim.lr 1e-30"
        words += f" --optim.muon-lr 1e-30 --checkpoint.init {source} --mesh.tp 2"
        done = forked("tiny", *words.split(), "--run.steps", "2", ranks=2)
        assert done.returncode == 0, done.stderr
        assert f"weights of {source} after 40 steps" in " ".join(done.stdout.split())
        first, second = (load_exported(path / "final") for path in (runs["dense"], run))
        ids = torch.arange(64).view(1, 64)
        with torch.no_grad():
            a, b = first.hidden(ids), second.hidden(ids)
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()
    finally:
        source.rename(home / "hf-dense")
    done = forked("tiny", *words.split(), "--run.steps", "3", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "weights of" not in done.stdout and "step 3/3" in done.stdout
    missing = words.replace(str(run), str(home / "third"))
    done = forked("tiny", *missing.split(), ranks=2)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: checkpoint.init={source}: no such folder. Fix: ")


def test_other_words_are_told(runs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    folder = locate(str(runs["dense"].with_name("hf-dense")), "")
    tokenizer().save(tmp_path / "tokenizer.json")
    for path, lines in ((corpus, 0), (tmp_path, 1)):
        config = dataclasses.replace(Config(), data=DataConfig(path=str(path)))
        assert len(other_words(folder, config)) == lines
