"""Muon on one device: against the written-out update, views, zero and missing gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.initial_state import Width
from optim.muon_adamw import MuonAdamW
from optim.muon_reference import muon_update
from optim.newton_schulz import Coefficients, Scale
from optim.ownership import MatrixView


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    g = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype))


def muon(
    params: list[nn.Parameter], wire: Width = "auto", kept: Width = "auto", **settings: Any
) -> MuonAdamW:
    return MuonAdamW([{"params": params, "algorithm": "muon", **settings}], wire, kept)


def give_gradient(p: Tensor, seed: int) -> None:
    g = torch.Generator().manual_seed(100 + seed)
    p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (9, 9), (130, 70)])
def test_three_steps_equal_the_written_out_update(
    shape: tuple[int, int], nesterov: bool, scale: Scale
) -> None:
    p = parameter(*shape)
    want, momentum = p.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    settings = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "scale": scale}
    optimizer = muon([p], lr=0.02, **settings)
    for step in range(3):
        give_gradient(p, step)
        assert p.grad is not None
        grad = p.grad.clone()
        optimizer.step()
        assert torch.equal(p.grad, grad), "the gradient was written to"
        want = want * (1 - 0.02 * 0.1)
        want = want - 0.02 * muon_update(grad, momentum, 0.9, nesterov, scale=scale)
    assert (p - want).abs().max() < 1e-12
    assert (optimizer.state[p]["momentum"] - momentum).abs().max() < 1e-15


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("width", ["auto", "bf16", "fp32"])
def test_fp32_weights_equal_the_written_out_update(
    width: Width, coefficients: Coefficients
) -> None:
    """Compare momenta, bf16 by default, to the bit: computed in fp32 and rounded once a step."""
    p = parameter(24, 40, dtype=torch.float32)
    optimizer = muon([p], kept=width, lr=0.02, coefficients=coefficients)
    dtype = torch.float32 if width == "fp32" else torch.bfloat16
    want, momentum = p.detach().clone(), torch.zeros(24, 40, dtype=dtype)
    for step in range(3):
        give_gradient(p, step)
        assert p.grad is not None
        optimizer.step()
        want = want - 0.02 * muon_update(p.grad, momentum, coefficients=coefficients)
    assert (p - want).abs().max() < 1e-5 * want.abs().max()
    assert torch.equal(optimizer.state[p]["momentum"], momentum) and momentum.dtype == dtype


def test_the_iteration_is_as_wide_as_asked() -> None:
    """bf16 is about 1e-2 from fp32, and neither is the other."""
    ps = [parameter(48, 64, dtype=torch.float32) for _ in range(2)]
    for p, wire in zip(ps, ("fp32", "bf16"), strict=True):
        give_gradient(p, 0)
        muon([p], wire, lr=1.0).step()
    step = (ps[0] - parameter(48, 64, dtype=torch.float32)).norm()
    assert 1e-3 < (ps[0] - ps[1]).norm() / step < 1e-1


def test_cautious_decay_shrinks_only_what_the_update_shrinks() -> None:
    """Decay applies where update and weight have one sign; elsewhere it has no effect."""
    start = parameter(12, 8).detach()
    after = {}
    for name, settings in {
        "none": {},
        "all": {"weight_decay": 0.5},
        "cautious": {"weight_decay": 0.5, "cautious": True},
    }.items():
        p = parameter(12, 8)
        give_gradient(p, 0)
        muon([p], lr=0.1, **settings).step()
        after[name] = p.detach()
    update = start - after["none"]
    shrinks = update * start >= 0
    assert 20 < shrinks.sum() < 76
    assert torch.equal(after["cautious"], torch.where(shrinks, after["all"], after["none"]))
    assert not torch.equal(after["all"][shrinks], after["none"][shrinks])


def test_experts_equal_a_loop_over_experts() -> None:
    stack = parameter(4, 6, 10)
    singles = [nn.Parameter(w.clone()) for w in stack.detach()]
    batched = muon([stack], lr=0.02, view=MatrixView(batched=True))
    loop = muon(singles, lr=0.02)
    for step in range(3):
        give_gradient(stack, step)
        assert stack.grad is not None
        for single, grad in zip(singles, stack.grad, strict=True):
            single.grad = grad.clone()
        batched.step()
        loop.step()
    assert torch.equal(stack, torch.stack([s.detach() for s in singles]))


def test_the_flattened_stack_would_be_another_update() -> None:
    stack, flat = parameter(4, 6, 10), nn.Parameter(parameter(4, 6, 10).detach().flatten(0, 1))
    give_gradient(stack, 0)
    assert stack.grad is not None
    flat.grad = stack.grad.flatten(0, 1)
    muon([stack], view=MatrixView(batched=True)).step()
    muon([flat]).step()
    assert (stack.flatten(0, 1) - flat).abs().max() > 1e-4


def test_row_blocks_equal_split_parameters() -> None:
    heights = (4, 4, 4, 9, 1, 2)
    fused = parameter(sum(heights), 7)
    split = [nn.Parameter(block.clone()) for block in fused.detach().split(heights)]
    one = muon([fused], lr=0.02, view=MatrixView(heights))
    many = muon(split, lr=0.02)
    for step in range(3):
        give_gradient(fused, step)
        assert fused.grad is not None
        for block, grad in zip(split, fused.grad.split(heights), strict=True):
            block.grad = grad.clone()
        one.step()
        many.step()
    assert torch.equal(fused, torch.cat([s.detach() for s in split]))


def test_zero_gradients_leave_weights_and_make_no_nan() -> None:
    p, fused = parameter(6, 4), parameter(8, 4, seed=1)
    before = [t.detach().clone() for t in (p, fused)]
    optimizer = muon([p, fused], views=[MatrixView(), MatrixView((3, 5))])
    for t in (p, fused):
        t.grad = torch.zeros_like(t)
    optimizer.step()
    assert torch.equal(p, before[0]) and torch.equal(fused, before[1])


def test_a_parameter_without_gradient_is_left_alone() -> None:
    p, q = parameter(6, 4), parameter(6, 4, seed=1)
    before = q.detach().clone()
    optimizer = muon([p, q], weight_decay=0.1)
    give_gradient(p, 0)
    optimizer.step()
    assert torch.equal(q, before) and not optimizer.state[q]["momentum"].count_nonzero()
    give_gradient(q, 0)
    optimizer.step()
    assert not torch.equal(q, before)


def test_closure_and_learning_rate_are_read_at_every_step() -> None:
    p = parameter(6, 4)
    optimizer = muon([p], lr=0.0)
    give_gradient(p, 0)
    before = p.detach().clone()
    assert optimizer.step(lambda: torch.is_grad_enabled()) is True
    assert torch.equal(p, before)
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.step()
    assert not torch.equal(p, before)


def test_bf16_momentum_without_nesterov_is_not_normalised_in_place() -> None:
    p = parameter(6, 4, dtype=torch.bfloat16)
    optimizer = muon([p], "bf16", nesterov=False)
    give_gradient(p, 0)
    assert p.grad is not None
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum"], torch.zeros_like(p).lerp(p.grad, 0.05))


@pytest.mark.parametrize(
    "shape, view",
    [
        ((6,), MatrixView()),
        ((2, 3, 4), MatrixView()),
        ((6, 4), MatrixView(batched=True)),
        ((6, 4), MatrixView((3, 4))),
    ],
)
def test_a_view_that_does_not_fit_is_refused(shape: tuple[int, ...], view: MatrixView) -> None:
    with pytest.raises(AssertionError):
        muon([parameter(*shape)], view=view)


def test_views_in_words() -> None:
    assert str(MatrixView()) == "whole"
    assert str(MatrixView(batched=True)) == "each expert"
    assert str(MatrixView((8, 8, 4, 2, 2, 2))) == "rows 2 x 8 | 4 | 3 x 2"
