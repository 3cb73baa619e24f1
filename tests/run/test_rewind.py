"""Rewinds through `train.py` in real processes: rows that ruin steps are skipped, once and again.

Rows 12 to 17, those of steps 7 to 9, make gradients that aren't finite. A run that goes back must
be the run whose loader never saw these rows, bit for bit. Rows 4 and 5 do so in both, so that the
checkpoint has fewer updates than steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megacpp.cli.main import main
from megacpp.data.batches import Batch
from megacpp.data.loader import Loader
from megacpp.run.records import Records
from megacpp.run.step_status import StepStatus
from megacpp.state import checkpoint
from parallel.boundary import AccumulationBoundary
from parallel.step_sums import StepSums
from tests.figures import Record
from tests.launch import Done, forked
from tests.run.test_replay import forks as forks  # a fixture
from tests.test_run import ADAMW, SMALL, records

pytestmark = pytest.mark.slow

FLAGS = [*SMALL, *ADAMW, *"--run.eval-rows 8 --checkpoint.every 2 --train.max-skips 3".split()]
FLAGS += "--optim.schedule constant --optim.warmup-steps 8 --memory.calibration=".split()
EARLY, BAD = range(4, 6), range(12, 18)


def run(corpus: Path, folder: Path, *flags: str, ranks: int = 1) -> Done:
    own = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", str(2 // ranks)]
    return forked("tiny", *FLAGS, *own, *batch, "--run.steps", "10", *flags, ranks=ranks)


def rewinds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rewinds.jsonl").read_text().splitlines()]


def spoil(patch: pytest.MonkeyPatch, bad: Collection[int]) -> None:
    """Make the gradients of these rows NaN, on the rank that has them."""
    accumulate = AccumulationBoundary.accumulate

    def spoiled(self: AccumulationBoundary, batches: Iterable[Batch], step: int = 0) -> StepSums:
        taken = list(batches)
        sums = accumulate(self, taken, step)
        if any(row in bad for batch in taken for row in batch.rows):
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.mul_(float("nan"))
        return sums

    patch.setattr(AccumulationBoundary, "accumulate", spoiled)


def blind(patch: pytest.MonkeyPatch, rows: range = BAD) -> None:
    """Have the loader jump over the bad rows."""
    take = Loader.take

    def jumping(self: Loader, n: int) -> Iterator[Batch]:
        self.position = rows.stop if self.position == rows.start else self.position
        return take(self, n)

    patch.setattr(Loader, "take", jumping)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(1, ""), (2, ""), (2, "--mesh.ep 2"), (2, "--mesh.pp 2 --train.grad-accum 2")],
    ids=["one", "two", "ep", "pp"],
)
def test_a_rewound_run_never_saw_the_rows(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    mesh: str,
    record_property: Record,
) -> None:
    """A replay of it, too, goes by the rows that it read."""
    folder, twin, on = tmp_path / "run", tmp_path / "twin", mesh.split()
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {*EARLY, *BAD})
        done = run(corpus, folder, "--train.rewinds", "1", *on, ranks=ranks)
    assert done.returncode == 0, done.stderr
    saved = folder / "checkpoints/step-000006"
    line = (
        f"step 9: 3 bad steps in a row: back to {saved}, rows 12 to 17 are skipped (0 rewinds left)"
    )
    assert line in done.stdout
    (one,) = rewinds(folder)
    assert (one["from"], one["to"], one["rows"]) == (9, 6, [12, 18])
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, EARLY)
        blind(patch)
        assert run(corpus, twin, *on, ranks=ranks).returncode == 0
    same_run(folder, twin)

    # Lost between the rewind and the next save: the start after it skips the same rows.
    for path in (folder / "checkpoints").glob("step-*"):
        if path != saved:
            shutil.rmtree(path)
    # Rows 12 to 17 are good now.
    again = run(corpus, folder, "--train.rewinds", "1", *on, ranks=ranks)
    assert again.returncode == 0 and "resumed at step 6 of 10" in again.stdout, again.stderr
    same_run(folder, twin)
    assert main(["replay", str(folder), "--from", "6"]) == 0
    assert "4 of 4 steps from " in capsys.readouterr().out
    record_property("rewound runs equal bit for bit to one without the rows", 1)


def same_run(folder: Path, twin: Path) -> None:
    """Check that no figure of a step and no weight differs."""
    one, two = records(folder), records(twin)
    assert [row["step"] for row in one] == list(range(10))
    assert [row["step"] for row in one if row["skipped"]] == [EARLY.start // 2]
    for key in ("loss", "grad_norm", "lr", "bits_per_byte"):
        kept = [[row[key] for row in rows if not row["skipped"]] for rows in (one, two)]
        assert kept[0] == kept[1], key
    name = "final/model.safetensors"
    assert (folder / name).read_bytes() == (twin / name).read_bytes()


@pytest.mark.usefixtures("forks")
def test_a_rewind_waits_for_the_save_behind_the_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes longer for the last sound checkpoint than the bad steps last."""
    finish = checkpoint._finish

    def late(*args: Any) -> None:
        time.sleep(1.0)
        finish(*args)

    monkeypatch.setattr(checkpoint, "_finish", late)
    spoil(monkeypatch, {*EARLY, *BAD})
    done = run(corpus, tmp_path / "run", "--train.rewinds", "1", "--checkpoint.async")
    assert done.returncode == 0, done.stderr
    saved = tmp_path / "run/checkpoints/step-000006"
    assert f"step 9: 3 bad steps in a row: back to {saved}, rows 12 to 17" in done.stdout


