"""What R blocks have alive, in closed form, against traced steps."""

from __future__ import annotations

import pytest

from tests.memory.working_cases import misses

LEAST, MOST = -0.5, 2.0  # per cent of the trace

# With many heads the mixer is fuller than the norm in front of it.
MANY = "--recompute.rblock recurrence --model.m2rnn.num_heads 96"
CASES = {
    "runs again as a whole": ("", 8),
    "keeps all states, fp32": ("--recompute.rblock none --precision.dtype fp32", 1),
    "some of the heads": (
        "--recompute.rblock recurrence --model.m2rnn.num_heads 96 --mesh.tp 2",
        2,
    ),
    "heads for tokens": (f"{MANY} --mesh.cp 2", 2),
    "chunk after chunk": ("--recompute.rblock recurrence --mesh.cp 2 --mesh.cp_m2rnn serial", 2),
}


@pytest.mark.parametrize("name", [*CASES])
def test_moments_are_those_of_a_trace(name: str) -> None:
    flags, size = CASES[name]
    found = misses("RR", flags, size, rank=size - 1)
    assert all(LEAST < miss < MOST for miss in found.values()), found
