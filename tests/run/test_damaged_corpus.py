"""A corpus that is damaged under a run: it ends with 3, and goes on once the files are mended.

Real processes (forked): a file that shrinks under a memory map would end them by SIGBUS.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacpp.state.published import latest_checkpoint
from parallel.boundary import AccumulationBoundary
from tests.figures import Record
from tests.launch import Done, forked
from tests.run.test_preemption import FLAGS
from tests.test_run import records

pytestmark = pytest.mark.slow

STEPS, AT = 8, 5


def run(corpus: Path, folder: Path, ranks: int) -> Done:
    own = ["--data.path", str(corpus), "--run.dir", str(folder), "--run.steps", str(STEPS)]
    own += ["--checkpoint.every", "2", "--train.device-batch-size", str(2 // ranks)]
    return forked(*FLAGS, *own, ranks=ranks)


def truncate(corpus: Path) -> str:
    """Truncate a shard, and return the words that name it."""
    os.truncate(corpus / "train-00000.bin", 1000)
    return f"{corpus / 'train-00000.bin'}: block "


def reverse(corpus: Path) -> str:
    """Reverse the starts of documents in place, and return the words that name them."""
    path = corpus / "train-documents.bin"
    with path.open("r+b") as file:
        file.write(np.fromfile(path, "<u8")[::-1].tobytes())
    return f"{path}: documents "


def amid(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something on the first rank before step AT."""
    accumulate = AccumulationBoundary.accumulate

    def hit(self: AccumulationBoundary, batches: Any, step: int = 0) -> Any:
        if step == AT and os.environ.get("RANK", "0") == "0":
            act()
        return accumulate(self, batches, step)

    patch.setattr(AccumulationBoundary, "accumulate", hit)


def same_run(folder: Path, twin: Path) -> None:
    """Check that two runs made the same steps and weights."""
    for one, two in zip(records(folder), records(twin), strict=True):
        assert all(one[key] == two[key] for key in ("step", "loss", "grad_norm", "lr"))
    name = "final/model.safetensors"
    assert (folder / name).read_bytes() == (twin / name).read_bytes()


@pytest.mark.parametrize(
    ("damage", "ranks"),
    [(truncate, 1), (truncate, 2), (reverse, 1)],
    ids=["truncated", "truncated-two", "reversed"],
)
def test_a_run_goes_on_once_its_corpus_is_mended(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], str],
    ranks: int,
    record_property: Record,
) -> None:
    damaged, folder, twin = (tmp_path / name for name in ("corpus", "run", "twin"))
    shutil.copytree(corpus, damaged)

    def damage_and_say() -> None:
        (tmp_path / "said").write_text(damage(damaged))

    with monkeypatch.context() as patch:
        amid(patch, damage_and_say)
        done = run(damaged, folder, ranks)
    assert done.returncode == 3, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = (tmp_path / "said").read_text()
    assert lines and all(said in line for line in lines), done.stderr
    assert all(f"--out {damaged} --force`" in line for line in lines)
    saved = latest_checkpoint(folder / "checkpoints")
    assert saved is not None and saved.name == "step-000006"  # rows of step AT were read

    shutil.copytree(corpus, damaged, dirs_exist_ok=True)
    done = run(damaged, folder, ranks)
    assert done.returncode == 0 and "resumed at step 6 of 8" in done.stdout, done.stderr
    assert run(corpus, twin, ranks).returncode == 0
    same_run(folder, twin)
    record_property("runs whose corpus was damaged under them, mended and gone on bit for bit", 1)


def test_a_shard_that_is_removed_stays_for_the_run_that_has_it_open(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a local disk; the next start is refused, and names it."""
    damaged, folder, twin = (tmp_path / name for name in ("corpus", "run", "twin"))
    shutil.copytree(corpus, damaged)
    shard = damaged / "train-00000.bin"
    with monkeypatch.context() as patch:
        amid(patch, shard.unlink)
        done = run(damaged, folder, 1)
    assert done.returncode == 0 and not shard.exists(), done.stderr
    assert run(corpus, twin, 1).returncode == 0
    same_run(folder, twin)
    done = run(damaged, folder, 1)
    assert done.returncode == 3 and f"error: {shard}: " in done.stderr, done.stderr


@pytest.mark.parametrize("text", ["", '{"eos_token": '])
def test_a_damaged_tokenizer_config_is_found_at_the_start(
    corpus: Path, tmp_path: Path, text: str
) -> None:
    """It is copied beside the final weights, and no hash is kept of it."""
    path = shutil.copytree(corpus, tmp_path / "corpus") / "tokenizer_config.json"
    path.write_text(text) if text else path.unlink()
    done = run(path.parent, tmp_path / "run", 1)
    assert done.returncode == 3 and f"{path}: is missing or damaged. Fix: " in done.stderr
    words = shlex.split(done.stderr.split("`")[1])  # which would refuse to replace it otherwise
    assert words[-3:] == ["--out", str(path.parent), "--force"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
