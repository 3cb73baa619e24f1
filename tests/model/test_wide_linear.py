"""Product with a wide weight: its kernels in the interpreter and to machine code, and linears."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megacpp.kernels.linears import linears, wide_linear
from tests.model.in_child import run_cases
from tests.model.machine_code import compiled

CASES = "tests/model/wide_linear_triton_cases.py"


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("outputs", [16, 64, 128, 256])
def test_compiles_without_a_gpu(outputs: int, capability: int) -> None:
    pytest.importorskip("triton")
    from megacpp.kernels import triton_wide_linear as fused

    values = fused._shape(torch.empty(outputs, 3584, device="meta"))
    options = {"num_warps": values.pop("num_warps")}
    kinds = {"x": "*bf16", "dx": "*bf16", "plus": "*bf16", "rows": "i32"}
    values["PLUS"] = True
    for kernel in (fused._forward_kernel, fused._input_kernel, fused._weight_kernel):
        made = compiled(kernel, kinds, values, capability, options, other="*fp32")
        assert made.asm["cubin"] and made.metadata.shared < 99 * 1024
        assert not re.search(r"\b(STL|LDL)\b", made.asm["sass"]), kernel.__name__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    run_cases(CASES, interpreted=False)


def layers(dtype: torch.dtype, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(8, outputs, bias, dtype=dtype) for outputs in (3, 4, 6)]


def grads_of(results: tuple[Tensor, ...], x: Tensor, made: list[nn.Linear]) -> list[Tensor]:
    loss = sum(((i + 1) * y.square()).sum() for i, y in enumerate(results))
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, [x, *(p for layer in made for p in layer.parameters())]))


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_the_layers(bias: bool) -> None:
    """Outputs and gradients of weights bit for bit; the input's gradient to its roundings."""
    made = layers(torch.float64, bias)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    got, want = linears(x, *made), tuple(layer(x) for layer in made)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    (dx, *found), (right, *wants) = grads_of(got, x, made), grads_of(want, x, made)
    assert (dx - right).norm() <= 1e-15 * right.norm()
    assert all(torch.equal(a, b) for a, b in zip(found, wants, strict=True))


def test_a_second_reader_of_the_input() -> None:
    """Its gradient is added to that of the product, and is all there is without one."""
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    dy, plus = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    y, beside = wide_linear(x, w)
    both = torch.autograd.grad((y, beside), (x, w), (dy, plus), retain_graph=True)
    assert torch.equal(both[0], dy @ w + plus) and torch.equal(both[1], dy.T @ x)
    assert torch.equal(torch.autograd.grad(beside, x, plus)[0], plus)


def test_thin_layers_are_one_product() -> None:
    """By `F.linear` inside, by another function as it says; a hook's layers are called."""
    made, x = layers(torch.float64), torch.randn(5, 8, dtype=torch.float64)
    thin = torch.cat([layer.weight for layer in made[1:]])
    for given in (F.linear, partial(F.linear, bias=None)):
        found = linears(x, made[0], thin=thin, linear=given)
        assert torch.equal(found[0], made[0](x)) and torch.equal(found[1], x @ thin.T)
    seen: list[int] = []
    made[0].register_forward_hook(lambda *_: seen.append(1))
    linears(x, *made)
    assert seen == [1]


def test_gradients_in_one_tensor_take_one_product_each() -> None:
    """Compare gradients of the input and of all weights, added over backwards; or one frozen."""
    made = [nn.Linear(8, 3, bias=False, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    dys = torch.randn(2, 5, 6, dtype=torch.float64).chunk(2, -1)
    leaves = [x, *(layer.weight for layer in made)]
    want = torch.autograd.grad([layer(x) for layer in made], leaves, dys)
    for number in (1, 2):
        with FlopCounterMode(display=False) as flops, Products() as products:
            torch.autograd.backward(linears(x, *made), dys)
        assert products.number == 2 + 2 and flops.get_total_flops() == 3 * 2 * 10 * 8 * 6
        for leaf, right in zip(leaves, want, strict=True):
            assert leaf.grad is not None and leaf.grad.is_contiguous()
            assert (leaf.grad - number * right).abs().max() < 1e-14
    with Products() as products:  # as a zero-bubble pipeline walks first
        first = torch.autograd.grad(linears(x, *made), x, dys)[0]
    assert products.number == 2 + 1 and (first - want[0]).abs().max() < 1e-14
    made[0].weight.requires_grad_(False)
    only = torch.autograd.grad(linears(x, *made), made[1].weight, dys)[0]
    assert torch.equal(only, want[2])


def test_weights_that_autocast_casts_are_one_product() -> None:
    """Cast once, multiply once each way; weights that are in bf16 already lie apart."""
    made = [nn.Linear(8, outputs, bias=False) for outputs in (3, 5)]
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    dys = torch.randn(2, 5, 8, dtype=torch.bfloat16).split([3, 5], -1)
    weights = [layer.weight for layer in made]
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        found = linears(x, *made, one_tensor=True)
        found = [*found, *torch.autograd.grad(found, [x, *weights], dys)]
    assert products.number == 1 + 2
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    with torch.autocast("cpu", torch.bfloat16):
        want = [layer(x) for layer in made]
        want += torch.autograd.grad(want, [x, *weights], dys)
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.float() - b.float()).norm() <= 2**-7 * b.float().norm()
    narrow = [layer.bfloat16() for layer in made]
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        linears(x, *narrow, one_tensor=True)
    assert products.number == 2


class Products(TorchDispatchMode):
    """Number of products of two matrices."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_gradients_are_those_of_the_layers(dtype: torch.dtype) -> None:
    """In bf16 with weights in either dtype, of which autocast casts one."""
    made, x = layers(dtype), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = linears(x, *made), tuple(layer(x) for layer in made)
    assert all(y.dtype == torch.bfloat16 for y in got)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    (dx, *found), (right, *wants) = grads_of(got, x, made), grads_of(want, x, made)
    assert (dx - right).norm() <= 2**-7 * right.norm()
    assert all(torch.equal(a, b) for a, b in zip(found, wants, strict=True))
