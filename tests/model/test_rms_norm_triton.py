"""RMSNorm's Triton kernels: in the interpreter, to machine code without a GPU, and on one."""

from __future__ import annotations

import pytest
import torch

from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/rms_norm_triton_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 3584])
def test_compiles_without_a_gpu(width: int, capability: int) -> None:
    """bf16 rows, weights in fp32, to machine code of each kind of GPU."""
    pytest.importorskip("triton")
    from megacpp.kernels import triton_rms_norm as kernels

    fixed = kernels._shape(torch.empty(1, width)) | {"DX": True, "DW": True, "ADDED": True}
    options = {"num_warps": fixed.pop("num_warps")}
    wide = {name: "*fp32" for name in ("weight", "rstd", "part")} | {"eps": "fp32"}
    kinds = wide | {name: "*bf16" for name in ("x", "y", "dy", "dx", "beside")}
    for kernel in (kernels._forward_kernel, kernels._backward_kernel):
        made = compiled(kernel, kinds, fixed, capability, options, other="i32")
        assert made.asm["cubin"] and made.metadata.shared < 32768


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
