"""The gated delta rule's Triton kernels: in the interpreter, to machine code, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp.config.presets import nam56r_base
from megacpp.kernels.gated_delta_rule.support import delta_rule_triton
from megacpp.kernels.host import Host
from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/gated_delta_triton_cases.py"
# Bytes that a program can have; of 8.x the 8.6 and 8.9 have 99 KiB.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
NARROW = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "u", "du", "w", "solved", "states", "dstates")
WIDE = (
    *("g", "beta", "sums", "lengths", "q_lengths", "dsums", "dg", "dbeta"),
    *("first", "last", "dlast", "dfirst"),
)
KINDS = dict.fromkeys(WIDE, "*fp32") | {"runs": "*i32", "scale": "fp32"}


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiles_without_a_gpu(dtype: torch.dtype, size: int, capability: int) -> None:
    """Packed rows, keys and values of `size` dims, the most tokens of a chunk on that GPU."""
    pytest.importorskip("triton")
    from megacpp.kernels.gated_delta_rule import triton_gradients, triton_kernels, triton_launch
    from megacpp.kernels.gated_delta_rule.triton import chunk_of

    runs, gates = torch.zeros(1, 128, dtype=torch.int32), torch.empty(1, 128, 8)
    k, v = (torch.empty(1, 128, n, size, dtype=dtype) for n in (4, 8))
    chunk = chunk_of(v, size, 64)
    chunk = min(chunk, 32) if capability == 80 else chunk
    rule = triton_launch.DeltaRule(triton_launch.DeltaRulePlan(chunk, runs), k, k, v, gates, gates)
    constants, carried = rule.constants(), rule.carried()
    every: dict[str, Any] = dict.fromkeys(("KEEP", "FIRST", "LAST", "STATES", "QUERIES"), True)
    kinds = KINDS | dict.fromkeys(NARROW, "*bf16" if dtype == torch.bfloat16 else "*fp32")
    for module in (triton_kernels, triton_gradients):
        for name, kernel in vars(module).items():
            if not name.endswith("_kernel"):
                continue
            fixed = constants | every | (carried if "states" in name else {})
            options = {n: fixed[n] for n in ("num_warps", "num_stages") if n in fixed}
            made = compiled(kernel, kinds, fixed, capability, options, other="i32", aligned=True)
            assert made.asm["cubin"] and made.metadata.shared <= SHARED[capability], name


def refused(key_dim: int, dtype: str = "bf16", capability: tuple[int, int] = (9, 0)) -> str:
    config = nam56r_base()
    delta = replace(config.model.gated_deltanet, key_dim=key_dim)
    config = replace(config, model=replace(config.model, gated_deltanet=delta))
    host = Host("cuda", dtype, capability, packages={"triton": "3.7.1"})
    return delta_rule_triton(config, host) or ""


def test_keys_that_are_too_wide_are_refused() -> None:
    assert not refused(128) and not refused(3, "fp32", (8, 0))
    assert "up to 128 dims (key_dim=192)" in refused(192)
    assert "fp32" in refused(64, "fp64") and "8.0" in refused(64, capability=(7, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
