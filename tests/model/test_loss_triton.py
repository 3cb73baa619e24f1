"""The Triton backend of the loss: its cases in the interpreter, and on a GPU as they are."""

from __future__ import annotations

import pytest
import torch

from megacpp.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/triton_loss_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_compiles_without_a_gpu(softcap: float, capability: int) -> None:
    """bf16 logits to machine code of each kind of GPU; a vocabulary that no block divides."""
    triton = pytest.importorskip("triton")
    from megacpp.kernels.linear_cross_entropy import triton as kernels

    fixed = {"V": 65537, "CAP": softcap, "WIDE": triton.language.float32}
    fixed |= {"Z_LOSS": 1e-4, "IGNORE": -100, "WEIGHTED": True}
    numbers = {"logits_ptr": "*bf16", "target_ptr": "*i64", "weight_ptr": "*fp32", "first": "i32"}
    rows, pair = {"out_ptr": "*fp32", "n": "i32"}, {"max_ptr": "*fp32", "sumexp_ptr": "*fp32"}
    row = {"BLOCK": kernels.ROW_BLOCK}, kernels.ROW_WARPS
    cases = (
        (kernels._rows_kernel, rows, row[0] | {"WANT": False}, row[1]),
        (kernels._rows_kernel, rows, row[0] | {"WANT": True}, row[1]),
        (kernels._gradient_kernel, pair, {"BLOCK": kernels.BLOCK}, kernels.NUM_WARPS),
    )
    for kernel, kinds, more, warps in cases:
        made = compiled(kernel, numbers | kinds, fixed | more, capability, {"num_warps": warps})
        assert made.asm["cubin"] and made.metadata.shared < 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)


def test_without_a_gpu_it_says_so() -> None:
    pytest.importorskip("triton")
    x_ND, weight_VD = torch.randn(4, 8), torch.randn(16, 8)
    with pytest.raises(RuntimeError, match="triton has no kernels for cpu"):
        linear_cross_entropy(x_ND, weight_VD, torch.zeros(4, dtype=torch.int64), backend="triton")
