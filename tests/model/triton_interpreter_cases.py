"""What Triton's interpreter does with bf16, as it is and mended: run by test_triton_interpreter.py.

TRITON_INTERPRET=1 python -m pytest tests/model/triton_interpreter_cases.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from megacpp.versions import minor
from tests.model.triton_interpreter import mend

N = 16


@pytest.fixture(scope="module")
def mended() -> None:
    """For good: tests of the interpreter as it is come first."""
    mend(tf32=True)


@triton.jit
def sums_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + SIZE + i, a * b)
    tl.store(out + 2 * SIZE + i, a - b)
    tl.store(out + 3 * SIZE + i, -a)
    tl.store(out + 4 * SIZE + i, tl.abs(a))
    tl.store(out + 5 * SIZE + i, tl.where(a < b, a, b))
    tl.store(out + 6 * SIZE + i, (a.to(tl.float32) * 1.003).to(tl.bfloat16))
    tl.store(out + 7 * SIZE + i, tl.full([SIZE], 1.5, tl.bfloat16) * 3)
    tl.store(out + 8 * SIZE + i, a.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True))
    tl.store(out + 9 * SIZE + i, tl.load(x + i, mask=i < 5, other=0.3))


def sums(x: Tensor, y: Tensor) -> Tensor:
    """What torch makes of what `sums_kernel` does."""
    return torch.stack(
        [
            *(x + y, x * y, x - y, -x, x.abs(), torch.where(x < y, x, y)),
            *((x.float() * 1.003).to(x.dtype), torch.full_like(x, 4.5), x),
            torch.where(torch.arange(N) < 5, x, 0.3).to(x.dtype),
        ]
    )


@triton.jit
def dot_kernel(x, y, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(x + place), tl.load(y + place), input_precision=PRECISION)
    tl.store(out + place, product)


@triton.jit
def cast_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def sum_kernel(x, out, SIZE: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE)), 0))


@triton.jit
def block_kernel(x, out, count, SIZE: tl.constexpr):
    """Copies `count` numbers of a block of SIZE by block pointers, whose masks are arrays."""
    source = tl.make_block_ptr(x, (count,), (1,), (0,), (SIZE,), (0,))
    target = tl.make_block_ptr(out, (count,), (1,), (0,), (SIZE,), (0,))
    tl.store(target, tl.load(source, boundary_check=(0,)), boundary_check=(0,))


@triton.jit
def count_kernel(out, count):
    for _ in range(count):
        tl.store(out, tl.load(out) + 1)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype)


def test_the_interpreter_cannot_count() -> None:
    """Else `countable` can go: Triton 3.7 counts, torch 2.11 comes with 3.6."""
    if np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("numpy 2.3 converts arrays of one number")
    if minor(triton.__version__) >= (3, 7):
        count_kernel[(1,)](counted := torch.zeros(1), 3)
        assert counted == 3
        return
    with pytest.raises(InterpreterError, match="0-dimensional"):
        count_kernel[(1,)](torch.zeros(1), 3)


def test_the_interpreter_has_no_bf16() -> None:
    """Else all of it can go: products are those of bits, casts cut off."""
    (x, y), out = noise(N, N), torch.empty(N, N)
    dot_kernel[(1,)](x, y, out, SIZE=N, PRECISION="ieee")
    assert out.abs().max() > 1e6 * (x.float() @ y.float()).abs().max()
    cast = torch.empty(N, dtype=torch.bfloat16)
    cast_kernel[(1,)](torch.full((N,), 1.0 + 2.0**-8 + 2.0**-9), cast, SIZE=N)
    assert (cast == 1.0).all()


def test_elements_to_the_last_bit(mended: None) -> None:
    x, y = noise(N)
    out = torch.empty(10, N, dtype=x.dtype)
    sums_kernel[(1,)](x, y, out, SIZE=N)
    assert torch.equal(out, sums(x, y))


def test_casts_to_the_last_bit(mended: None) -> None:
    """Halves to the even one, carries into the exponent, to and beyond the largest number."""
    half = 2.0**-8
    x = torch.tensor([1 + half, 1 + 3 * half, 2 - half, -1 - half, 3.4e38, -3.39e38, 1e-40, 0.0])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.randn(5)])
    out = torch.empty(N, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, out, SIZE=N)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_pointers_stop_at_the_bound(dtype: torch.dtype, mended: None) -> None:
    x, out = noise(N, dtype=dtype)[0], torch.zeros(N, dtype=dtype)
    block_kernel[(1,)](x, out, 5, SIZE=N)
    assert torch.equal(out, x.where(torch.arange(N) < 5, 0))


def test_products_are_summed_in_fp32(mended: None) -> None:
    """16 exact products, a rounding of 2^-24 for each sum at most, on either side."""
    x, y = noise(N, N)
    out = torch.empty(N, N)
    dot_kernel[(1,)](x, y, out, SIZE=N, PRECISION="tf32")
    want = x.double() @ y.double()
    assert ((out - want).abs() <= 32 * 2.0**-24 * (x.double().abs() @ y.double().abs())).all()


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_has_ten_bits(precision: str, mended: None) -> None:
    x = torch.full((N, N), 1 + 2.0**-10 + 2.0**-11)
    out = torch.empty(N, N)
    dot_kernel[(1,)](x, torch.eye(N), out, SIZE=N, PRECISION=precision)
    assert (out == (1 + 2.0**-10 if precision == "tf32" else x)).all()


def test_what_a_gpu_sums_in_its_own_order_is_refused(mended: None) -> None:
    with pytest.raises(InterpreterError, match="a reduction of bf16"):
        sum_kernel[(1,)](noise(N)[0], torch.empty(1, dtype=torch.bfloat16), SIZE=N)


def test_small_products_are_refused_as_on_a_gpu(mended: None) -> None:
    with pytest.raises(InterpreterError, match="K >= 16"):
        dot_kernel[(1,)](*noise(8, 8), torch.empty(8, 8), SIZE=8, PRECISION="ieee")


def test_a_loop_counts(mended: None) -> None:
    out = torch.zeros(1)
    count_kernel[(1,)](out, 3)
    assert out.item() == 3
