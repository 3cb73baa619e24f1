"""Preparation killed at any moment: the next start goes on behind it, and gives the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megacpp.cli.data import PrepareArgs
from megacpp.cli.data import prepare as prepare_command
from megacpp.data import fill_store, prepare
from megacpp.data.encoding import Encoder, EncodingJob
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.data.unfinished import JOURNAL, Unfinished
from tests.data.conftest import make_document

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
TALKS = [{"prompt": f"What is {n} plus {n}?", "completion": f"It is {n + n}."} for n in range(80)]


@pytest.fixture(autouse=True)
def small_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note what was read, and encode, in pieces that a small corpus has several of."""
    monkeypatch.setattr(fill_store, "NOTE_BYTES", 3000)
    monkeypatch.setattr(fill_store, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)


@pytest.fixture(scope="module", params=["code", "conversations"])
def wanted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CorpusSpec:
    """Two record files with duplicates, a broken and an empty document; several shards."""
    folder = tmp_path_factory.mktemp("records")
    if request.param == "conversations":
        records: list[dict[str, str]] = [*TALKS, *TALKS[:3]]
    else:
        texts = [make_document(n) for n in range(60)]
        records = [{"text": text} for text in (*texts[:30], "", "\ud800", *texts[20:])]
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "a.jsonl").write_text("".join(lines[:50]))
    (folder / "b.jsonl").write_text("".join(lines[50:]))
    rate, tokens = (0.3, 900) if request.param == "code" else (0.0, 200)
    return CorpusSpec(
        str(folder), vocab_size=300, shard_tokens=tokens, validation_fraction=0.2, fim_rate=rate
    )


@pytest.fixture
def undisturbed(wanted: CorpusSpec, tmp_path: Path) -> dict[str, bytes]:
    made = contents(ensure_corpus(wanted, tmp_path / "undisturbed" / "corpus").path)
    assert len(made) > 8
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(spec: CorpusSpec, out: Path, arrange: Callable[[], None]) -> bool:
    """Prepare in a forked process, in which `arrange` sets a trap; return whether it was killed."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            arrange()
            ensure_corpus(spec, out)
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def before_call(folder: Path, number: int) -> None:
    """Die before a file system call below a folder."""
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == number:
                die()

    sys.addaudithook(hook)


def after_line(number: int, cut: int = 0) -> None:
    """Die once a journal has so many lines, and without the last bytes of the last one."""
    real, seen = Unfinished._append, 0

    def append(self: Unfinished, record: dict[str, object]) -> None:
        nonlocal seen
        real(self, record)
        seen += 1
        if seen == number:
            if cut:
                path = self.folder / JOURNAL
                os.truncate(path, path.stat().st_size - cut)
            die()

    Unfinished._append = append  # type: ignore[method-assign]  # in the forked process


def test_killed_before_every_file_system_call(
    wanted: CorpusSpec, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    for number in range(1, 400, 1 if wanted.fim_rate else 4):
        out = tmp_path / str(number) / "corpus"
        out.parent.mkdir()
        ended = killed(wanted, out, lambda n=number, at=out.parent: before_call(at, n))
        made = ensure_corpus(wanted, out)
        assert contents(made.path) == undisturbed, number
        assert [path.name for path in out.parent.iterdir()] == ["corpus"], number
        if not ended:
            break
    assert 20 < number < 399


@pytest.mark.parametrize("cut", [0, 5])
def test_killed_after_every_note(
    cut: int,
    wanted: CorpusSpec,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing that a line counts is read, learned or encoded again."""
    encoded = learned = 0
    encode, train = Encoder.__call__, CorpusTokenizer.train

    def counting(self: Encoder, job: EncodingJob) -> list:
        nonlocal encoded
        encoded += len(job.sizes)
        return encode(self, job)

    def learning(*args) -> CorpusTokenizer:
        nonlocal learned
        learned += 1
        return train(*args)

    monkeypatch.setattr(Encoder, "__call__", counting)
    monkeypatch.setattr(CorpusTokenizer, "train", staticmethod(learning))
    left = []
    for number in range(1, 100):
        out = tmp_path / str(number) / "corpus"
        if not killed(wanted, out, lambda n=number: after_line(n, cut)):
            break
        encoded = learned = 0
        capsys.readouterr()
        assert contents(ensure_corpus(wanted, out).path) == undisturbed
        said = [line for line in capsys.readouterr().err.splitlines() if "killed" in line]
        assert len(said) == 1
        left.append((said[0].partition("finished ")[2], learned, encoded))
    kept = [words for words, _, _ in left]
    assert any("documents" in words and "tokenizer" not in words for words in kept)
    assert any("the tokenizer" in words and "shards" not in words for words in kept)
    assert any("3 shards of" in words for words in kept)
    assert all(again == ("tokenizer" not in words) for words, again, _ in left)
    counts = [count for _, _, count in left]
    assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0] / 3


