"""Routers by Triton kernels against torch's operators in fp64: run by test_router_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/router_triton_cases.py   (or on a GPU, without it)
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.loads import document_load
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS
from megacpp.kernels.experts import triton_router
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()
MOE = MoEConfig(num_experts=12, top_k=3, route_scale=2.5)
LOSSES = replace(MOE, balance_loss=0.7, sequence_loss=0.3, z_loss=0.02)
CASES = {
    "sigmoid": MOE,
    "losses": LOSSES,
    "sequence": replace(MOE, sequence_loss=0.3),
    "z": replace(MOE, z_loss=0.02),
    "softmax": replace(MOE, score="softmax"),
    "softmax, losses": replace(LOSSES, score="softmax"),
    "softmax before": replace(LOSSES, score="softmax", softmax_order="pre"),
    "one of two": replace(LOSSES, num_experts=2, top_k=1, score="softmax", softmax_order="pre"),
    "all": replace(LOSSES, num_experts=5, top_k=5),
    "many": replace(LOSSES, num_experts=160, top_k=8, route_scale=1.0),
}
SHAPE, D = (2, 19), 6


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several blocks of rows."""
    monkeypatch.setattr(triton_router, "PROGRAMS", 2)
    monkeypatch.setattr(triton_router, "TILE", 64)


def router_of(moe: MoEConfig, backend: str = "triton") -> Router:
    """In fp32 on the device, or by torch in fp64; its bias changes the choice."""
    router = MixtureOfExperts(ModelConfig(dim=D, moe=moe, init_std=1.0)).router
    initialise(router, router.init_rules(), seed=3)
    router.expert_bias.copy_(0.4 * noise(moe.num_experts, seed=4))
    router.aux_scale.fill_(0.25)
    router.kernels = replace(PLAIN_KERNELS, experts=backend)
    return router.double() if backend == "torch" else router.to(DEVICE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def documents(device: str) -> Documents:
    """In each row three, of different lengths."""
    ids_BT = torch.tensor([[0] * 4 + [1] * 9 + [2] * 6, [0] * 11 + [1] + [2] * 7])
    return Documents.from_ids(ids_BT.to(device))


def results(router: Router, docs: Documents | None = None) -> list[Tensor]:
    """Choice, weights, gradients of both factors of the product, and what the router recorded."""
    weight = router.weight
    x_BTD = noise(*SHAPE, D).to(weight).requires_grad_()
    docs = documents(str(weight.device)) if docs is None else docs
    weights_TK, indices_TK, _ = router.recompute("block", router, x_BTD, docs)
    router.expert_bias += noise(len(weight), seed=5).to(weight)  # chooses others from here on
    d_TK = noise(*weights_TK.shape, seed=6).to(weights_TK)
    grads = torch.autograd.grad(weights_TK, (x_BTD, weight), d_TK)
    found = [indices_TK, weights_TK, *grads, router.loss_sums, router.gradient_squares]
    return [t.detach().cpu() for t in (*found, router.tokens_per_expert)]


def check(got: list[Tensor], want: list[Tensor]) -> None:
    """Integers are equal; sums of fp32 within a few roundings."""
    for a, b in zip(got, want, strict=True):
        if a.is_floating_point():
            assert (a.double() - b).norm() <= 1e-6 * b.norm()
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", CASES)
def test_it_is_the_definition(kind: str) -> None:
    """Choice and weights, gradients, losses, their squared norms and counts."""
    check(results(router_of(CASES[kind])), results(router_of(CASES[kind], "torch")))


def test_loads_of_other_ranks() -> None:
    """Loads that another module counts come as they are, one row a token."""

    class Loads(nn.Module):
        def forward(self, chosen_TK: Tensor, docs: Documents, dtype: torch.dtype) -> Tensor:
            assert dtype in (torch.float32, torch.float64)
            return 2 * document_load(chosen_TK, docs, LOSSES.num_experts, dtype)

    found = []
    for backend in ("triton", "torch"):
        router = router_of(LOSSES, backend)
        router.document_load = Loads()
        found.append(results(router))
    check(*found)


@pytest.mark.parametrize("kind", ["losses", "softmax before"])
def test_again_is_the_same(kind: str) -> None:
    """Bitwise, with a router that by then would choose others, and recorded once."""
    plain, router = results(router_of(CASES[kind])), router_of(CASES[kind])
    replays = Replays()
    give(router, BlockRecompute(frozenset({"block"}), replays))
    again = results(router)
    assert replays.counts == {"block": 1}
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_evaluation_records_nothing() -> None:
    router, want = router_of(LOSSES).eval(), router_of(LOSSES, "torch").eval()
    check(results(router), results(want))
    assert not router.tokens_per_expert.any() and not router.loss_sums.any()


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    logits_TE = torch.zeros(3, 12, device=DEVICE)
    logits_TE[1, 7] = logits_TE[2, 11] = 1.0
    for bias_E in (torch.zeros(12, device=DEVICE), None):
        both = triton_router.choose(logits_TE, bias_E, 3, bias_E is not None, True)
        for found in both:
            assert found.tolist() == [[0, 1, 2], [7, 0, 1], [11, 0, 1]]


def test_what_is_no_number_is_an_expert() -> None:
    """Three different ones, so that no kernel behind reads where nothing is."""
    logits_TE = torch.full((2, 12), torch.nan, device=DEVICE)
    logits_TE[1] = noise(12).to(DEVICE)
    logits_TE[1, 5] = -torch.inf
    logits_TE[1, 6] = torch.nan
    bias_E = torch.full((12,), -torch.inf, device=DEVICE)
    for bias in (0 * noise(12).to(DEVICE), bias_E, None):
        for found in triton_router.choose(logits_TE, bias, 3, bias is not None, True):
            assert all(len({*row}) == 3 and {*row} <= {*range(12)} for row in found.tolist())


def test_no_tokens() -> None:
    logits_TE = torch.empty(0, 12, device=DEVICE)
    chosen_TK, plain_TK = triton_router.choose(logits_TE, None, 3, False, True)
    form = triton_router.RouterForm(False, False, 1.0)
    assert chosen_TK.shape == plain_TK.shape == (0, 3)
    assert triton_router.weigh(logits_TE, chosen_TK, form, None).shape == (0, 3)


@pytest.mark.parametrize(
    "moe",
    [replace(MOE, num_groups=3, top_k_groups=2), replace(MOE, null_rho=0.5)],
    ids=["groups", "nulls"],
)
def test_others_take_the_plain_path(moe: MoEConfig) -> None:
    router = router_of(moe)
    assert not router._by_kernels(noise(4, D).to(DEVICE) @ router.weight.mT)
    wide = router_of(MOE).double()
    assert not wide._by_kernels(noise(4, D).double().to(DEVICE) @ wide.weight.mT)
