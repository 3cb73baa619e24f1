"""Triton kernels of experts: in the interpreter, to machine code without a GPU, and on one."""

from __future__ import annotations

import re

import pytest
import torch

from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/expert_rows_triton_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (256, 8)])
def test_compiles_without_a_gpu(experts: int, top_k: int, capability: int) -> None:
    """To machine code of each kind of GPU that keeps everything in registers."""
    pytest.importorskip("triton")
    from megacpp.kernels.experts import triton_rows as kernels

    shape = kernels._shape(experts) | {"K": top_k, "MULTIPLE": 16, "OWNED": True, "SOME": True}
    kinds = {"parts": "*i32", "kept": "*i1", "weights": "*fp32", "out": "*fp32"}
    kinds |= dict.fromkeys(("copies", "each", "programs", "all_slots", "rows"), "i32")
    for kernel in (kernels._count_kernel, kernels._place_kernel, kernels._weigh_kernel):
        fixed = shape | ({"BLOCK": 256} if kernel is kernels._weigh_kernel else {})
        made = compiled(kernel, kinds, fixed, capability, kernels.OPTIONS, other="*i64")
        assert made.asm["cubin"] and made.metadata.shared < 49152
        assert not re.search(r"\b(STL|LDL)\b", made.asm["sass"]), kernel.__name__


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_what_moves_rows_compiles_without_a_gpu(capability: int) -> None:
    """And what makes hidden units, with weights of 8 copies, some of which have no slot."""
    pytest.importorskip("triton")
    from megacpp.kernels.experts import triton as rows
    from megacpp.kernels.experts import triton_units as units

    values = dict.fromkeys(("SOME", "WEIGHED", "PLUS", "GATED", "UNITS"), True)
    values |= {"K": 8, "BLOCK": rows.BLOCK}
    kinds = dict.fromkeys(("token", "tokens", "slots"), "*i64") | {"kept": "*i1"}
    kinds |= dict.fromkeys(("weight", "weights", "dweights", "dot"), "*fp32")
    kinds |= dict.fromkeys(("apart", "row_stride"), "i32")
    for kernel in (
        rows._spread_kernel,
        rows._spread_weighed_kernel,
        rows._sum_kernel,
        units._units_kernel,
        units._units_backward_kernel,
    ):
        sizes = {"D": 3584} if kernel is rows._spread_weighed_kernel else {"hidden": 896}
        fixed = values | (sizes if kernel not in (rows._sum_kernel, units._units_kernel) else {})
        scalars = {name: "i32" for name in ("D", "hidden") if name not in fixed}
        made = compiled(kernel, kinds | scalars, fixed, capability, {}, other="*bf16")
        assert made.asm["cubin"] and made.metadata.shared < 49152
        assert not re.search(r"\b(STL|LDL)\b", made.asm["sass"]), kernel.__name__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
