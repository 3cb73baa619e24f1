"""Lines of metrics.jsonl and evaluations.jsonl that a resumed run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp.config.schema import CheckpointConfig, Config, RunConfig
from megacpp.run.metrics import MetricsLog
from megacpp.state.files import rows_by_step


@pytest.mark.parametrize("bad", [b"\xff\n", b'{"step": 1, "lo\n', b"[1]\n", b'{"step": null}\n'])
def test_unreadable_lines_are_dropped(tmp_path: Path, bad: bytes) -> None:
    """A resumed run keeps the lines before its first step and goes on behind them."""
    good = b'{"step": 0, "loss": 2.0}\n'
    files = [tmp_path / name for name in ("metrics.jsonl", "evaluations.jsonl")]
    for path in files:
        path.write_bytes(good + bad + b'{"step": 1}\n{"step": 2}\n')
    log = MetricsLog(tmp_path, Config(run=RunConfig(steps=3, tensorboard=False)), 2, active=True)
    assert files[0].read_bytes() == good + b'{"step": 1}\n'
    with files[0].open("ab") as file:
        file.write(bad)  # while the run goes on
    values = {"loss": 1.0, "bits_per_byte": None, "target_bytes": 0, "complete": True}
    log.evaluation(1, {**values, "val_loss": {"prose": 1.0}})
    log.close()
    assert rows_by_step(files[0]) == {
        0: {"step": 0, "loss": 2.0},
        1: {"step": 1, "val_loss": {"prose": 1.0}},
    }
    assert files[1].read_bytes().startswith(good + b'{"step": 1, "loss": 1.0')


@pytest.mark.parametrize("name", ["metrics", "evaluations"])
def test_lines_of_later_checkpoints_stay_beside_the_log(name: str, tmp_path: Path) -> None:
    """A resume from a named checkpoint keeps what it cuts; an automatic one doesn't."""
    lines = [f'{{"step": {step}}}\n' for step in range(6)]
    path, aside = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-before-000004.jsonl"
    run = RunConfig(steps=9, tensorboard=False)
    for source, kept in (("auto", 0), ("checkpoints/step-000004", 1), ("old/step-000004", 2)):
        path.write_text("".join(lines))
        config = Config(run=run, checkpoint=CheckpointConfig(resume=source))
        MetricsLog(tmp_path, config, 4, active=True).close()
        assert path.read_text() == "".join(lines[:4])
        rows = [json.loads(x) for x in aside.read_text().splitlines()] if kept else []
        assert len(rows) == 3 * kept and aside.exists() == bool(kept)
    for first, source in ((0, "checkpoints/step-000004"), (3, "old/step-000004")):
        assert rows[first] == {"cut_from": path.name, "checkpoint.resume": source}
        assert rows[first + 1 : first + 3] == [{"step": 4}, {"step": 5}]


def test_a_rewind_drops_what_will_be_made_again(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}}}\n' for step in range(6)]
    files = [tmp_path / name for name in ("metrics.jsonl", "evaluations.jsonl")]
    for path in files:
        path.write_text("".join(lines))
    log = MetricsLog(tmp_path, Config(run=RunConfig(steps=9, tensorboard=False)), 6, active=True)
    log.go_back(3)
    log.close()
    assert [path.read_text() for path in files] == ["".join(lines[:3])] * 2
