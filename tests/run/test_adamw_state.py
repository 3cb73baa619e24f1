"""`train.py` with moments of AdamW in 8 bits, stopped and resumed; and where they can't be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import forked, started
from tests.test_run import SMALL, assert_same_run, half_way, records, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_the_run_that_never_stopped(
    corpus: Path, tmp_path: Path, ranks: int
) -> None:
    """20 steps against 10, a new process, and 10 more: a difference of exactly 0."""
    pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")
    flags = ["--optim.adamw-state", "8bit", "--run.eval-rows", "8"]
    whole = tmp_path / "whole"
    # A new interpreter shows what torchao says when it is imported.
    done = train(corpus, whole, ranks, *flags, run=started if ranks == 1 else forked)
    assert "torchao" not in done.stderr and (ranks > 1 or not done.stderr), "it is quiet"
    for moment in moments(whole / "checkpoints/step-000010", "optim.embed.weight.exp_avg"):
        blocks = moment.reshape(-1, 256)
        assert moment.count_nonzero() and max(len(block.unique()) for block in blocks) < 250

    folder = half_way(whole, tmp_path / "copy")
    assert "resumed at step 10 of 20" in train(corpus, folder, ranks, *flags).stdout
    assert_same_run(records(whole), records(folder), limit=0.0)
    name = "final/model.safetensors"
    assert (folder / name).read_bytes() == (whole / name).read_bytes()
    last = "checkpoints/step-000020"
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (moments(f / last, f"optim.embed.weight.{key}") for f in (folder, whole))
        assert len(ours) == ranks
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def moments(checkpoint: Path, name: str) -> list[torch.Tensor]:
    """Parts of a saved tensor, in the order of ranks."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return [content[name] for content in map(load_file, files) if name in content]


@pytest.mark.skipif(torch.cuda.is_available(), reason="`auto` would find a device to offload from")
def test_a_device_that_turns_out_to_be_a_cpu(corpus: Path, tmp_path: Path) -> None:
    """`auto` is known when ranks have met: one line all the same, and nobody's traceback."""
    paths = ["--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    flags = [*SMALL, *paths, "--optim.adamw-state", "cpu_offload"]
    for ranks, run in ((1, forked), (2, forked), (2, started)):
        done = run("tiny", *flags, ranks=ranks)
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and lines[0].startswith("error: optim.adamw_state=cpu_offload: ")
        if run is forked:
            assert done.returncode == 2 and done.stderr.count("\n") == 1
        else:
            assert "exitcode  : 2 " in done.stderr and 'train.py", line' not in done.stderr
    assert not (tmp_path / "run/failures").exists()
