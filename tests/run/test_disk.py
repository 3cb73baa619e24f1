"""A run folder that can't be written to any more: exit code 4 and one line, no traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megacpp.run.failure import report
from megacpp.run.metrics import MetricsLog
from megacpp.state.training import TrainingState
from tests.launch import forked
from tests.run.test_preemption import FLAGS
from tests.test_run import records


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_turns_read_only_is_one_line(corpus: Path, tmp_path: Path, code: int) -> None:
    """After the second step; the same command goes on once it is mended."""
    write, folder = MetricsLog.write, tmp_path / "run"

    def written(self: MetricsLog, record: object) -> None:
        if getattr(record, "step", 0) == 2:
            raise OSError(code, os.strerror(code))
        write(self, record)  # type: ignore[arg-type]

    flags = [*FLAGS, "--data.path", str(corpus), "--run.dir", str(folder)]
    flags += ["--checkpoint.every", "1", "--run.steps", "4", "--train.device-batch-size", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "write", written)
        done = forked(*flags)
    assert done.returncode == 4 and done.stderr.count("\n") == 1, done.stderr
    assert f"run.dir={folder}: {os.strerror(code).lower()}. Fix: " in done.stderr
    assert not (folder / "failures").exists()
    again = forked(*flags)
    assert again.returncode == 0 and len(records(folder)) == 4, again.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_is_gone_is_not_made_anew(corpus: Path, tmp_path: Path, ranks: int) -> None:
    """After the second step; the same command goes on once the folder is back."""
    advance, folder, aside = TrainingState.advance, tmp_path / "run", tmp_path / "aside"

    def gone(self: TrainingState, updated: bool, good: bool | None = None) -> None:
        advance(self, updated, good)
        if self.step == 3 and os.environ.get("RANK", "0") == "0":
            folder.rename(aside)

    flags = [
        *FLAGS,
        "--data.path",
        str(corpus),
        "--run.dir",
        str(folder),
        "--checkpoint.every",
        "2",
    ]
    flags += ["--run.steps", "6", "--train.device-batch-size", str(2 // ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingState, "advance", gone)
        done = forked(*flags, ranks=ranks)
    assert done.returncode == 4 and done.stderr.count("\n") == 1, done.stderr
    assert str(folder) in done.stderr and ". Fix: " in done.stderr
    assert not folder.exists()
    aside.rename(folder)
    again = forked(*flags, ranks=ranks)
    assert again.returncode == 0 and "resumed at step 2 of 6" in again.stdout, again.stderr
    assert [row["step"] for row in records(folder)] == list(range(6))


@pytest.mark.parametrize(
    "code", [errno.EROFS, errno.EACCES, errno.ENOENT, errno.ESTALE, errno.EFBIG]
)
def test_a_path_in_the_folder_is_of_its_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    path = tmp_path / "checkpoints/step-000003"
    assert report(OSError(code, os.strerror(code), str(path)), tmp_path) == 4
    assert capsys.readouterr().err.count("\n") == 1
    in_bytes = OSError(code, os.strerror(code), os.fsencode(path))  # as tensorboard opens files
    assert report(in_bytes, tmp_path) == 4
    elsewhere = report(OSError(errno.ENOENT, "No such file", "/somewhere/else"), tmp_path)
    assert elsewhere == 1
