"""The Mamba-3 scan's Triton kernels: in the interpreter, to machine code, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp.config.presets import nam56r_base
from megacpp.kernels.host import Host
from megacpp.kernels.mamba3.support import mamba3_triton
from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/mamba3_triton_cases.py"
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program can have
NARROW = ("x", "q", "k", "v", "z", "y", "dy", "dq", "dk", "dv", "dz", "states", "dstates")
WIDE = (
    *("bias", "q_bias", "k_bias", "D", "sums", "scale", "gamma", "turns", "entering"),
    *("of_tokens", "dturns", "dentering", "of_heads", "adt", "dt", "dadt", "ddt"),
    *("dleaving", "added", "first", "last", "of_chunks", "out"),
)
KINDS = dict.fromkeys((*NARROW, "trap", "dtrap", "angles", "dangles"), "*bf16") | {"runs": "*i32"}
KINDS |= dict.fromkeys(WIDE, "*fp32")


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("size", [64, 128])
def test_compiles_without_a_gpu(size: int, capability: int) -> None:
    """bf16 inputs of packed rows, states of `size` x `size`, chunks of 64 tokens."""
    pytest.importorskip("triton")
    from megacpp.kernels.mamba3 import (
        triton_gradients,
        triton_kernels,
        triton_launch,
        triton_tokens,
    )

    if _refused(size, size, (capability // 10, 0)):
        pytest.skip("refused")
    packed = torch.zeros(1, 128, dtype=torch.int32)
    plan = triton_launch.ScanPlan(64, False, packed, True)
    v = torch.empty(1, 128, 8, size, dtype=torch.bfloat16)
    q, bias = torch.empty(1, 128, 1, 1, size), torch.empty(8, size)
    angles, rows = torch.empty(1, 128, 1, size // 4), torch.empty(1, 8, 128)
    scan = triton_launch.Scan(plan, q, q, v, v, rows, rows, rows, angles, bias, bias, bias[:, 0])
    vectors = scan.constants() | {"PACKED": True, "C": 64, "GATED": True}
    both = {"BACKWARD": True}, {"BACKWARD": False}
    cases: list[tuple[Any, dict[str, Any]]] = [
        *((triton_kernels._states_kernel, vectors | how) for how in both),
        (triton_kernels._outputs_kernel, vectors),
        (triton_gradients._queries_kernel, vectors),
        (triton_gradients._keys_kernel, vectors),
    ]
    tokens = {"PACKED": True, "C": 64, "A": size // 4, "BLOCK_A": max(16, size // 4)}
    cases += [
        (triton_tokens._rates_kernel, tokens),
        (triton_tokens._rates_backward_kernel, tokens | {"SHARED": True, "HEADS": 8}),
    ]
    for how in ({"DECAY": True, "TURNS": False}, {"DECAY": False, "TURNS": True}):
        others = {"BACKWARD": False, "FIRST": True, "LAST": True, "BLOCK": 512}
        cases.append((triton_tokens._carry_kernel, tokens | how | others))
    for kernel, fixed in cases:
        options = {"num_warps": fixed.get("num_warps", 4)}
        made = compiled(kernel, KINDS, fixed, capability, options, other="i32")
        assert made.asm["cubin"] and made.metadata.shared <= SHARED[capability]


def _refused(d_state: int, headdim: int, capability: tuple[int, int] | None) -> str | None:
    config = nam56r_base()
    mamba = replace(config.model.mamba3, d_state=d_state, headdim=headdim)
    config = replace(config, model=replace(config.model, mamba3=mamba))
    return mamba3_triton(config, Host("cuda", "bf16", capability, packages={"triton": "3.7.1"}))


def test_states_that_are_too_large_are_refused() -> None:
    assert _refused(128, 128, (9, 0)) is None and _refused(96, 128, None) is None
    assert "up to 128 x 128, not 256 x 64" in (_refused(256, 64, None) or "")
    assert _refused(128, 32, (8, 0)) is None
    assert "up to 64 x 64 on 8.0, not 128 x 64" in (_refused(128, 64, (8, 0)) or "")
    assert "up to 64 x 64 on 12.0" in (_refused(128, 64, (12, 0)) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
