"""Messages of a run about its corpus: its command, unused ids, the verdict on its loss."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megacpp.cli.main import main
from megacpp.config import presets
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, RunConfig
from megacpp.data.corpus import Corpus
from megacpp.data.shards import INDEX, TOKENIZER, again, read_index
from megacpp.errors import ConfigError, DataError
from megacpp.run import final
from megacpp.run.corpus import check_corpus, open_corpus, prepare_command, vocabulary_lines
from megacpp.run.metrics import MetricsLog, evaluation_lines

VALUES = {
    "loss": 3.30849, "bits_per_byte": 1.43541, "gzip_bits_per_byte": 2.33539,
    "xz_bits_per_byte": 1.08764, "target_bytes": 574716.0, "complete": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_a_missing_corpus_names_the_command_for_this_preset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = presets.PRESETS[name]()
    with pytest.raises(DataError) as caught:
        open_corpus(config)
    path, size = config.data.path, config.model.vocab_size
    own = f"megacpp data prepare YOUR_TEXTS --out {path} --vocab-size {size}"
    command = "megacpp data prepare" if path == "data/torch-headers" else own
    assert str(caught.value) == f"data.path={path}: no such folder. Fix: run `{command}`."
    assert (command != own) == (name in ("tiny", "tiny_full"))


@pytest.mark.parametrize("folder", ["", "final"])
def test_a_missing_corpus_is_made_with_the_ids_of_given_weights(
    folder: str, tmp_path: Path
) -> None:
    tokenizer = tmp_path / folder / "tokenizer.json"
    tokenizer.parent.mkdir(exist_ok=True)
    tokenizer.touch()
    config = presets.tiny_chat()
    given = dataclasses.replace(config.checkpoint, init=str(tmp_path))
    config = dataclasses.replace(config, checkpoint=given)
    with pytest.raises(DataError, match=f"--out data/questions --tokenizer {tokenizer}`"):
        open_corpus(config)


def test_commands_can_be_typed_for_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths with a space, from a start, from an index and at the end of a run."""
    odd, weights = tmp_path / "a b's", tmp_path / "first weights"
    weights.mkdir()
    (weights / "tokenizer.json").touch()
    config = parse_run(["tiny", "--data.path", str(odd)], 1).config
    first = dataclasses.replace(config.checkpoint, init=str(weights))
    config = dataclasses.replace(config, checkpoint=first)
    command = shlex.split(prepare_command(config, odd))
    assert command[3:] == ["YOUR_TEXTS", "--out", str(odd), "--tokenizer", str(weights / TOKENIZER)]
    said = again({"command": "megacpp data prepare texts"}, odd).removeprefix("Fix: run ")
    assert shlex.split(said.strip("`"))[4:] == ["--out", str(odd), "--force"]
    for version in (None, 1):
        if version:
            odd.mkdir()
            index = {"format_version": version, "sha256": "", "arguments": {"source": "my texts"}}
            (odd / INDEX).write_text(json.dumps(index))
        with pytest.raises(DataError) as caught:
            read_index(odd)
        words = shlex.split(str(caught.value).split("`")[1])
        assert words[words.index("--out") + 1] == str(odd)
        assert (words[3] == "my texts") == bool(version)
    monkeypatch.setattr(final, "export_final", lambda *_: None)
    monkeypatch.setattr(final, "write_sample", lambda *_: "")
    run = dataclasses.replace(config, run=RunConfig(dir=str(odd)))
    log = cast(MetricsLog, SimpleNamespace(active=True))
    final.finish(torch.nn.Linear(1, 1), cast(Corpus, None), run, log, step=1, loss=None)
    last = capsys.readouterr().out.split("more text: ")[1]
    assert shlex.split(last) == ["megacpp", "sample", str(odd), "--prompt", "..."]


def test_a_folder_that_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "torch-headers").mkdir()
    config = parse_run(["tiny", "--data.path", str(tmp_path / "torch-headers")], 1).config
    with pytest.raises(
        DataError, match=r"holds no index\.json.*prepare --out \S+torch-headers`\.$"
    ):
        open_corpus(config)


