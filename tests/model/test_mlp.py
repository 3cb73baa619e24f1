"""F blocks: the formula entry by entry, token independence, dtypes, initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.dense.module import MLP
from megacpp.config.schema import ModelConfig
from megacpp.model.init import Normal, initialise

BOTH = pytest.mark.parametrize("activation", ["swiglu", "relu2"])


def block(activation: str, dtype: torch.dtype = torch.float64) -> MLP:
    config = ModelConfig(
        dim=4,
        depth=8,
        init_std=0.8,
        mlp=MLPConfig(hidden_dim=6, activation=activation),  # type: ignore[arg-type]
    )
    mlp = MLP(config).double()
    initialise(mlp, mlp.init_rules(), seed=5)
    return mlp.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )


def by_hand(mlp: MLP, x: list[float]) -> list[float]:
    """Scalars and loops."""

    def times(weight: Tensor, v: list[float]) -> list[float]:
        return [sum(w * a for w, a in zip(row, v, strict=True)) for row in weight.tolist()]

    up = times(mlp.w1.weight, x)
    if mlp.activation == "swiglu":
        gated = times(mlp.w3.weight, x)
        h = [a / (1.0 + math.exp(-a)) * b for a, b in zip(up, gated, strict=True)]
    else:
        h = [max(a, 0.0) ** 2 for a in up]
    return times(mlp.w2.weight, h)


@BOTH
def test_forward_and_step_are_the_formula(activation: str) -> None:
    mlp, x = block(activation), tokens(2, 3, 4)
    y = mlp(x)
    for b in range(2):
        for t in range(3):
            want = torch.tensor(by_hand(mlp, x[b, t].tolist()), dtype=torch.float64)
            assert (y[b, t] - want).abs().max() < 1e-12
    state = mlp.init_state(2, x.device, x.dtype)
    stepped, state = mlp.step(x[:, 1], state)
    assert state is None and (stepped - y[:, 1]).abs().max() < 1e-12


@BOTH
def test_tokens_never_meet(activation: str) -> None:
    mlp, x = block(activation, torch.float32), tokens(2, 5, 4, dtype=torch.float32)
    x.requires_grad_()
    y = mlp(x)
    y[0, 2].sum().backward()
    assert x.grad is not None and torch.count_nonzero(x.grad[0, 2]) == 4
    assert torch.count_nonzero(x.grad) == 4
    changed = x.detach().clone()
    changed[0, 2] += 1.0
    same = torch.ones(2, 5, dtype=torch.bool)
    same[0, 2] = False
    assert torch.equal(mlp(changed)[same], y[same])


@BOTH
@pytest.mark.parametrize("how", ["fp32", "bf16_weights", "autocast"])
def test_dtypes(activation: str, how: str) -> None:
    """bf16 rounds x, both projections, the product and the output: five times at most 2^-8."""
    want = block(activation)(tokens(2, 5, 4))
    dtype = torch.bfloat16 if how == "bf16_weights" else torch.float32
    mlp = block(activation, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = mlp(tokens(2, 5, 4, dtype=dtype))
    assert y.dtype == dtype
    error = ((y.double() - want).norm() / want.norm()).item()
    assert error < (1e-5 if how == "fp32" else 5 * 2.0**-8), error


@BOTH
def test_rules_cover_every_tensor(activation: str) -> None:
    with torch.device("meta"):
        mlp = block_on_meta(activation)
    assert {name for name, _ in mlp.named_parameters()} == set(mlp.init_rules())
    for name, rule in mlp.init_rules().items():
        assert rule == Normal(0.8 / 4.0 if name == "w2.weight" else 0.8), name


def block_on_meta(activation: str) -> MLP:
    """Hidden size and activation given, as a shared expert gives them."""
    mlp = MLP(ModelConfig(dim=4, depth=8, init_std=0.8), 12, activation)  # type: ignore[arg-type]
    assert mlp.w1.weight.shape == (12, 4) and mlp.w2.weight.is_meta
    assert hasattr(mlp, "w3") == (activation == "swiglu")
    return mlp
