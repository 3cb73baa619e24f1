"""Batch warmup, a pure function of the step: end points, growth, rows that tile."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from megacpp.config.batch_schedule import BatchSchedule, batch_schedule
from megacpp.config.checks.every import resolve
from megacpp.config.schema import Config, DataConfig, MeshConfig, TrainConfig

CASES = [
    BatchSchedule(rows, accum, warmup)
    for rows in (1, 6)
    for accum in (1, 2, 7, 8, 15, 16, 17, 64, 100)
    for warmup in (0, 1, 2, 3, 10, 97)
]


def by(schedule: BatchSchedule) -> str:
    return f"{schedule.rows_per_microbatch}x{schedule.grad_accum}/{schedule.warmup_steps}"


@pytest.mark.parametrize(
    ("accum", "warmup", "expected"),
    [
        (8, 4, [1, 3, 4, 6, 8, 8]),  # 1, 2.75, 4.5, 6.25: a half goes to the even number
        (16, 10, [2, 3, 5, 6, 8, 9, 10, 12, 13, 15, 16, 16]),
        (7, 3, [1, 3, 5, 7, 7]),
        (64, 1, [8, 64]),
        (1, 5, [1] * 7),
        (8, 0, [8, 8]),
    ],
)
def test_by_hand(accum: int, warmup: int, expected: list[int]) -> None:
    schedule = BatchSchedule(3, accum, warmup)
    assert [schedule.accum(step) for step in range(len(expected))] == expected


@pytest.mark.parametrize("schedule", CASES, ids=by)
def test_end_points_and_growth(schedule: BatchSchedule) -> None:
    full, warmup = schedule.grad_accum, schedule.warmup_steps
    accums = [schedule.accum(step) for step in range(warmup + 3)]
    assert accums[0] == (max(1, full // 8) if warmup else full)
    assert accums[warmup:] == [full] * 3 and schedule.accum(10**9) == full
    assert all(a <= b for a, b in pairwise(accums))
    for step, found in enumerate(accums[:warmup]):
        line = accums[0] + (full - accums[0]) * step / warmup
        assert abs(found - line) <= 0.5 + 1e-9  # rounded to nearest, whichever way a half went
    assert schedule.distinct_accums() == tuple(sorted(set(accums)))


@pytest.mark.parametrize("schedule", CASES, ids=by)
def test_rows_tile(schedule: BatchSchedule) -> None:
    expected = 0
    for step in range(schedule.warmup_steps + 5):
        rows = schedule.rows(step)
        assert rows.start == schedule.rows_before(step) == expected
        assert len(rows) == schedule.accum(step) * schedule.rows_per_microbatch
        expected = rows.stop
    far = 10**9
    assert schedule.rows(far).stop == schedule.rows(far + 1).start


def test_a_pure_function_of_the_step() -> None:
    schedule, again = BatchSchedule(2, 64, 50), BatchSchedule(2, 64, 50)
    forwards = [again.rows(step) for step in range(60)]
    assert [schedule.rows(step) for step in reversed(range(60))] == forwards[::-1]
    assert schedule == again and hash(schedule) == hash(again)


def test_without_warmup_steps_are_equal() -> None:
    """Check that a constant accumulation reads the rows that it always read."""
    schedule = BatchSchedule(6, 4)
    assert [schedule.rows(step) for step in (0, 1, 7)] == [
        range(24),
        range(24, 48),
        range(168, 192),
    ]
    assert schedule.distinct_accums() == (4,) and schedule.describe() == "4 microbatches"


def resolved(warmup: int, static: bool = False) -> Config:
    batch = {"device_batch_size": 2, "grad_accum": 16, "batch_warmup_steps": warmup}
    train = TrainConfig(**batch, static_shapes=static)
    mesh = MeshConfig(dp_replicate=2, cp=2)
    return resolve(Config(train=train, mesh=mesh, data=DataConfig(seq_len=8)), world_size=8)


def test_of_a_configuration() -> None:
    """8 ranks, of which 4 read rows of their own."""
    schedule, reason = batch_schedule(resolved(10), world_size=8)
    assert schedule == BatchSchedule(8, 16, 10) and reason == ""
    assert schedule.describe() == "2 to 16 microbatches over 10 steps"
    config = resolved(10)
    assert len(schedule.rows(10)) * config.data.seq_len == config.train.tokens_per_step


def test_static_shapes_leave_the_warmup_out_and_say_so() -> None:
    schedule, reason = batch_schedule(resolved(10, static=True), world_size=8)
    assert schedule == BatchSchedule(8, 16) and schedule.distinct_accums() == (16,)
    assert (
        reason.startswith("train.batch_warmup_steps=10 is taken as 0 (train.static_shapes): ")
        and "\n" not in reason
    )
    assert batch_schedule(resolved(0, static=True), world_size=8) == (schedule, "")


def test_needs_no_torch() -> None:
    code = "import sys, megacpp.config.batch_schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