def test_killed_again_and_again(
    wanted: CorpusSpec, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Each start adds two lines to the journal and dies."""
    out, starts = tmp_path / "corpus", 0
    while killed(wanted, out, lambda: after_line(2)):
        starts += 1
    assert contents(out) == undisturbed and starts > 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("setting", "seed=42 there, 1 here"),
        ("source", "the files of the source have changed"),
        ("tokenizer", "the tokenizer has changed"),
        ("document", "documents isn't as it was written"),
        ("shard", "train-00001.bin isn't as it was written"),
        ("offsets", "train-00000.bin isn't as it was written"),
        ("learned", "tokenizer.json isn't as it was written"),
    ],
)
def test_something_else_is_made_anew(
    change: str,
    why: str,
    wanted: CorpusSpec,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, spec = tmp_path / "corpus", wanted
    if change == "tokenizer":
        ensure_corpus(wanted, tmp_path / "first")
        given = str(tmp_path / "first" / "tokenizer.json")
        spec = dataclasses.replace(wanted, vocab_size=0, tokenizer=given)
    assert killed(spec, out, before_the_index)
    (left,) = (path for path in tmp_path.iterdir() if path.name.endswith(".partial"))
    if change == "setting":
        spec = dataclasses.replace(wanted, seed=1)
    elif change == "source":
        os.utime(Path(wanted.source, "a.jsonl"))
    elif change == "tokenizer":
        text = Path(spec.tokenizer).read_text()
        Path(spec.tokenizer).write_text(text + "\n")
    else:
        names = {
            "document": "documents",
            "shard": "corpus/train-00001.bin",
            "offsets": "corpus/train-documents.bin",
            "learned": "corpus/tokenizer.json",
        }
        raw = bytearray((left / names[change]).read_bytes())
        raw[20] ^= 1
        (left / names[change]).write_bytes(raw)
    capsys.readouterr()
    ensure_corpus(spec, out)
    assert why in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    made = contents(ensure_corpus(spec, tmp_path / "other").path)
    assert contents(out) == made
    if change not in ("setting", "tokenizer"):
        assert made == undisturbed


def before_the_index() -> None:
    prepare.write_index = lambda *_: die()  # in the forked process


def test_a_living_start_keeps_its_folder(wanted: CorpusSpec, tmp_path: Path) -> None:
    """Two at once make the corpus twice; the second to finish takes the first one's."""
    out, waiting = tmp_path / "corpus", tmp_path / "waiting"
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            real = prepare.write_index

            def wait(*args) -> None:
                waiting.touch()
                while not (out / "index.json").exists():
                    time.sleep(0.01)
                real(*args)

            prepare.write_index = wait
            os._exit(int(ensure_corpus(wanted, out).made))
        os._exit(9)
    while not waiting.exists():
        time.sleep(0.01)
    assert ensure_corpus(wanted, out).made
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "waiting"]


def test_killed_while_it_replaces_a_corpus(
    wanted: CorpusSpec, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """With --force the corpus that was there stays until the new one takes its place."""
    out = tmp_path / "corpus"
    before = ensure_corpus(dataclasses.replace(wanted, seed=9), out)
    pid = os.fork()
    if not pid:
        real = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.name == "corpus" and self != out:
                die()
            return real(self, target)

        Path.rename = rename  # type: ignore[method-assign]
        with suppress(BaseException):
            ensure_corpus(wanted, out, force=True)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and not out.exists()
    with pytest.raises(prepare.ConfigError, match="holds a corpus with seed=9"):
        ensure_corpus(dataclasses.replace(wanted, seed=8), out)
    assert json.loads((out / "index.json").read_text())["arguments"] == before.index["arguments"]
    assert contents(ensure_corpus(wanted, out, force=True).path) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_command_says_what_stays(
    number: int,
    wanted: CorpusSpec,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "corpus"
    values = {f.name: getattr(wanted, f.name) for f in dataclasses.fields(wanted)}
    args = PrepareArgs(**values, out=str(out))
    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(prepare, "write_index", interrupted)
        prepare_command(args)
    assert isinstance(caught.value, SystemExit | KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"{out}: " in (said := capsys.readouterr().err) and "the same command goes on" in said
    prepare_command(args)
    assert "going on behind a killed start, which finished" in capsys.readouterr().err
    assert contents(out) == undisturbed
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_the_command_killed_and_started_again(tmp_path: Path) -> None:
    """Kill a real `megacpp data prepare` as soon as its journal has a shard."""
    noise = np.random.default_rng(0)
    words = [f"word{n}" for n in range(3000)]
    with (tmp_path / "texts.jsonl").open("w") as file:
        for _ in range(3000):
            text = " ".join(words[i] for i in noise.integers(0, 3000, 150))
            file.write(json.dumps({"text": text}) + "\n")
    words = [sys.executable, "-m", "megacpp", "data", "prepare", str(tmp_path / "texts.jsonl")]
    words += ["--vocab-size", "400", "--shard-tokens", "60_000", "--tokenizer-bytes", "100_000"]
    root = Path(__file__).parents[2]
    child = subprocess.Popen([*words, "--out", str(tmp_path / "one")], cwd=root)
    while child.poll() is None:
        journals = list(tmp_path.glob(f".one.*.partial/{JOURNAL}"))
        if journals and '{"shard"' in journals[0].read_text():
            break
        time.sleep(0.002)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    made = {}
    for name in ("one", "two"):
        done = subprocess.run(
            [*words, "--out", str(tmp_path / name)],
            cwd=root, capture_output=True, text=True, check=True,
        )  # fmt: skip
        made[name] = contents(tmp_path / name)
        said = "going on behind a killed start, which finished 3,000 documents" in done.stderr
        assert said == (name == "one")
    assert made["one"] == made["two"]
