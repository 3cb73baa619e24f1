"""The interpreter of TileLang kernels: what it computes, and what it refuses to."""

# No `from __future__ import annotations`: TileLang reads a kernel's own, which are values.
# pyright: reportInvalidTypeForm=false

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.tilelang_interpreter import Interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed"
)


def squares(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of bf16, and a scale and the scaled squares of their lengths, NaN so far."""
    torch.manual_seed(0)
    x_T4 = torch.randn(tokens, 4).bfloat16()
    return x_T4, torch.randn(tokens), torch.full((tokens,), torch.nan)


def test_tiles_products_lanes_and_guards() -> None:
    """Blocks of 8 tokens; the last one reaches past the arguments, as in a real kernel."""
    import tilelang.language as T

    S = T.dynamic("S")

    @T.prim_func
    def program(
        X: T.Tensor([S, 4], "bfloat16"),
        SCALE: T.Tensor([S], "float32"),
        Y: T.Tensor([S], "float32"),
    ):
        with T.Kernel(T.ceildiv(S, 8), threads=32) as block:
            x = T.alloc_shared([8, 4], "bfloat16")
            products = T.alloc_fragment([8, 8], "float32")
            T.copy(X[block * 8 : block * 8 + 8, :], x)
            T.gemm(x, x, products, transpose_B=True, clear_accum=True)
            for i in T.Parallel(8):
                if i % 2 == 0:
                    Y[block * 8 + i] = products[i, i] * SCALE[block * 8 + i]
                else:
                    Y[block * 8 + i] = -products[i, i] * SCALE[block * 8 + i]

    x_T4, scale_T, y_T = squares(11)
    Interpreted(program)(x_T4, scale_T, y_T)
    sign_T = 1.0 - 2.0 * (torch.arange(11) % 8 % 2)
    assert torch.allclose(y_T, sign_T * x_T4.float().square().sum(1) * scale_T, rtol=1e-6, atol=0)


def test_bf16_is_rounded_where_the_kernel_rounds_it() -> None:
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([8, 4], "bfloat16"), Y: T.Tensor([8], "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_fragment([8, 4], "bfloat16")
            total = T.alloc_fragment([8], "bfloat16")
            T.copy(X, x)
            T.clear(total)
            for i in T.Parallel(8):
                for k in T.serial(4):
                    total[i] += x[i, k] * x[i, k]
            T.copy(total, Y)

    x_T4, _, y_T = squares(8)
    want_T = torch.zeros(8, dtype=torch.bfloat16)
    for x_T in x_T4.unbind(1):
        want_T += x_T * x_T
    Interpreted(program)(x_T4, y_T)
    assert torch.equal(y_T, want_T.float())
    assert not torch.equal(y_T, x_T4.float().square().sum(1))
    Interpreted(program, {"bfloat16": torch.float32})(x_T4.float(), y_T)
    assert torch.allclose(y_T, x_T4.float().square().sum(1), rtol=1e-6, atol=0)


def refused(how: str) -> Any:
    """A kernel of `[8]` in and `[8]` out with something wrong in it."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([8], "float32"), Y: T.Tensor([8], "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_shared([8], "float32")
            if how != "unwritten":
                T.copy(X, x)
            if how == "race":
                for i in T.Parallel(8):
                    x[i // 2] = X[i]
            if how == "outside":
                for i in T.Parallel(8):
                    x[i] = x[i + 1]
            if how == "unknown":
                for i in T.Parallel(8):
                    T.atomic_add(Y[i], x[i])
            T.copy(x, Y)

    return program


@pytest.mark.parametrize(
    ("how", "error", "why"),
    [
        ("race", ValueError, "write one place"),
        ("outside", IndexError, "is left"),
        ("unknown", NotImplementedError, "atomic_add"),
    ],
)
def test_what_it_refuses(how: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Interpreted(refused(how))(torch.randn(8), torch.empty(8))


def test_the_contract_with_the_caller() -> None:
    run, x = Interpreted(refused("")), torch.randn(8)
    run(x, y := torch.empty(8))
    assert torch.equal(x, y)
    Interpreted(refused("unwritten"))(x, y)
    assert y.isnan().all()
    with pytest.raises(KeyError, match="missing, and is touched"):
        run(None, y)
    with pytest.raises(ValueError, match="one is not 8"):
        run(torch.randn(9), y)
    with pytest.raises(AssertionError, match="float64"):
        run(x.double(), y)
