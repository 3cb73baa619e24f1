"""First weights in a model of another vocabulary: rows are added by a rule, or refused by one.

Forked gloo ranks.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from megacpp.cli.main import main
from megacpp.config.schema import Config, DataConfig, MeshConfig
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import ConfigError
from megacpp.interop.compare import load_model
from megacpp.interop.load import load_weights, open_source
from megacpp.interop.places import WeightsFolder, locate
from megacpp.interop.start import other_words
from megacpp.lessons.grown import grow_tokenizer
from megacpp.model.hybrid import HybridLM
from megacpp.state.tensors import model_tensors
from parallel.build import build_model, local_part
from tests.interop.models import built, final_folder
from tests.interop.test_load import even
from tests.launch import forked
from tests.ranks import run_ranks
from tests.state.meshes import config_of, world_of
from tests.state.toy import differences

MORE, SEED = 316, 5  # the folder has 300 ids
TABLES = ("embed.weight", "head.weight")
MESHES: dict[str, tuple[MeshConfig, str]] = {
    "tied, fsdp2 tp2": (MeshConfig(dp_shard=2, tp=2), "llama_tied_yarn"),
    "tied, pp2 tp2": (MeshConfig(pp=2, dp_shard=1, tp=2), "llama_tied_yarn"),
    "pp2 tp2": (MeshConfig(pp=2, dp_shard=1, tp=2), "granite"),
    "fsdp4": (MeshConfig(dp_shard=4), "granite"),
}


def folders(home: Path, name: str) -> tuple[HybridLM, list[Path]]:
    """Return a model, and the folders that hold it: of Hugging Face's format and ours."""
    model = built(even(name))
    final = final_folder(home / "run", model)
    assert main(["export", str(final), "--out", str(home / "hf"), "--dtype", "fp32"]) == 0
    return model, [home / "hf", final]


@pytest.mark.parametrize("name", ["llama_tied_yarn", "granite"])
def test_new_rows_are_the_mean_of_the_others_and_noise(name: str, tmp_path: Path) -> None:
    model, places = folders(tmp_path, name)
    grown = dataclasses.replace(model.config, vocab_size=MORE)
    first = dict(model_tensors(model))
    for folder in places:
        found = HybridLM(grown)
        load_weights(found, open_source(locate(str(folder), ""), grown), seed=SEED)
        tensors = dict(model_tensors(found))
        for table in set(TABLES) & tensors.keys():
            whole, old = tensors.pop(table).detach(), first[table].detach()
            assert torch.equal(whole[:300], old)
            noise = whole[300:] - old.double().mean(0)
            assert 0.8 < noise.std() / grown.init_std < 1.2
            assert len({tuple(row.tolist()) for row in noise}) == 16
            assert noise.mean(0).abs().max() < 4 / 16**0.5 * grown.init_std
        assert not differences({n: first[n] for n in tensors}, tensors)


def test_new_words_are_no_other_words(corpus: Path, tmp_path: Path) -> None:
    """A grown tokenizer has the folder's words under the folder's ids; a new one hasn't."""
    texts = ["retrospect introspect " * 9]
    words = grow_tokenizer(corpus, texts, tmp_path / "grown", 2)
    assert words == ["retrospect", "introspect"]
    CorpusTokenizer.train([texts], 300).save(tmp_path / "grown/other.json")
    place, config = WeightsFolder("final", corpus), Config(data=DataConfig(str(tmp_path / "grown")))
    assert other_words(place, config) == []
    (tmp_path / "grown/other.json").replace(tmp_path / "grown/tokenizer.json")
    (line,) = other_words(place, config)
    assert re.match(r"\d+ of \d+ ids of the corpus are other words in ", line)


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_adds_the_same_rows(mesh: str, tmp_path: Path) -> None:
    axes, name = MESHES[mesh]
    model, places = folders(tmp_path, name)
    grown = dataclasses.replace(model.config, vocab_size=MORE)
    alone = HybridLM(grown)
    load_weights(alone, open_source(locate(str(places[0]), ""), grown), seed=SEED)
    wanted = {n: t.detach() for n, t in model_tensors(alone).items()}
    config = config_of(axes, grown)

    def body(rank: int, world: int) -> int:
        there = world_of(axes, world)
        found, part = build_model(config, there), local_part(there)
        new = 0
        for folder in places:
            load_weights(found, open_source(locate(str(folder), ""), grown), part, SEED)
            for n, t in model_tensors(found).items():
                mine = part(t)
                ends = zip(mine.offset, mine.local.shape, strict=True)
                box = tuple(slice(at, at + size) for at, size in ends)
                assert torch.equal(mine.local, wanted[n][box]), (folder.name, n)
                new += n in TABLES and mine.local.numel() > 0 and box[0].stop > 300
        return new

    assert any(run_ranks(body, 4))


def test_fewer_rows_are_refused(tmp_path: Path) -> None:
    model, places = folders(tmp_path, "granite")
    fewer = dataclasses.replace(model.config, vocab_size=280)
    for folder in places:
        with pytest.raises(ConfigError) as error:
            open_source(locate(str(folder), ""), fewer)
        assert str(error.value) == (
            f"model.vocab_size=280: {folder} has 300 rows, and 20 of them would be lost. "
            "Fix: use --model.vocab-size 300, or leave it out."
        )


@pytest.mark.parametrize("hashed", ["ngram.heads", "engram.layers"])
def test_hashes_of_ids_stay_as_they_are(hashed: str, tmp_path: Path) -> None:
    model = even("llama_tied_yarn")
    part, _, field = hashed.partition(".")
    value = {"heads": 2, "layers": "0"}[field]
    few = {field: value, "table_size": 40, "dim": 8}
    part_of = dataclasses.replace(getattr(model, part), **few)
    model = dataclasses.replace(model, tie_embeddings=False, **{part: part_of})
    place = locate(str(final_folder(tmp_path / "run", built(model))), "")
    grown = dataclasses.replace(model, vocab_size=MORE)
    with pytest.raises(ConfigError, match=r"^model.vocab_size=316: .* has 300 rows, and hashes"):
        open_source(place, grown)
    assert load_model(place, model).config == model


def test_a_run_with_more_ids_does_as_the_error_says(corpus: Path, tmp_path: Path) -> None:
    folders(tmp_path, "llama_tied_yarn")
    words = f"--data.path {corpus} --data.seq-len 64 --run.dir {tmp_path / 'r'} --run.steps 1"
    words += f" --checkpoint.init {tmp_path / 'hf'} --train.device-batch-size 2"
    words += " --train.tokens-per-step 128 --run.sample-tokens 0"
    refused = forked("tiny", *words.split(), ranks=1)
    assert refused.returncode == 2
    fix = re.search(r"--model.vocab-size (\d+)", refused.stderr)
    assert fix is not None and "\n" not in refused.stderr.strip(), refused.stderr
    done = forked("tiny", *words.split(), *fix[0].split(), ranks=1)
    assert done.returncode == 0, done.stderr
    lines = " ".join(done.stdout.split())
    new = int(fix[1]) - 300
    assert f"{new} rows of the vocabulary are new: the mean of the others, and noise" in lines