def test_texts_in_place_of_a_corpus_are_prepared_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in the message works, and so does the path that it is to be used with."""
    monkeypatch.chdir(tmp_path)
    Path("my texts").mkdir()
    for n in range(8):
        Path("my texts", f"{n}.txt").write_text(f"Text {n}. " * 40)
    texts = [path.read_text() for path in sorted(Path("my texts").iterdir())]
    Path("one.txt").write_text("\n\n".join(8 * texts))
    for raw in ("my texts", "one.txt"):
        config = parse_run(["tiny", "--data.path", raw, "--data.seq-len", "64"], 1).config
        with pytest.raises(DataError) as caught:
            open_corpus(config)
        _, command, then = str(caught.value).split("`")
        assert main(shlex.split(command)[1:]) == 0
        assert then.startswith(" and give --data.path ")
        words = shlex.split(then.removeprefix(" and give ").removesuffix("."))
        open_corpus(parse_run(["tiny", *words, "--data.seq-len", "64"], 1).config)


def test_the_default_corpus_without_its_index_is_made_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(parse_run(["tiny"], 1).config.data.path)
    folder.mkdir(parents=True)
    (folder / "left").touch()
    with pytest.raises(DataError) as caught:
        open_corpus(parse_run(["tiny"], 1).config)
    made = f"{folder}.prepared"
    command = f"`megacpp data prepare --out {made}` and give --data.path {made}."
    assert str(caught.value).endswith(f"Fix: run {command}")


class Ids:
    """Corpus with a vocabulary only."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def lines(ids: int, *flags: str, world: int = 1) -> list[str]:
    config = parse_run(["tiny", *flags], world).config
    return vocabulary_lines(config, cast(Corpus, Ids(ids)))


def test_unused_rows_of_the_table_are_said() -> None:
    assert lines(4096) == []
    assert lines(1024) == [
        "  the corpus has 1,024 ids, the model 4,096: 3,072 rows unused (--model.vocab-size 1024)"
    ]
    assert lines(1023, "--mesh.tp", "2", world=2)[0].endswith("(--model.vocab-size 1024)")
    assert lines(4095, "--mesh.tp", "2", world=2) == [
        "  the corpus has 4,095 ids, the model 4,096: 1 rows unused"
    ]


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_corpus(Config(), cast(Any, Ids(5001)))
    assert str(caught.value) == (
        "model.vocab_size=4096: the corpus data/torch-headers has 5001 ids. "
        "Fix: use --model.vocab-size 5001 or prepare the corpus with fewer."
    )
    parallel = dataclasses.replace(Config(), mesh=dataclasses.replace(Config().mesh, tp=2))
    with pytest.raises(ConfigError, match=r"Fix: use --model\.vocab-size 5002 "):
        check_corpus(parallel, cast(Any, Ids(5001)))


def test_each_compressor_gets_its_verdict_and_says_how_it_was_used() -> None:
    assert evaluation_lines(VALUES, "") == [
        "validation: loss 3.3085, 1.4354 bits per byte of all 574,716 held-out bytes",
        "  below gzip -9 at 2.3354, each document compressed alone",
        "  NOT below xz -9 at 1.0876, all documents as one stream",
    ]


@pytest.mark.parametrize(
    ("change", "why", "words"),
    [
        ({}, "8 are too few", "8 are too few"),
        ({"complete": 0.0}, "only a part was evaluated", "only a part was evaluated"),
    ],
)
def test_no_verdict_without_enough_text(change: dict, why: str, words: str) -> None:
    shown = evaluation_lines(VALUES | change, why)
    assert not any("below" in line for line in shown)
    assert shown[1:] == [
        f"  no verdict: {words}",
        "  gzip -9 2.3354, each document compressed alone",
        "  xz -9 1.0876, all documents as one stream",
    ]
    part = "the first 574,716 bytes" if change else "all 574,716 held-out bytes"
    assert shown[0].endswith(f"of {part}")
