"""The fused down projection against the three operators it replaces: bit for bit, all dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.dense.module import MLP, is_plain
from megacpp.config.schema import ModelConfig
from megacpp.kernels import linears as kernel
from megacpp.kernels.gated import gated
from megacpp.kernels.linears import gated_linear, gated_product
from megacpp.torch_extras import needs_input_grad_now

BOTH = pytest.mark.parametrize("num", [2, 1], ids=["swiglu", "relu2"])


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def case(
    num: int, dtype: torch.dtype, rows: tuple[int, ...] = (2, 7)
) -> tuple[list[Tensor], Tensor]:
    """Weight, gate (and up) of 12 hidden, and a gradient of 6 out."""
    inputs = [noise(6, 12, seed=1, dtype=dtype)]
    inputs += [noise(*rows, 12, seed=2 + i, dtype=dtype) for i in range(num)]
    return [t.requires_grad_() for t in inputs], noise(*rows, 6, seed=9, dtype=dtype)


def plain(w_DF: Tensor, gate: Tensor, up: Tensor | None = None) -> Tensor:
    return F.linear(gated_product(gate, up), w_DF)


def run(form: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    y = form(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(2, 7), (5,), (1, 2, 3), (0,), ()], ids=str)
def test_bit_for_bit(num: int, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    inputs, dy = case(num, dtype, rows)
    for want, got in zip(run(plain, inputs, dy), run(gated_linear, inputs, dy), strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


@BOTH
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autocast_rounds_where_it_did(num: int, dtype: torch.dtype, amp: torch.dtype) -> None:
    inputs, dy = case(num, torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        hidden = [t.to(dtype).requires_grad_() for t in inputs[1:]]
    results = []
    for form in (plain, gated_linear):
        with torch.autocast("cpu", amp):
            y = form(inputs[0], *hidden)
        results.append((y, *torch.autograd.grad(y, (inputs[0], *hidden), dy.to(y.dtype))))
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


def test_autocast_leaves_no_weight_without_gradient_behind() -> None:
    """A cast made inside the Function would be remembered, and have no way back to the weight."""
    (w_DF, gate, up), _ = case(2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        gated_linear(w_DF, gate, up)
        assert torch.autograd.grad(F.linear(gate, w_DF).sum(), w_DF)[0].abs().max() > 0.0


@BOTH
def test_gradients_are_those_of_the_function(num: int) -> None:
    inputs, _ = case(num, torch.float64)
    assert torch.autograd.gradcheck(gated_linear, inputs)
    assert torch.autograd.gradcheck(gated, inputs[1:])


@BOTH
def test_what_is_not_finite_stays_where_it_was(num: int) -> None:
    inputs, dy = case(num, torch.float32)
    dy[0, 3] = torch.inf
    for want, got in zip(run(plain, inputs, dy), run(gated_linear, inputs, dy), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@BOTH
def test_the_parts_are_the_whole(num: int) -> None:
    """`gated` before any linear layer."""
    (w_DF, *hidden), dy = case(num, torch.float64)
    dh = dy @ w_DF.detach()
    want = torch.autograd.grad(gated_product(*hidden), hidden, dh)
    got = torch.autograd.grad(gated(*hidden), hidden, dh)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@BOTH
@pytest.mark.parametrize("form", [gated_linear, lambda w_DF, *hidden: gated(*hidden)])
def test_nothing_but_the_result_is_made(num: int, form: Callable[..., Tensor]) -> None:
    inputs, _ = case(num, torch.float32)
    with LiveBytes() as live:
        y = form(*inputs)
        graph = y.grad_fn
        del y
        assert live.alive() == 0
    assert graph is not None


@BOTH
def test_two_walks_make_each_product_once(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero-bubble pipeline asks for gradients of inputs, then for those of weights."""
    inputs, dy = case(num, torch.float64)
    want, asked = torch.autograd.grad(plain(*inputs), inputs, dy), []

    def noted(ctx: Any) -> tuple[bool, ...]:
        asked.append(needs_input_grad_now(ctx))
        return asked[-1]

    monkeypatch.setattr(kernel, "needs_input_grad_now", noted)
    doubled = [2.0 * t for t in inputs[1:]]  # between leaf and node, as in a model
    y = gated_linear(inputs[0], *(0.5 * t for t in doubled))
    of_hidden = torch.autograd.grad(y, inputs[1:], dy, retain_graph=True)
    of_weight = torch.autograd.grad(y, inputs[:1], dy, retain_graph=True)
    for a, b in zip(want, (*of_weight, *of_hidden), strict=True):
        assert (b - a).abs().max() < 1e-12
    y.backward(dy)
    assert torch.equal(inputs[0].grad, of_weight[0])  # type: ignore[arg-type]
    up = num == 2
    assert [(gate, w, u) for gate, w, u, *_ in asked] == [
        (True, False, up),
        (False, True, False),
        (True, True, up),
    ]


@BOTH
def test_a_second_backward_is_refused(num: int) -> None:
    """With `create_graph` the first backward gives the same bits, and a second one is refused."""
    inputs, dy = case(num, torch.float64)
    want = run(gated_linear, inputs, dy)[1:]
    dy.requires_grad_()
    w_DF, *hidden = inputs
    y = gated_linear(w_DF, hidden[0], hidden[1] if num == 2 else None)
    got = torch.autograd.grad(y, inputs, dy, create_graph=True)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b) and b.requires_grad
    with pytest.raises(RuntimeError, match="differentiate twice"):
        got[0].sum().backward()


class Rounded(nn.Linear):
    """A linear layer that does something of its own, as fp8 layers do."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.bfloat16().to(input.dtype), self.weight)


@BOTH
def test_a_linear_layer_that_is_more_than_that_is_called(num: int) -> None:
    """Replaced or watched down projections see the product; then their own input is kept."""
    config = ModelConfig(dim=6, mlp=MLPConfig(12, "swiglu" if num == 2 else "relu2"))
    mlp = MLP(config).double()
    x = noise(3, 6)
    for i, p in enumerate(mlp.parameters()):
        nn.init._no_grad_normal_(p, 0.0, 0.3, torch.Generator().manual_seed(i))
    assert is_plain(mlp.w2)
    y, seen = mlp(x), []
    handle = mlp.w2.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    assert not is_plain(mlp.w2) and torch.equal(mlp(x), y)
    assert torch.equal(seen[0], gated_product(*mlp._hidden(x)))
    handle.remove()
    assert is_plain(mlp.w2)
    rounded = Rounded(12, 6, bias=False)
    rounded.weight = mlp.w2.weight
    mlp.w2 = rounded
    assert not is_plain(mlp.w2) and torch.equal(mlp(x), rounded(seen[0]))
    assert not torch.equal(mlp(x), y)
