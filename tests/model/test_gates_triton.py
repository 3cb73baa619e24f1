"""Triton kernels of decays and gates: in the interpreter, to machine code, and on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/gates_triton_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [44, 2048])
def test_compiles_without_a_gpu(width: int, capability: int) -> None:
    """bf16 inputs, weights in fp32, to machine code of each kind of GPU."""
    pytest.importorskip("triton")
    from megacpp.kernels import triton_gate_kernels as kernels
    from megacpp.kernels.triton_gates import _steps_tile, _tile

    x, fixed = torch.empty(1, 8, width), {"FACTOR": True, "SOFTPLUS": False}
    tiles = {"steps": _steps_tile(x, torch.empty(1, 8, 1024), 64)}
    narrow = ("x", "dt", "a", "y", "v", "g", "z", "dx", "dz", "ddt", "da", "dy", "dv", "dg")
    narrow = *narrow, "bc", "c", "b", "dbc", "dc", "db"
    wide = ("A_log", "bias", "D", "out", "dout", "adt", "dadt", "step", "dstep", "part", "weight")
    wide = *wide, "c_weight", "b_weight"
    kinds = (
        dict.fromkeys(narrow, "*bf16")
        | dict.fromkeys(wide, "*fp32")
        | {"floor": "fp32", "eps": "fp32"}
    )
    found = [kernel for name, kernel in vars(kernels).items() if name.endswith("_kernel")]
    assert len(found) == 8
    for kernel in found:
        how = fixed | tiles.get(kernel.__name__.split("_")[1], _tile(x))
        made = compiled(kernel, kinds, how, capability, {"num_warps": 4}, other="i32")
        assert made.asm["cubin"] and made.metadata.shared < 32768
        assert not re.search(r"\b(STL|LDL)\b", made.asm["sass"]), kernel.__name__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)
