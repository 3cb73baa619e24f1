"""What M blocks have alive, in closed form, against traced steps."""

from __future__ import annotations

import pytest

from tests.memory.working_cases import misses

# Per cent: what is added up for a whole step must not be below it, and need not be exact.
LEAST, MOST = -0.5, 2.0

# The first layer runs again what lies around its scan, the last one keeps all.
CASES = {
    "siso": ("", 8),
    "mimo, no convolution, norm": (
        "--model.mamba3.mimo_rank 4 --model.mamba3.conv_kernel 0 --model.mamba3.out_norm true",
        8,
    ),
    "fp32, short chunks": ("--precision.dtype fp32 --model.mamba3.chunk_size 32", 1),
    "states, some of the heads": ("--mesh.cp 2 --mesh.tp 2", 4),
    "heads for tokens": ("--mesh.cp 2 --mesh.cp_mamba3 heads", 2),
}


@pytest.mark.parametrize("name", [*CASES])
def test_moments_are_those_of_a_trace(name: str) -> None:
    flags, size = CASES[name]
    found = misses("MM", flags, size, rank=size - 1)
    assert all(LEAST < miss < MOST for miss in found.values()), found
