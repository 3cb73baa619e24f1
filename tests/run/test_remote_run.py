"""Runs whose saves go to a URL: a new machine goes on bit for bit."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from megacpp import urls
from megacpp.config.arguments import parse_or_exit
from megacpp.state.remote import RemoteRun
from megacpp.urls import open_store
from tests.conftest import make_bucket
from tests.run.test_async_save import contents, train
from tests.test_run import records

pytest.importorskip("fsspec")
BUCKETS = (f"bucket-{n}" for n in itertools.count())
STEADY = ("step", "loss", "grad_norm", "lr", "tokens")


def steps(folder: Path) -> list[dict[str, object]]:
    return [{key: row[key] for key in STEADY} for row in records(folder)]


def same(one: Path, two: Path) -> bool:
    """Return whether the last checkpoints, and the figures of all steps, are equal bit for bit."""
    last = "checkpoints/step-000005/"
    a, b = ({k: v for k, v in contents(f).items() if k.startswith(last)} for f in (one, two))
    return a == b and len(a) > 2 and steps(one) == steps(two)


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL in a new bucket of a served S3 API."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urls, "WAIT_S", 0.01)
    name = next(BUCKETS)
    make_bucket(name, s3)
    return f"s3://{name}/runs/one"


def at(url: str) -> RemoteRun:
    return RemoteRun(url, *open_store(url))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["", "--checkpoint.async"])
def test_killed_in_an_upload_a_new_machine_goes_on(
    corpus: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, ranks: int, how: str
) -> None:
    """SIGKILL between the files of the second upload: the bucket has step 2, a folder goes on."""
    flags = ["--checkpoint.remote", bucket, *how.split()]
    put = RemoteRun._put

    def killed(self: RemoteRun, path: Path, name: str) -> None:
        put(self, path, name)
        if "step-000002" not in name:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "_put", killed)
        done = train(corpus, tmp_path / "lost", ranks, *flags, "--run.steps", "5")
    assert done.returncode != 0
    there = at(bucket)
    assert there.names() == ["step-000002"]
    assert {name[:11] for name in there.below("checkpoints")} > {"step-000002", "latest"}
    done = train(corpus, tmp_path / "new", ranks, *flags)
    assert done.returncode == 0, done.stderr
    assert "fetching step-000002 from s3://" in done.stdout
    assert "uploaded step-000005 to s3://" in done.stdout
    assert train(corpus, tmp_path / "straight", ranks).returncode == 0
    assert same(tmp_path / "new", tmp_path / "straight")
    assert there.names()[0] == "step-000005" and there.names()[-1] == "step-000002"
    assert there.read("metrics.jsonl") == (tmp_path / "new/metrics.jsonl").read_bytes()
    again = train(corpus, tmp_path / "third", ranks, *flags)
    assert again.returncode == 0 and "nothing is left to train" in again.stdout


def test_another_number_of_ranks_keeps_the_tokens_of_a_step(
    corpus: Path, tmp_path: Path, bucket: str
) -> None:
    """Nothing is in the folder when the command line is read: the bucket has the tokens."""
    flags = ["--checkpoint.remote", bucket]
    done = train(corpus, tmp_path / "two", 2, *flags, "--run.steps", "4")
    assert done.returncode == 0, done.stderr
    more = ["--run.steps", "5", "--train.device-batch-size", "1"]
    done = train(corpus, tmp_path / "one", 1, *flags, *more)
    assert done.returncode == 0, done.stderr
    assert f"train.tokens_per_step = 96 of {bucket}/checkpoints/step-000004" in done.stdout
    assert {row["tokens"] for row in steps(tmp_path / "one")} == {96}
    older = train(corpus, tmp_path / "two", 2, *flags, "--run.steps", "5")
    assert older.returncode == 0 and "fetching step-000005" in older.stdout


def test_a_store_that_breaks_is_a_line_and_the_run_ends_well(
    corpus: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 doesn't get through, step 4 does; then the last one doesn't, and the next start's."""
    flags = ["--checkpoint.remote", bucket]
    put = RemoteRun._put

    def broken(self: RemoteRun, path: Path, name: str) -> None:
        if "step-000004" not in name:
            raise ConnectionError("reset by peer")
        put(self, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "_put", broken)
        patch.setattr(urls, "WAIT_S", 0.0)
        done = train(corpus, tmp_path / "run", 1, *flags)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert "step-000005 isn't at s3://" in said[-1] and "Fix: start the same command" in said[-1]
    assert all("ConnectionError: reset by peer" in line for line in said)
    assert "step-000005" not in at(bucket).names()
    done = train(corpus, tmp_path / "run", 1, *flags)
    assert done.returncode == 0 and "uploaded step-000005" in done.stdout
    assert at(bucket).names()[0] == "step-000005"


def test_sigterm_uploads_what_it_saves(
    corpus: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacpp.state.training import TrainingState

    advance = TrainingState.advance

    def told(self: TrainingState, *args: bool, **more: bool) -> None:
        if self.step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        advance(self, *args, **more)

    monkeypatch.setattr(TrainingState, "advance", told)
    done = train(corpus, tmp_path / "run", 2, "--checkpoint.remote", bucket)
    assert done.returncode == 75, done.stderr
    newest = at(bucket).names()[0]
    assert newest in ("step-000002", "step-000003") and newest in done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nowhere-{name}/x", "can't be written and read (FileNotFoundError"),
        ("nothing://here", "Protocol not known"),
        ("runs/here", "is no URL such as s3://bucket/run. Fix: give a URL"),
        ("file:///proc/here", "can't be written and read"),
    ],
)
def test_a_wrong_url_is_one_line_before_ranks_meet(
    corpus: Path, tmp_path: Path, bucket: str, url: str, words: str
) -> None:
    flags = ["--checkpoint.remote", url.format(name="b")]
    done = train(corpus, tmp_path / "run", 2, *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: checkpoint.remote=") and words in done.stderr
    assert done.stderr.count("\n") == 1 and "Fix:" in done.stderr
    assert not (tmp_path / "run").exists()


def test_another_run_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint.remote", f"file://{tmp_path}/store"]
    assert train(corpus, tmp_path / "run", 1, *flags, "--run.steps", "2").returncode == 0
    assert (tmp_path / "store/checkpoints/latest").read_text().startswith("step-000002 ")
    done = train(corpus, tmp_path / "run", 1, *flags, "--checkpoint.resume", "never")
    assert done.returncode == 2 and "has step-000002 of a run" in done.stderr
    assert (tmp_path / "run/checkpoints/step-000002").is_dir()


def test_without_the_package_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setattr(sys, "argv", ["train.py", "tiny", "--checkpoint.remote", "s3://a/b"])
    with pytest.raises(SystemExit) as left:
        parse_or_exit("train.py")
    assert left.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: checkpoint.remote=s3://a/b: ") and line.count("\n") == 1
    assert "Fix: pip install 'megacpp[remote]'" in line
