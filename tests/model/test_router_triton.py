"""A router's Triton kernels: in the interpreter, to machine code without a GPU, and on one."""

from __future__ import annotations

import re

import pytest
import torch

from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/router_triton_cases.py"
FLAGS = (
    "BIASED",
    "PLAIN",
    "LOSSES",
    "BATCH",
    "DOCUMENTS",
    "INDIRECT",
    "Z",
    "SUMMED",
    "ZEROS",
    "TOTALS",
)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("score", "experts", "top_k"), [("sigmoid", 16, 4), ("sigmoid", 256, 8), ("before", 64, 6)]
)
def test_compiles_without_a_gpu(score: str, experts: int, top_k: int, capability: int) -> None:
    """With all losses, to machine code of each kind of GPU that keeps everything in registers."""
    triton = pytest.importorskip("triton")
    from megacpp.kernels.experts import triton_router as router
    from megacpp.kernels.experts import triton_router_kernels as kernels

    values = router._shape(experts) | dict.fromkeys((*FLAGS, "COUNTS"), True)
    values |= {"K": top_k, "KB": triton.next_power_of_2(top_k), "C": 3}
    values |= {"SIGMOID": score == "sigmoid", "PRE": score == "before"}
    kinds = dict.fromkeys(("chosen", "plain", "document", "length", "totals"), "*i64")
    kinds |= dict.fromkeys(("rows", "programs", "copies"), "i32")
    kinds |= dict.fromkeys(("scale", "of_batch", "of_documents", "of_z"), "fp32")
    for kernel in (
        kernels.choose_kernel,
        kernels.count_kernel,
        kernels.weights_kernel,
        kernels.gradient_kernel,
        kernels.add_up_kernel,
    ):
        fixed = values | ({"BLOCK": 512} if kernel is kernels.add_up_kernel else {})
        made = compiled(kernel, kinds, fixed, capability, router.OPTIONS, other="*fp32")
        assert made.asm["cubin"] and made.metadata.shared < 32768
        assert not re.search(r"\b(STL|LDL)\b", made.asm["sass"]), kernel.__name__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