def test_a_rewound_run_that_is_killed_goes_on_from_where_it_went_back(
    corpus: Path, tmp_path: Path
) -> None:
    """Stopped in the streak, whose checkpoint is given up by the rewind: no second one follows."""
    folder, begin, go_back = tmp_path / "run", Records.begin, Records.go_back

    def told(records: Records, step: int) -> None:
        records.stop.heard = "SIGTERM" if step == 7 else ""
        begin(records, step)

    def killed(records: Records) -> None:
        go_back(records)
        os._exit(1)

    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, BAD)
        for name, act, code in (("begin", told, 75), ("go_back", killed, 1), ("begin", begin, 0)):
            with patch.context() as one_start:
                one_start.setattr(Records, name, act)
                done = run(corpus, folder, "--train.rewinds", "2")
            assert done.returncode == code, done.stderr
        assert run(corpus, tmp_path / "whole", "--train.rewinds", "2").returncode == 0
    assert [one["to"] for one in rewinds(folder)] == [6], "after steps 7 and 8 one was saved"
    one, two = (tmp_path / name / "final/model.safetensors" for name in ("run", "whole"))
    assert one.read_bytes() == two.read_bytes()


def test_a_new_machine_goes_on_from_where_a_rewind_went_back(corpus: Path, tmp_path: Path) -> None:
    """Stopped after the bad steps 7 and 8; the next start's rewind is the last that the URL saw."""
    pytest.importorskip("fsspec")
    begin, go_back = Records.begin, Records.go_back
    flags = ["--train.rewinds", "2", "--checkpoint.remote", f"file://{tmp_path}/store"]

    def told(records: Records, step: int) -> None:
        records.stop.heard = "SIGTERM" if step == 7 else ""
        begin(records, step)

    def lost(records: Records) -> None:
        go_back(records)
        uploads = records.state.writer.uploads
        assert uploads is not None and uploads._thread is not None
        uploads._thread.join()
        os._exit(1)

    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, BAD)
        for name, act, code in (("begin", told, 75), ("go_back", lost, 1)):
            with patch.context() as one_start:
                one_start.setattr(Records, name, act)
                done = run(corpus, tmp_path / "run", *flags)
            assert done.returncode == code, done.stderr
        done = run(corpus, tmp_path / "new", *flags)
        assert done.returncode == 0 and "fetching step-000006 from file:" in done.stdout
        assert run(corpus, tmp_path / "whole", *flags[:2]).returncode == 0
    one, two = (tmp_path / name / "final/model.safetensors" for name in ("new", "whole"))
    assert one.read_bytes() == two.read_bytes() and len(rewinds(tmp_path / "new")) == 1


def test_a_stop_in_a_streak_that_passed_is_gone_back_to(corpus: Path, tmp_path: Path) -> None:
    """Steps 7 to 9 are bad, and so was step 5, behind which a stop saved the only checkpoint."""
    folder, begin = tmp_path / "run", Records.begin

    def told(records: Records, step: int) -> None:
        records.stop.heard = "SIGTERM" if step == 4 else ""
        begin(records, step)

    flags = "--train.rewinds 1 --checkpoint.every 100".split()
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {8, *BAD})
        with patch.context() as one_start:
            one_start.setattr(Records, "begin", told)
            assert run(corpus, folder, *flags).returncode == 75
        done = run(corpus, folder, *flags)
    assert done.returncode == 0, done.stderr
    saved = folder / "checkpoints/step-000005"
    assert f"step 9: 3 bad steps in a row: back to {saved}, rows 10 to 17 are skip" in done.stdout


def test_rewinds_are_bounded(corpus: Path, tmp_path: Path) -> None:
    """All rows from 12 on are bad: back once, back further, then the run ends."""
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, range(BAD.start, 10**6))
        done = run(corpus, folder, "--train.rewinds", "2")
        assert done.returncode == 5 and "train.max_skips=3" in done.stderr, done.stderr
        assert [(one["from"], one["to"]) for one in rewinds(folder)] == [(9, 6), (9, 4)]
        again = run(corpus, folder, "--train.rewinds", "2")
        assert again.returncode == 5 and len(rewinds(folder)) == 2, "counted over all starts"


