"""Estimates of bytes that M blocks have alive, against traced steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.config.schema import KernelsConfig
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, traced_kept
from tests.memory.working_cases import PHASES, WIDE, misses, most_bytes, parse_run

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


@pytest.mark.parametrize("kernel", ["mamba_ssm", "tilelang"])
@pytest.mark.parametrize("name", [*CASES])
def test_kernels_have_moments_of_their_own(name: str, kernel: str) -> None:
    """They hold what is kept, and are no other size than torch.

    tests/model/test_mamba3_interpreted.py and test_mamba3_mimo_interpreted.py hold them to live
    bytes.
    """
    flags, size = CASES[name]
    config = parse_run([*f"{WIDE} --model.pattern MM {flags}".split()], size).config
    own = LocalShapes.on_rank(config, size, size - 1)
    by_kernel = replace(own, config=replace(config, kernels=KernelsConfig(mamba3=kernel)))  # type: ignore[arg-type]
    for part in (TracedPart(("M",)), TracedPart(("M",), last=True)):
        kept = traced_kept(by_kernel, part)
        for phase in PHASES:
            most, torch_most = (most_bytes(o, part, phase) for o in (by_kernel, own))
            assert sum(kept.values()) - kept["residual"] <= most
            assert 0.3 < most / torch_most < 1.6, (part, phase, most, torch_most)
