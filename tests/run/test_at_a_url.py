"""Runs and weights at a URL: commands and `checkpoint.init` take one as they take a folder.

The store is the memory of fsspec; a whole run against an S3 API is at the end.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp import downloads, urls
from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, DataConfig
from megacpp.data.conversations import SIMPLE
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.interop.places import locate, read_model
from megacpp.launch.record import write_config
from megacpp.state.checkpoint import save_checkpoint
from megacpp.state.export import export_weights
from megacpp.state.local_copy import local_copy
from megacpp.state.remote import RemoteRun
from megacpp.state.tensors import model_tensors
from megacpp.urls import open_store
from tests.run.test_remote_run import bucket as bucket
from tests.run.test_remote_run import train
from tests.state.small import SMALL, build
from tests.test_run import records

fsspec = pytest.importorskip("fsspec")
URL = "memory://runs/one"


def quiet(done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with records, final weights and a checkpoint of other weights."""
    home = tmp_path_factory.mktemp("runs")
    tokenizer = CorpusTokenizer.train([["user:\nassistant:\nint main() { return 0; }\n" * 3]], 300)
    tokenizer.template = SIMPLE
    tokenizer.save(home / "tokenizer.json")
    attention = dataclasses.replace(SMALL.attention, max_seq_len=64)
    model = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size, attention=attention)
    config = Config(model=model, data=DataConfig(path=str(home / "gone")))
    write_config(home / "run", config, {})
    beside = [home / "tokenizer.json", home / "tokenizer_config.json"]
    export_weights(build(model, seed=1), home / "run/final", model, beside=beside, step=40)
    tensors = {f"model.{name}": t for name, t in model_tensors(build(model, seed=2)).items()}
    extra = {"config": {"model": dataclasses.asdict(model)}}
    save_checkpoint(home / "run/checkpoints", 30, tensors, extra, keep=0)
    for name, text in {
        "metrics.jsonl": '{"step": 0, "loss": 2.5, "tokens": 9}\n',
        "samples/step-000040.txt": "int main()",
        "memory/summary.json": '{"most": 7}',
        "failures/rank-0.txt": "Traceback\nOSError: full",
        "tensorboard/events.1": "events",
        "run.lock": "held",
    }.items():
        (home / "run" / name).parent.mkdir(exist_ok=True)
        (home / "run" / name).write_text(text)
    return home / "run"


@pytest.fixture
def there(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RemoteRun]:
    """Return that run at a URL, uploaded as runs upload themselves; the cache is empty."""
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "WAIT_S", 0.0)
    monkeypatch.chdir(tmp_path)
    remote = RemoteRun(URL, *open_store(URL))
    remote.upload(run / "checkpoints/step-000030", 0, 0, quiet)
    remote.upload_final(run, quiet)
    yield remote
    remote.system.rm("/runs", recursive=True)
    (run / "uploaded.json").unlink()


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache/folders").iterdir() if path.is_dir()]


def test_everything_but_the_lock_is_there(run: Path, there: RemoteRun) -> None:
    mine = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert mine - set(there.below("")) == {"run.lock", "uploaded.json"}
    assert there.upload_final(run, quiet) == 0  # nothing twice
    there.system.rm_file("/runs/one/metrics.jsonl")
    there.upload_beside(run)
    assert there.read("metrics.jsonl") is None


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(list(words)) == 0
    found = json.loads(capsys.readouterr().out)
    return {key: value for key, value in found.items() if "second" not in key and "_s" not in key}


