"""`train.py` on different meshes, compared from outside by what it wrote.

Forked processes (tests/launch.py) on a small corpus of C++ headers; a model with every letter whose
heads, experts and vocabulary divide by two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch import forked
from tests.test_run import ADAMW, SMALL, records

pytestmark = pytest.mark.slow

MODEL = [*SMALL, "--model.attention.num-kv-heads", "2", "--model.m2rnn.num-heads", "2"]
SHORT = ["--run.steps", "6", "--checkpoint.every", "3", "--run.eval-rows", "8"]
# 4 rows a microbatch and 2 microbatches a step, however they are spread.
MESHES = {
    "tp2": (2, 4, "--mesh.tp 2"),
    "cp2": (2, 4, "--mesh.cp 2"),
    "ep2": (2, 2, "--mesh.ep 2"),
    "pp2": (2, 4, "--mesh.pp 2"),
    "pp2 tp2": (4, 4, "--mesh.pp 2 --mesh.tp 2"),
}


# Every feature; AdamW's eps as in tests/parallel/parity.py, since several streams are mixed.
FULL = (
    "--model.pattern AEAEAR --model.depth 6 --model.attention.sparse.top-k 6"
    " --model.moe.num-experts 8 --model.ngram.table-size 100"
    " --model.engram.table-size 100 --model.engram.dim 16"
    " --model.mtp.hidden-dim 32 --optim.eps 1e-5 --optim.schedule constant"
)


def train(
    corpus: Path, folder: Path, ranks: int, rows: int, flags: str, preset: str = "tiny"
) -> str:
    """Run to the end; return the screen."""
    batch = ["--train.device-batch-size", str(rows), "--train.grad-accum", "2"]
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    flags_of_all = [*MODEL, *SHORT, *ADAMW, *batch, *paths]
    done = forked(preset, *flags_of_all, *flags.split(), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    train(corpus, folder, 1, 4, "")
    return folder


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_writes_what_one_process_writes(
    corpus: Path, single: Path, tmp_path: Path, name: str
) -> None:
    """Every loss, rate and gradient norm, the held-out loss, and the exported weights."""
    ranks, rows, flags = MESHES[name]
    screen = train(corpus, tmp_path / "run", ranks, rows, flags)
    assert_close(single, tmp_path / "run")
    assert "---- sample ----" in screen
    axes = [f"{flag.removeprefix('--mesh.')} 2" for flag in flags.split()[::2]]
    assert all(axis in screen for axis in axes), screen


def test_a_run_moves_to_another_mesh(corpus: Path, single: Path, tmp_path: Path) -> None:
    """Saved at step 3 on tp 2, resumed on pp 2: the run of one process, to the end."""
    folder = tmp_path / "run"
    train(corpus, folder, 2, 4, "--mesh.tp 2 --run.steps 3 --optim.schedule constant")
    screen = train(corpus, folder, 2, 4, "--mesh.pp 2 --optim.schedule constant")
    assert "resumed at step 3 of 6" in screen
    train(corpus, tmp_path / "one", 1, 4, "--optim.schedule constant")
    assert_close(tmp_path / "one", folder)


def test_shared_choices_of_keys_are_one_run_on_any_pipeline(corpus: Path, tmp_path: Path) -> None:
    """`tiny_full` on two stages, resumed on one process and again on two: the run of one process.

    Layer 2 chooses keys and layer 4, of the second stage, takes its choice over.
    """
    one, moved = tmp_path / "one", tmp_path / "moved"
    # Three steps: with every feature on, each step magnifies rounding about tenfold.
    train(corpus, one, 1, 4, f"{FULL} --run.steps 3", "tiny_full")
    for stop, ranks in ((1, 2), (2, 1), (3, 2)):
        mesh = "--mesh.pp 2" if ranks == 2 else ""
        flags = f"{FULL} {mesh} --run.steps {stop}"
        screen = train(corpus, moved, ranks, 4, flags, "tiny_full")
        assert "keys chosen in layers 2, taken over by 4" in screen
    assert "resumed at step 2 of 3" in screen
    assert_close(one, moved, 3)


def assert_close(expected: Path, found: Path, steps: int = 6) -> None:
    assert len(records(expected)) == len(records(found)) == steps
    for a, b in zip(records(expected), records(found), strict=True):
        assert a["valid_tokens"] == b["valid_tokens"] and a["tokens"] == b["tokens"]
        assert a["lr_groups"] == b["lr_groups"], "those of every stage"
        for key in ("loss", "grad_norm", "bits_per_byte"):
            assert b[key] == pytest.approx(a[key], rel=1e-12), (key, a, b)
    one, other = (load_file(f / "final/model.safetensors") for f in (expected, found))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        difference = (tensor.double() - other[name].double()).abs().max().item()
        assert difference <= 1e-10 * tensor.abs().max().item(), name