def strengthen(patch: pytest.MonkeyPatch, rows: Collection[int]) -> None:
    """Make the gradients of these rows' steps a thousand times larger."""
    accumulate = AccumulationBoundary.accumulate

    def larger(self: AccumulationBoundary, batches: Iterable[Batch], step: int = 0) -> StepSums:
        taken = list(batches)
        sums = accumulate(self, taken, step)
        if any(row in rows for batch in taken for row in batch.rows):
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.mul_(1000.0)
        return sums

    patch.setattr(AccumulationBoundary, "accumulate", larger)


def held_out(folder: Path) -> float:
    """Return the last held-out loss."""
    return json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["loss"]


def test_a_gradient_a_thousand_times_larger_is_clipped(
    corpus: Path, tmp_path: Path, record_property: Record
) -> None:
    """Compares one bad step of 30 with a clean run, with the norm's usual limit and without."""
    losses = {}
    for name, rows in (("clean", range(0)), ("clipped", range(40, 42)), ("free", range(40, 42))):
        flags = ["--run.steps", "30", *(["--optim.clip-norm", "0"] if name == "free" else [])]
        with pytest.MonkeyPatch.context() as patch:
            strengthen(patch, rows)
            done = run(corpus, tmp_path / name, *flags)
        assert done.returncode == 0, done.stderr
        losses[name] = held_out(tmp_path / name)
        assert ("step 21: CRITICAL: gradient norm " in done.stdout) == bool(rows)
    off = {name: abs(losses[name] / losses["clean"] - 1) for name in ("clipped", "free")}
    assert off["clipped"] < 0.01 < off["free"], losses
    record_property(
        "held-out loss after one gradient x1000, off the clean run's by %", 100 * off["clipped"]
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_a_thousand_times_larger_rewind(
    corpus: Path, tmp_path: Path, ranks: int, record_property: Record
) -> None:
    """Twenty steps: their rows are skipped, as if never read; the command twice does the same."""
    flags = "--run.steps 64 --train.rewinds 1 --train.max-spikes 20 --checkpoint.every 40".split()
    rows, found = range(80, 120), []
    for name in ("run", "again"):
        with pytest.MonkeyPatch.context() as patch:
            strengthen(patch, rows)
            done = run(corpus, tmp_path / name, *flags, ranks=ranks)
        assert done.returncode == 0, done.stderr
        saved = tmp_path / name / "checkpoints/step-000040"
        assert f"20 spikes in a row: back to {saved}, rows 80 to 119 are skipped" in done.stdout
        (one,) = rewinds(tmp_path / name)
        found.append({key: value for key, value in one.items() if key != "path"})
    assert found[0] == found[1] and (found[0]["from"], found[0]["to"]) == (60, 40)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch, rows)
        assert run(corpus, tmp_path / "twin", *flags, ranks=ranks).returncode == 0
    weights = [tmp_path / name / "final/model.safetensors" for name in ("run", "again", "twin")]
    one, *others = (path.read_bytes() for path in weights)
    assert others == [one, one]
    record_property("runs with 20 gradients x1000 equal bit for bit to one without their rows", 2)


@pytest.mark.parametrize(("first", "most", "to"), [(41, 2, 40), (40, 3, 30)])
def test_spikes_rewind_too(
    corpus: Path, tmp_path: Path, record_property: Record, first: int, most: int, to: int
) -> None:
    """Ever higher losses, in two steps after 40 and in the first one after the rewind.

    Or in three steps, after whose first one a checkpoint was saved: back to the one before, which
    is there although one is kept.
    """
    check, made = AccumulationBoundary.check_step, itertools.count(1)
    factors = {first: 10, first + 1: 1e3, first + 2: 1e6}

    def high(self: AccumulationBoundary, sums: StepSums, norm: Tensor) -> StepStatus:
        status = check(self, sums, norm)
        loss = status.loss * factors.get(next(made), 1)
        return dataclasses.replace(status, loss=loss)

    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AccumulationBoundary, "check_step", high)
        flags = "--run.steps 44 --train.rewinds 2 --checkpoint.every 10 --checkpoint.keep 1"
        flags += " --train.max-spikes"
        done = run(corpus, folder, *flags.split(), str(most))
    assert done.returncode == 0, done.stderr
    (one,) = rewinds(folder)
    assert (one["from"], one["to"], one["rows"]) == (42, to, [2 * to, 84])
    assert one["why"] == f"{most} spikes in a row"
    assert [row["step"] for row in records(folder)] == list(range(44))
    record_property("spikes rewound", 1)
