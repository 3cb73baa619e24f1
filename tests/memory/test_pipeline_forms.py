"""Sizes of a pipeline in the estimate, by hand: microbatches in flight, what a rank receives."""

from __future__ import annotations

import pytest

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.estimate import estimate
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.pipeline import (
    BUFFERS_ON_RECEIPT,
    answered_gradients,
    buffer_bytes,
    in_flight,
)
from tests.memory.test_estimate import OVER, UNDER

SHAPE = "tiny --model.dim 32 --model.depth 8 --model.pattern AF --model.tie-embeddings false"

SMALL = (
    "--model.vocab-size 256 --model.mlp.hidden-dim 128 --optim.name adamw --data.seq-len 128"
    " --train.device-batch-size 8 --train.tokens-per-step 0 --train.grad-accum 8"
)


def sizes(schedule: str, accum: int = 8) -> list[LocalShapes]:
    """Sizes of each rank of four stages, one of each rank: two rows of 64 tokens in fp32."""
    flags = f"{SHAPE} --mesh.pp 4 --mesh.pp-schedule {schedule} --train.grad-accum {accum}"
    flags += " --data.seq-len 64 --train.device-batch-size 2 --precision.dtype fp32"
    config = parse_run([*flags.split(), "--train.device", "cpu"], 4).config
    return [LocalShapes.on_rank(config, 4, rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", [[8], [8], [8], [8]]), ("1f1b", [[4], [3], [2], [1]])],
)
def test_microbatches_in_flight(schedule: str, expected: list[list[int]]) -> None:
    """Each stage of 1f1b runs as many forwards ahead as there are stages from it to the end."""
    assert [in_flight(own) for own in sizes(schedule)] == expected
    few = [[min(4, n) for n in stage] for stage in expected]
    assert [in_flight(own) for own in sizes(schedule, accum=4)] == few


def test_what_a_rank_receives() -> None:
    """Inputs of all microbatches, and gradients: one at a time where torch lets go of each."""
    one, gradients = 2 * 64 * 32 * 4, 1 if BUFFERS_ON_RECEIPT else 8
    received = [gradients, 8 + gradients, 8 + gradients, 8]
    assert [buffer_bytes(own) for own in sizes("1f1b")] == [n * one for n in received]


def test_gradients_that_an_input_answers() -> None:
    """Rank 3 of 1f1b sends each gradient before it receives the next input, and holds one."""
    assert answered_gradients(sizes("1f1b")[3]) == [{}]
    assert answered_gradients(sizes("looped_bfs")[0]) == [None, {}]
    # Stage 6 has two forwards to go when 7 has sent its first gradient.
    *_, last = answered_gradients(sizes("zbv")[0])
    assert last == dict.fromkeys(range(2, 8), 1)


@pytest.mark.parametrize("schedule", ["dualpipev", "zbv"])
def test_neighbours_on_one_rank_keep_what_they_hand_on(schedule: str) -> None:
    """Small models: a step's results and gradients outlive it on the rank at the bottom of a V."""
    flags = "tiny --model.pattern F --model.depth 4 --model.vocab-size 256 --data.seq-len 512"
    flags += f" --mesh.pp 2 --mesh.pp-schedule {schedule} --recompute.fblock full"
    flags += " --train.tokens-per-step 0 --train.grad-accum 8 --optim.name adamw"
    config = parse_run(flags.split(), 2).config
    stream, found = trace_step(config, 2, 1), estimate(config, 2, 1)
    clip = max(now for at, now in enumerate(stream.timeline()) if stream.where(at) == "clip")
    assert (1 - UNDER) * clip <= found.moments["clip"] <= (1 + OVER) * clip
    assert (1 - UNDER) * stream.peak()[1] <= found.tensors


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv"])
def test_two_walks_count_a_message_once(schedule: str) -> None:
    """Count what a stage sends, receives or hands on once, and not in its layers' walks too."""
    flags = f"tiny --train.device cpu --model.pattern F --model.depth 4 --model.dim 128 {SMALL}"
    flags += f" --mesh.pp 2 --mesh.pp-schedule {schedule} --recompute.fblock full"
    config = parse_run([*flags.split(), "--recompute.norms"], 2).config
    peak, found = trace_step(config, 2, 1).peak()[1], estimate(config, 2, 1)
    assert peak <= found.tensors <= 1.01 * peak
