"""Steps that go wrong, and steps that grow, through `train.py` in real processes.

A run that learned for four steps is resumed with a learning rate that throws its weights to 1e30:
from then on no gradient is finite.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp.state.published import latest_checkpoint
from optim.muon_adamw import MuonAdamW
from tests.figures import Record
from tests.launch import Done, forked, started
from tests.test_run import ADAMW, SMALL, records

pytestmark = pytest.mark.slow

FLAGS = [*SMALL, *ADAMW, "--run.eval-rows", "8", "--checkpoint.every", "1"]


def run(
    corpus: Path, folder: Path, ranks: int, *flags: str, how: Callable[..., Done] = forked
) -> Done:
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", str(2 // ranks)]
    return how("tiny", *FLAGS, *paths, *batch, *flags, ranks=ranks)


@pytest.fixture(scope="module")
def four(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four good steps."""
    folder = tmp_path_factory.mktemp("four") / "run"
    done = run(corpus, folder, 1, "--run.steps", "4")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_budget_of_bad_steps(corpus: Path, four: Path, tmp_path: Path) -> None:
    """Three in a row end the run; what was saved before and what is saved now stays loadable."""
    folder = tmp_path / "run"
    shutil.copytree(four, folder)
    flags = "--run.steps 20 --optim.lr 1e30 --train.max-skips 3 --checkpoint.keep 2".split()
    flags += "--optim.schedule cosine --optim.warmup-steps 0".split()
    done = run(corpus, folder, 1, *flags)
    assert done.returncode == 5, done.stderr
    assert "train.max_skips=3: " in done.stderr and done.stderr.count("\n") == 1
    rows = records(folder)
    assert [row["skipped"] for row in rows] == [False] * 5 + [True] * 3
    assert all(row["nonfinite"] > 0 for row in rows[5:])
    assert [row["lr"] for row in rows[5:]] == [rows[5]["lr"]] * 3, "the schedule waits"
    rates = [row["lr_groups"] for row in rows]  # read from the optimizer
    assert rates[5:] == [rates[5]] * 3 and rates[4] != rates[5], "the optimizer's rates wait"
    assert all(set(row["lr_groups"].values()) == {row["lr"]} for row in rows[4:])
    assert "SKIPPED" in done.stdout and "left out: " in done.stdout and "rank 0: " in done.stdout
    saved = latest_checkpoint(folder / "checkpoints")
    assert saved is not None and saved.name == "step-000005", "none since the first bad step"
    assert str(saved) in done.stderr, done.stderr.split(";")
    assert {p.name for p in saved.parent.iterdir()} >= {"step-000004", "step-000005"}
    again = run(corpus, folder, 1, *flags)
    assert again.returncode == 5 and len(records(folder)) == 8, "three more tries"


def test_a_run_that_ends_on_bad_steps_says_so(corpus: Path, four: Path, tmp_path: Path) -> None:
    """Two of three steps that `train.max_skips` allows; the run goes on with more steps."""
    folder = tmp_path / "run"
    shutil.copytree(four, folder)
    shutil.rmtree(folder / "final")
    flags = "--optim.lr 1e30 --train.max-skips 3".split()
    for _ in range(2):  # the same command makes no further step
        done = run(corpus, folder, 1, "--run.steps", "7", *flags)
        assert done.returncode == 5 and not (folder / "final").exists(), done.stderr
        assert "run.steps=7: the last steps (2) were left out" in done.stderr
        assert f"{folder}/checkpoints/step-000005 is from before them. Fix: " in done.stderr
        assert [row["skipped"] for row in records(folder)] == [False] * 5 + [True] * 2
    done = run(corpus, folder, 1, "--run.steps", "8", *flags)
    assert done.returncode == 5 and "train.max_skips=3: " in done.stderr, "counted over both starts"


