"""Preparation on several processes: the same bytes, errors in one line, no process left behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megacpp.data import fill_store, prepare, workers
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.workers import as_they_come, in_order, worker_count
from megacpp.errors import DataError
from megacpp.outcome import started_ticks
from tests.data.conftest import make_document

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill_store, "BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)


@pytest.fixture(scope="module", params=["code", "prose", "conversations"])
def wanted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CorpusSpec:
    """Text files, a gzip file and a record file with duplicates, or conversations."""
    folder = tmp_path_factory.mktemp("source")
    if request.param == "conversations":
        talks = [
            json.dumps({"prompt": f"What is {n} and {n}?", "completion": f"{n + n}"}) + "\n"
            for n in range(90)
        ]
        (folder / "a.jsonl").write_text("".join(talks[:50]))
        (folder / "b.jsonl").write_text("".join(talks[40:]))
        return CorpusSpec(str(folder), vocab_size=300, shard_tokens=300)
    texts = [make_document(n) for n in range(60)]
    for number, text in enumerate(texts[:20]):
        (folder / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join([*lines[15:40], json.dumps({"text": ""})]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[30:]))
    (folder / "bad.txt").write_bytes(b"\xff\xfe")
    kind = "prose" if request.param == "prose" else "code"
    return CorpusSpec(str(folder), vocab_size=320, shard_tokens=900, fim_rate=0.3, text_kind=kind)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_workers_gives_the_same_bytes(wanted: CorpusSpec, tmp_path: Path) -> None:
    made = [
        contents(ensure_corpus(wanted, tmp_path / str(count), workers=count).path)
        for count in (1, 2, 3)
    ]
    assert len(made[0]) > 6 and made[0] == made[1] == made[2]
    assert len(list(tmp_path.iterdir())) == 3


def squares(number: int) -> Iterator[tuple[int, int]]:
    """Yield a few results of a job, some of them late."""
    for power in range(3):
        time.sleep(0.02 * (number % 3))
        yield number, number**power


def first_square(number: int, dies: int, fails: int) -> int:
    if number == dies:
        os._exit(9)
    if number == fails:
        raise DataError(f"{number}: is bad. Fix: leave it out.")
    return next(square for _, square in [(0, number * number)])


def test_results_come_in_order_and_once() -> None:
    jobs = list(range(1, 30))
    work = partial(first_square, dies=-1, fails=-1)
    assert list(in_order(work, iter(jobs), 3)) == [n * n for n in jobs]
    found = list(as_they_come(squares, iter(jobs), 3))
    assert sorted(found) == sorted((n, n**power) for n in jobs for power in range(3))
    for number in jobs:
        assert [p for n, p in found if n == number] == [number**power for power in range(3)]


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        ({"dies": 17, "fails": -1}, r"workers: one ended with 9 .*Fix: fewer --workers"),
        ({"dies": -1, "fails": 17}, r"17: is bad\. Fix: leave it out"),
    ],
)
def test_a_worker_that_fails_is_one_line(trap: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(in_order(partial(first_square, **trap), range(30), 2))


def test_memory_is_bounded() -> None:
    """Jobs are taken only as results are."""
    taken = 0

    def jobs() -> Iterator[int]:
        nonlocal taken
        while taken < 100:
            taken += 1
            yield taken

    results = in_order(partial(first_square, dies=-1, fails=-1), jobs(), 2)
    for _ in range(10):
        next(results)
    time.sleep(0.2)
    assert taken <= 10 + workers.QUEUED * 2
    results.close()


def test_workers_by_cores_and_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [worker_count(0, n * workers.WORTH_BYTES) for n in (0, 1, 4, 9)] == [1, 1, 4, 6]
    assert worker_count(3, 0) == 3


def test_a_broken_record_is_named_by_any_worker(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n{"text": 1}\n')
    with pytest.raises(DataError, match=r"[abc]\.jsonl line 2: field 'text' is int, not text"):
        ensure_corpus(CorpusSpec(str(tmp_path)), tmp_path / "out", workers=2)


def test_a_killed_command_takes_its_workers_along(tmp_path: Path) -> None:
    """Kill -9 among the shards; one worker then goes on, and the bytes are those of one."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for part in range(3):
        lines = [make_document(n + 700 * part) * 4 for n in range(700)]
        records = (json.dumps({"text": text}) + "\n" for text in lines)
        (texts / f"{part}.jsonl").write_text("".join(records))
    words = [sys.executable, "-m", "megacpp", "data", "prepare", str(texts)]
    words += ["--vocab-size", "300", "--shard-tokens", "100_000", "--tokenizer-bytes", "90_000"]
    child = subprocess.Popen([*words, "--out", str(tmp_path / "one"), "--workers", "2"], cwd=ROOT)
    seen: set[int] = set()
    while child.poll() is None:
        seen |= set(children(child.pid))
        journals = list(tmp_path.glob(".one.*.partial/progress.jsonl"))
        if journals and '{"shard"' in journals[0].read_text():
            break
    child.kill()
    assert child.wait() == -signal.SIGKILL and len(seen) >= 2
    while any(started_ticks(pid) is not None for pid in seen):  # pytest's timeout is the limit
        time.sleep(0.02)
    spec = CorpusSpec(str(texts), vocab_size=300, shard_tokens=100_000, tokenizer_bytes=90_000)
    again = contents(ensure_corpus(spec, tmp_path / "one", workers=1).path)
    assert again == contents(ensure_corpus(spec, tmp_path / "two", workers=1).path)


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