@pytest.mark.parametrize("checkpoint", ["final", "latest", "30"])
def test_sample(
    run: Path, there: RemoteRun, capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    words = ("--prompt", "int", "--max-tokens", "9", "--json", "--checkpoint", checkpoint)
    here = answered(capsys, "sample", str(run), *words)
    found = answered(capsys, "sample", f"{URL}/", *words)
    assert found == here | {"weights": here["weights"].replace(str(run), URL)}
    (copy,) = copies(tmp_path)  # of the weights that were asked for, and no others
    assert (copy / "checkpoints").exists() == (checkpoint != "final")
    assert (copy / "final/model.safetensors").exists() == (checkpoint == "final")


def test_report(run: Path, there: RemoteRun, capsys: pytest.CaptureFixture[str]) -> None:
    here = answered(capsys, "report", str(run), "--json")
    assert here["samples"] and here["memory"]["peaks"] == {"most": 7} and here["events"]
    assert answered(capsys, "report", URL, "--json") == here | {"folder": URL}
    assert main(["report", URL]) == 0 and URL in Path("report.html").read_text()


def test_export(run: Path, there: RemoteRun, tmp_path: Path) -> None:
    for name, source in (("here", str(run)), ("there", URL)):
        for more in ([], ["--checkpoint", "30"]):
            out = tmp_path / f"{name}{len(more)}"
            assert main(["export", source, "--out", str(out), *more]) == 0
    for end in "02":
        pairs = [(tmp_path / f"{name}{end}/model.safetensors") for name in ("here", "there")]
        assert pairs[0].read_bytes() == pairs[1].read_bytes()


def test_chat(
    run: Path,
    there: RemoteRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []
    for source in (str(run), URL):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"int\n"), "utf-8"))
        assert main(["chat", source, "--max-tokens", "8"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_settings_alone_are_fetched_for_a_plan(run: Path, there: RemoteRun, tmp_path: Path) -> None:
    """The model of first weights is known before anything starts; weights aren't fetched for it."""
    resolved = parse_run(["tiny", "--checkpoint.init", URL], 1)
    assert resolved.config.model == read_model(locate(str(run), ""))
    assert {path.suffix for copy in copies(tmp_path) for path in copy.rglob("*.*")} == {".json"}
    assert resolved.config.checkpoint.init == URL
    place = locate(f"{URL}/checkpoints/step-000030", "checkpoint.init")
    assert place.kind == "checkpoint" and read_model(place) == resolved.config.model


def test_a_folder_of_hugging_faces_format(run: Path, there: RemoteRun, tmp_path: Path) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    for path in (tmp_path / "hf").iterdir():
        there.system.pipe_file(f"/runs/hf/{path.name}", path.read_bytes())
    there.system.pipe_file("/runs/hf/pytorch_model.bin", b"the same in another form")
    place = locate("memory://runs/hf", "run")
    assert place.kind == "hf" and read_model(place).dim == SMALL.dim
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {path.name for path in place.folder.iterdir()} == names
    assert main(["sample", "memory://runs/hf", "--max-tokens", "3"]) == 0


class Breaking:
    """A store whose connection ends after some bytes of all files together."""

    def __init__(self, system: Any, left: int) -> None:
        self.system, self.left, self.read = system, left, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def open(self, name: str, mode: str) -> io.BytesIO:
        outer, whole = self, self.system.cat(name)

        class File(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if outer.left <= 0:
                    raise ConnectionError("reset by peer")
                piece = super().read(min(100, outer.left))
                outer.left -= len(piece)
                outer.read += len(piece)
                return piece

        return File(whole)


def test_a_key_does_not_leave_the_copy(there: RemoteRun, tmp_path: Path) -> None:
    """A store's keys are any text: `..` in one must not write beside the cache."""
    raw = there.system.cat_file("/runs/one/final/config.json")
    found = there.below("")
    for name in ("final/../../../../escaped", "final/../../escaped"):
        found[name] = {"name": f"/runs/one/{name}", "size": len(raw)}
    listed = {f"/runs/one/{name}": info for name, info in found.items()}

    class Store(Breaking):
        def find(self, path: str, detail: bool) -> dict[str, Any]:
            return listed

    with pytest.MonkeyPatch.context() as patch:
        store = Store(there.system, 1 << 30)
        patch.setattr("megacpp.state.local_copy.open_store", lambda url: (store, "/runs/one"))
        copy = Path(local_copy(URL, "run"))
    assert (copy / "final/manifest.json").is_file()
    assert not list(tmp_path.rglob("escaped"))


def test_half_a_download_is_never_used(
    run: Path, there: RemoteRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every start gets some bytes further; nothing comes twice; only the last one has a folder."""
    total = sum(p.stat().st_size for p in (run / "final").iterdir())
    total += (run / "config.json").stat().st_size
    read, starts = 0, 0
    while True:
        store = Breaking(there.system, total // 3)
        found = store, "/runs/one"
        monkeypatch.setattr("megacpp.state.local_copy.open_store", lambda url, found=found: found)
        try:
            copy = local_copy(URL, "run")
        except Exception as error:
            assert str(error).startswith(f"run={URL}: can't be fetched (ConnectionError: reset")
            assert [path.suffix for path in copies(tmp_path)] == [".part"]
        else:
            break
        finally:
            read, starts = read + store.read, starts + 1
    assert starts == 4 and read == total
    assert [path.suffix for path in copies(tmp_path)] == [""]
    again = Breaking(there.system, 0)
    monkeypatch.setattr("megacpp.state.local_copy.open_store", lambda url: (again, "/runs/one"))
    assert local_copy(URL, "run") == copy


def test_what_has_changed_is_fetched_again(
    run: Path, there: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older copy goes when the cache is full, unless a process uses it."""
    first = Path(local_copy(URL, "run", "settings"))
    there.system.pipe_file("/runs/one/config.json", b'{"config": {}}')
    second = Path(local_copy(URL, "run", "settings"))
    assert first != second and (second / "config.json").read_text() == '{"config": {}}'
    monkeypatch.setattr(downloads, "MOST_BYTES", 0)
    there.system.pipe_file("/runs/one/config.json", b"{}")
    third = Path(local_copy(URL, "run", "settings"))
    assert first.is_dir() and second.is_dir()  # locked by this process
    for path in (first, second):
        path.with_name(f"{path.name}.lock").unlink()
    last = Path(local_copy(f"{URL}/final", "run", "settings"))
    assert sorted(copies(tmp_path)) == sorted([third, last])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "memory://runs/none"], "run=memory://runs/none: no file is there. Fix: "),
        (["sample", URL, "--checkpoint", "7"], "checkpoint=7: memory://runs/one has no such "),
        (["sample", URL, "--checkpoint", "best"], "checkpoint=best: must be final, latest or a st"),
        (["report", f"{URL}/final"], "run=memory://runs/one/final: "),
        (
            ["export", f"{URL}/samples", "--out", "out"],
            "samples: holds no final weights, no checkpoint",
        ),
        (["sample", "nothing://here"], "run=nothing://here: ValueError: Protocol not known"),
    ],
)
def test_mistakes(
    there: RemoteRun, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and said.count("\n") == 1
    assert "Fix: " in said


def test_a_run_that_was_uploaded_is_used_where_it_is(
    corpus: Path,
    tmp_path: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks write to a served S3 API; commands, and two ranks of another run, read it."""
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    done = train(corpus, run, 2, "--checkpoint.remote", bucket, "--run.sample-tokens", "4")
    assert done.returncode == 0 and "uploaded final to s3://" in done.stdout, done.stderr
    here = answered(capsys, "report", str(run), "--json")
    assert answered(capsys, "report", bucket, "--json") == here | {"folder": bucket}
    assert here["samples"] and here["missing"]
    assert main(["eval", bucket, "--tasks", "fim", "--limit", "1"]) == 0
    assert json.loads(Path("eval/final.json").read_text())["run"] == bucket
    losses = []
    for name, source in (("a", str(run / "final")), ("b", bucket)):
        done = train(corpus, tmp_path / name, 2, "--checkpoint.init", source, "--run.steps", "1")
        assert done.returncode == 0, done.stderr
        losses.append(records(tmp_path / name)[0]["loss"])
    assert losses[0] == losses[1] and f"weights of {bucket}/final after 5 steps" in done.stdout