def test_sanitized_steps_have_a_budget_too(corpus: Path, four: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(four, folder)
    flags = "--run.steps 20 --optim.lr 1e30 --train.max-skips 3 --train.nonfinite sanitize".split()
    done = run(corpus, folder, 1, *flags)
    assert done.returncode == 5 and "train.max_skips=3: " in done.stderr, done.stderr


def test_weights_that_are_thrown_away_are_not_exported(
    corpus: Path, four: Path, tmp_path: Path
) -> None:
    """End with the step that ruins them: nothing bad comes after it to be counted."""
    folder = tmp_path / "run"
    shutil.copytree(four, folder)
    shutil.rmtree(folder / "final")
    flags = "--run.steps 5 --optim.lr 1e300 --checkpoint.keep 2 --optim.warmup-steps 1".split()
    done = run(corpus, folder, 1, *flags)
    assert done.returncode == 5 and done.stderr.count("\n") == 1, done.stderr
    assert "at the end of the run the held-out loss is nan" in done.stderr
    saved = folder / "checkpoints/step-000004"
    assert f"{saved} is the newest sound checkpoint" in done.stderr and saved.is_dir()
    assert not (folder / "final").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_moment_that_is_not_finite_is_never_saved(
    corpus: Path,
    tmp_path: Path,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    """Plant a NaN in a moment of the last rank after step 3; the checkpoint of step 2 stays."""
    apply = MuonAdamW.step

    made = itertools.count(1)

    def step(self: MuonAdamW) -> None:
        apply(self)
        if next(made) == 3 and os.environ.get("RANK", "0") == str(ranks - 1):
            moments = [t for n, t in self.state_tensors().items() if n.endswith(".exp_avg")]
            local = moments[-1].to_local() if ranks > 1 else moments[-1]  # type: ignore[attr-defined]
            local.view(-1)[0] = float("nan")

    monkeypatch.setattr(MuonAdamW, "step", step)
    folder = tmp_path / "run"
    done = run(corpus, folder, ranks, "--run.steps", "6", "--checkpoint.keep", "1")
    assert done.returncode == 5 and done.stderr.count("\n") == 1, done.stderr
    assert (
        "after step 3 optim." in done.stderr and "has 1 values that are not finite" in done.stderr
    )
    saved = folder / "checkpoints/step-000002"
    assert f"{saved} is the newest sound checkpoint" in done.stderr
    assert [p.name for p in saved.parent.iterdir() if p.is_dir()] == [saved.name]
    record_property("moments that are not finite, never saved", 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_raising_ends_every_rank(corpus: Path, four: Path, tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    shutil.copytree(four, folder)
    flags = "--run.steps 20 --optim.lr 1e30 --train.nonfinite raise".split()
    how = forked if ranks == 1 else started  # torchrun has a word in it
    done = run(corpus, folder, ranks, *flags, how=how)
    assert done.returncode == (5 if ranks == 1 else 1), done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and ours[0].startswith("error: train.nonfinite=raise: "), done.stderr
    assert "rank 0: " in ours[0] and ". Fix: " in ours[0]
    if ranks > 1:
        assert "exitcode  : 5" in done.stderr
    assert len(records(folder)) == 5


def test_more_microbatches_as_it_goes(corpus: Path, tmp_path: Path) -> None:
    """Stop and resume a batch warmup on other ranks; then use another batch altogether."""
    warmup = "--train.grad-accum 8 --train.batch-warmup-steps 4".split()
    whole = tmp_path / "whole"
    done = run(corpus, whole, 1, *warmup, "--run.steps", "6")
    assert done.returncode == 0 and "1 to 8 microbatches over 4 steps" in done.stdout, done.stderr
    expected = records(whole)
    assert [row["grad_accum"] for row in expected] == [1, 3, 4, 6, 8, 8]
    assert [row["tokens"] for row in expected] == [2 * 48 * n for n in (1, 3, 4, 6, 8, 8)]

    parts = tmp_path / "parts"
    steps = ["--optim.warmup-steps", "1", "--optim.schedule", "constant"]
    for ranks, stop in ((1, "3"), (2, "6")):
        done = run(corpus, parts, ranks, *warmup, *steps, "--run.steps", stop)
        assert done.returncode == 0, done.stderr
    constant = tmp_path / "constant"
    assert run(corpus, constant, 1, *warmup, *steps, "--run.steps", "6").returncode == 0
    for one, two in zip(records(constant), records(parts), strict=True):
        assert one["grad_accum"] == two["grad_accum"]
        for key in ("loss", "grad_norm", "aux_z", "aux_gradient_ratio"):
            assert abs(one[key] - two[key]) <= 1e-12 * abs(one[key]), (key, one["step"])

    done = run(corpus, parts, 1, "--train.grad-accum", "2", *steps, "--run.steps", "7")
    assert done.returncode == 0, done.stderr
    assert "data go on at row 60" in done.stdout  # 2 rows of 1 + 3 + 4 + 6 + 8 + 8 microbatches
