"""Grouping of rows by Triton kernels against torch's sort: run by test_expert_rows_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/expert_rows_triton_cases.py   (or on a GPU)
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, set_kernels
from megacpp.kernels.experts import rows, triton_rows, without_slot
from megacpp.kernels.experts.rows import (
    Groups,
    group_rows,
    weigh_slots,
)
from megacpp.kernels.experts.sizes import most_slots
from megacpp.kernels.experts.without_slot import group_rows_to_capacity
from megacpp.model.init import initialise

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Tokens, experts, experts of a token: more copies than programs take at once, experts that nothing
# chose, one expert, as many as a token can choose, and no token.
SHAPES = [(61, 5, 3), (300, 7, 2), (9, 160, 8), (40, 1, 1), (17, 4, 4), (1, 3, 1), (0, 4, 2)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have the most slots that shapes can need; each program takes several blocks."""
    for module in (rows, without_slot):
        monkeypatch.setattr(module, "slots_of", lambda sizes, *rest: most_slots(len(sizes), *rest))
    monkeypatch.setattr(triton_rows, "PROGRAMS", 3)
    monkeypatch.setattr(triton_rows, "TILE", 64)


def chosen(tokens: int, experts: int, top_k: int, nulls: bool = False) -> Tensor:
    """Experts of each token; most tokens choose the first few."""
    generator = torch.Generator().manual_seed(tokens + experts)
    weights = torch.linspace(1, 0.01, experts).square().expand(max(1, tokens), experts)
    found = torch.multinomial(weights, top_k, generator=generator)[:tokens]
    if nulls:
        found[torch.rand(found.shape, generator=generator) < 0.4] = experts
    return found.to(DEVICE)


def same(got: Groups, want: Groups) -> None:
    """Every number is equal."""
    for name in ("slot_KT", "token_S", "counts_E", "kept_KT"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("expected", [None, 1], ids=["all", "nulls"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_sort(shape: tuple[int, int, int], expected: int | None, multiple: int) -> None:
    tokens, experts, top_k = shape
    chosen_TK = chosen(tokens, experts, top_k, expected is not None)
    got, want = (group_rows(chosen_TK, experts, multiple, expected, b) for b in ("triton", "torch"))
    same(got, want)


def test_one_expert_gets_everything() -> None:
    chosen_TK = torch.full((50, 1), 2, device=DEVICE)
    same(group_rows(chosen_TK, 4, 16, None, "triton"), group_rows(chosen_TK, 4, 16))
    none_TK = torch.full((50, 1), 4, device=DEVICE)
    same(group_rows(none_TK, 4, 16, 1, "triton"), group_rows(none_TK, 4, 16, 1))


def test_choices_with_gaps() -> None:
    """A view of wider rows."""
    wide_TK = chosen(33, 6, 5)
    same(group_rows(wide_TK[:, 1:4], 6, 16, None, "triton"), group_rows(wide_TK[:, 1:4], 6, 16))


@pytest.mark.parametrize("grouped", ["padded", "nulls", "capacity", "none"])
def test_weights_of_slots(grouped: str) -> None:
    """And their gradients: the first token's slot is 0, and so is that of copies without one."""
    chosen_TK = chosen(0 if grouped == "none" else 37, 5, 3, grouped == "nulls")
    if grouped == "capacity":
        groups = group_rows_to_capacity(chosen_TK, 5, 15)
    else:
        groups = group_rows(chosen_TK, 5, 16, 1 if grouped == "nulls" else None)
    found = []
    for backend in ("triton", "torch"):
        weights_TK = torch.linspace(1, 2, chosen_TK.numel(), device=DEVICE).view(chosen_TK.shape)
        weights_TK.requires_grad_()
        w_S = weigh_slots(weights_TK, groups.by(backend))
        d_S = torch.linspace(-1, 1, len(w_S), device=DEVICE)
        found.append((w_S.detach(), *torch.autograd.grad(w_S, weights_TK, d_S)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("null_rho", [1.0, 0.6], ids=["all", "nulls"])
def test_a_block_is_torchs(null_rho: float) -> None:
    """From tokens to outputs and all gradients, in fp32 against fp64."""
    moe = MoEConfig(num_experts=5, top_k=2, hidden_dim=16, null_rho=null_rho, sequence_loss=0.3)
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        layer = MixtureOfExperts(ModelConfig(dim=12, moe=moe, init_std=0.5))
        initialise(layer, layer.init_rules(), seed=1)
        layer.router.aux_scale.fill_(0.1)
        set_kernels(layer, replace(PLAIN_KERNELS, experts=backend))
        layer = layer.to(DEVICE, dtype)
        x_BTD = torch.linspace(-2, 2, 2 * 20 * 12, device=DEVICE).sin().view(2, 20, 12).to(dtype)
        x_BTD.requires_grad_()
        y_BTD = layer(x_BTD)
        y_BTD.backward(torch.ones_like(y_BTD) / 7)
        grads = [p.grad for p in layer.parameters()]
        found.append([y_BTD.detach(), x_BTD.grad, *grads, layer.router.tokens_per_expert[:5]])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and b.any()
        assert (a.double() - b).norm() <= 1e-5 * b.double().norm()
