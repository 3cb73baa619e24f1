"""The short convolution's Triton kernels: in the interpreter, to machine code, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/causal_conv_triton_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_compiles_without_a_gpu(packed: bool, capability: int) -> None:
    """bf16 inputs, weights in fp32, to machine code of each kind of GPU."""
    pytest.importorskip("triton")
    from megacpp.kernels import triton_causal_conv as kernels

    x, weight, positions = torch.empty(1, 8, 64), torch.empty(64, 1, 4), torch.empty(1, 8)
    fixed = kernels._fixed(x, weight, positions if packed else None, silu=True, dilation=1)
    options = {"num_warps": fixed.pop("num_warps")}
    kinds = {"weight": "*fp32", "part": "*fp32", "position": "*i64"}
    kinds |= {name: "*bf16" for name in ("x", "y", "dy", "dx")}
    for kernel in (kernels._forward_kernel, kernels._backward_kernel):
        made = compiled(kernel, kinds, fixed, capability, options, other="i32")
        assert made.asm["cubin"] and made.metadata.shared < 32768


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
