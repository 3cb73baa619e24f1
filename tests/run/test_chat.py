"""`megacpp chat`: history, streaming, what is left out, mistakes."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.cli.weights import tokenizer_path
from megacpp.config.schema import Config, DataConfig
from megacpp.data.conversations import SIMPLE, ChatTemplate
from megacpp.data.shards import INDEX
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.launch.record import write_config
from megacpp.model.hybrid import HybridLM
from megacpp.run.sample import generate
from megacpp.state.export import export_weights
from tests.run.test_sample import SMALL, build

Seen = list[tuple[list[int], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose tokenizer has a template."""
    home = tmp_path_factory.mktemp("runs")
    tokenizer = CorpusTokenizer.train([["user:\nassistant:\nyes no hello\n" * 3]], 300)
    tokenizer.template = SIMPLE.replace("eos_token if", "'<unk>' if")
    (home / "corpus").mkdir()
    tokenizer.save(home / "corpus" / "tokenizer.json")
    attention = dataclasses.replace(SMALL.attention, max_seq_len=64)
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size, attention=attention)
    write_config(home / "run", Config(model=config, data=DataConfig(path=str(home / "corpus"))), {})
    beside = [home / "corpus" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    export_weights(build(config, seed=1), home / "run" / "final", config, beside=beside)
    return home / "run"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the prompts and settings of each answer."""
    found: Seen = []

    def spy(model: HybridLM, prompts: Any, *args: Any, **more: Any) -> list[list[int]]:
        found.append((list(prompts[0]), more))
        return generate(model, prompts, *args, **more)

    monkeypatch.setattr("megacpp.run.text_stream.generate", spy)
    return found


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    return main(["chat", str(folder), "--max-tokens", "8", *words])


def test_what_was_said_is_in_front_of_the_next_answer(
    folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, folder, "yes\n\n no \n/new\nhello", "--system", "no") == 0
    template = ChatTemplate(CorpusTokenizer.load(folder / "final/tokenizer.json"))
    system, first = {"role": "system", "content": "no"}, {"role": "user", "content": "yes"}
    answer = {"role": "assistant", "content": capsys.readouterr().out.split("\n")[0]}
    talks = [[system, first], [system, first, answer, {"role": "user", "content": "no"}]]
    talks.append([system, {"role": "user", "content": "hello"}])
    assert [ids for ids, _ in seen] == [template.prompt_ids(messages) for messages in talks]
    assert all(more["stop_id"] == template.end for _, more in seen)


def test_an_answer_is_shown_while_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(model: HybridLM, *_: Any, stream: Callable[[int, int], None], **__: Any) -> list:
        made = CorpusTokenizer.load(folder / "final/tokenizer.json").encode("yes no")
        for i in made.tolist():
            stream(0, i)
            shown.append(capsys.readouterr().out)
        return [made.tolist()]

    shown: list[str] = []
    monkeypatch.setattr("megacpp.run.text_stream.generate", said)
    assert talk(monkeypatch, folder, "yes") == 0
    assert "".join(shown) == "yes no" and len(shown) > 1 and all(shown)
    assert capsys.readouterr().out == "\n"


def test_the_earliest_messages_leave_a_full_row(
    folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk(monkeypatch, folder, "yes no hello\n" * 6) == 0
    lengths = [len(ids) for ids, _ in seen]
    assert max(lengths) <= 64 - 8 and lengths[1] > lengths[0] and len(lengths) == 6


def test_each_answer_has_the_next_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, folder, "yes\n/new\nyes\n", "--seed", "3") == 0
    one, two, _ = capsys.readouterr().out.split("\n")
    assert talk(monkeypatch, folder, "yes\n", "--seed", "4") == 0
    assert capsys.readouterr().out == f"{two}\n" and one != two


def test_mistakes_are_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert talk(monkeypatch, folder, "hello " * 90) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: max-tokens=8: leaves 56 tokens for a message of ")
    for errors in ("strict", "surrogateescape"):  # with a locale, and in one that is called C
        lines = io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8", errors)
        monkeypatch.setattr("sys.stdin", lines)
        assert main(["chat", str(folder)]) == 2
        assert "error: message=: isn't UTF-8. Fix: " in capsys.readouterr().err
    plain = CorpusTokenizer.load(folder / "final/tokenizer.json")
    plain.template = ""
    (tmp_path / "final").mkdir()
    plain.save(tmp_path / "final/tokenizer.json")
    assert talk(monkeypatch, tmp_path, "yes") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: run={tmp_path}: its tokenizer has no chat template. Fix: ")
    assert len(error.splitlines()) == 1


def test_the_corpus_with_a_template_names_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    talks = folder.parent / "corpus"
    (folder.parent / "code").mkdir()
    for corpus in (talks, folder.parent / "code"):
        (corpus / INDEX).write_text("{}")
    data = {"path": str(talks), "mix": "code=1,corpus=1"}
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": {}, "data": data}}))
    assert tokenizer_path(tmp_path) == talks / "tokenizer.json"
