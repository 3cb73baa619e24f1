"""Null experts against the pool written out: top-k over experts and copies of the null, by loops.

Legend: B rows, T tokens, D model, E experts, K columns of the choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import megacpp.kernels.flop_formulas  # noqa: F401 - registers those of our operators
from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from megacpp.blocks.experts import module as moe_module
from megacpp.blocks.experts.choices import circle, columns, null_copies, slots, visited_ranks
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.kernels.experts import mlp as expert_products
from megacpp.kernels.experts.copies import spread_rows
from megacpp.kernels.experts.grouped_mm import outer_products, products
from megacpp.kernels.experts.rows import (
    group_rows,
    sum_rows,
)
from megacpp.kernels.experts.without_slot import group_rows_to_capacity
from megacpp.model.documents import Documents
from megacpp.model.flops import block_flops
from megacpp.model.init import initialise

FP64 = 1e-12
MOE = MoEConfig(
    num_experts=8, top_k=2, hidden_dim=10, shared_hidden_dim=7, route_scale=1.7, null_rho=0.5
)
LOSSES = {"sequence_loss": 0.3, "z_loss": 0.2}
KINDS = {
    "sigmoid": MOE,
    "softmax_post": replace(MOE, score="softmax"),
    "softmax_pre": replace(MOE, score="softmax", softmax_order="pre"),
    "groups": replace(MOE, num_groups=4, top_k_groups=2),
    "softmax_groups": replace(MOE, score="softmax", num_groups=4, top_k_groups=2),
    "few_copies": replace(MOE, null_rho=0.9, top_k=3),  # 1 copy, 4 slots
    "whole_pool": replace(MOE, null_rho=0.1, top_k=3),  # 30 slots: every expert, 22 nulls
    "relu2": replace(MOE, activation="relu2", num_shared=0),
    "roomy": replace(MOE, capacity_factor=4.0),
}


def layer_of(moe: MoEConfig, dtype: torch.dtype = torch.float64) -> MixtureOfExperts:
    layer = MixtureOfExperts(ModelConfig(dim=12, depth=8, init_std=0.5, moe=moe)).to(dtype)
    initialise(layer, layer.init_rules(), seed=1)
    layer.router.aux_scale.fill_(0.01)
    return layer


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def pool_choice(selection: list[float], level: float, moe: MoEConfig) -> list[int]:
    """The real experts among the best slots of the pool; a null wins where it is as good."""
    size = moe.num_experts // moe.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(moe.num_groups)]
    groups.sort(key=lambda g: -sum(sorted((selection[e] for e in g), reverse=True)[:2]))
    kept = groups[: moe.top_k_groups] if moe.num_groups > 1 else groups
    pool = [(level, moe.num_experts)] * null_copies(moe)
    pool += [(selection[e], e) for g in kept for e in g]
    pool.sort(key=lambda slot: (-slot[0], -slot[1]))
    return [e for _, e in pool[: slots(moe)] if e < moe.num_experts]


def naive_weights(router: Router, x_TD: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Weights `[T, E]` that are 0 where an expert isn't chosen, and the chosen ones."""
    moe, rows, chosen = router.moe, [], []
    for x_D in x_TD:
        logits_E = (router.weight * x_D).sum(1)
        sigmoid = moe.score == "sigmoid"
        scores_E = logits_E.sigmoid() if sigmoid else logits_E.softmax(0)
        selection_E = scores_E + router.expert_bias if sigmoid else scores_E
        real = pool_choice(selection_E.tolist(), router.null_level.item(), moe)
        part_E = logits_E.sigmoid() if sigmoid else logits_E.exp()
        total = sum((part_E[e] for e in real), x_D.new_zeros(()))
        if moe.softmax_order == "pre":
            part_E, total = scores_E, x_D.new_ones(())
        mask_E = torch.zeros(moe.num_experts).double()
        mask_E[real] = 1.0
        weights_E = part_E * mask_E / total if real else part_E * 0.0
        rows.append(moe.route_scale * weights_E)
        chosen.append(real)
    return torch.stack(rows), chosen


def dense(layer: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    x_TD, e = x_BTD.flatten(0, -2), layer.experts
    weights_TE, _ = naive_weights(layer.router, x_TD)
    up_ETI = torch.einsum("td,eid->eti", x_TD, e.w1)
    if layer.moe.activation == "swiglu":
        h_ETI = F.silu(up_ETI) * torch.einsum("td,eid->eti", x_TD, e.w3)
    else:
        h_ETI = F.relu(up_ETI) ** 2
    y_TD = torch.einsum("eti,edi,te->td", h_ETI, e.w2, weights_TE)
    if layer.shared is not None:
        s = layer.shared
        y_TD = y_TD + (F.silu(x_TD @ s.w1.weight.T) * (x_TD @ s.w3.weight.T)) @ s.w2.weight.T
    return y_TD.view_as(x_BTD)


def gradients(layer: MixtureOfExperts, function: Callable, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(y, (x, *layer.parameters()), randn(*y.shape, seed=7).to(y))
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def test_sizes_of_the_pool() -> None:
    """64 real experts, 6 of them on average: 64 copies, a pool of 128, 12 slots."""
    big = MoEConfig(num_experts=64, top_k=6, null_rho=0.5)
    assert (null_copies(big), slots(big), columns(big)) == (64, 12, 12)
    assert [(null_copies(m), slots(m), columns(m)) for m in KINDS.values()][:6] == [
        *[(8, 4, 4)] * 5,
        (1, 4, 4),
    ]
    assert (slots(KINDS["whole_pool"]), columns(KINDS["whole_pool"])) == (30, 8)
    off = replace(big, null_rho=1.0)
    assert (null_copies(off), slots(off), columns(off)) == (0, 6, 6)


def test_sizes_of_the_pool_are_those_of_the_decimal_rho() -> None:
    """Floats are a last place off: 8 * 0.2 / 0.8 is below 2, and 21 / 0.7 above 30."""
    for percent, num_experts, top_k in itertools.product(range(1, 100), (2, 8, 64), (1, 2, 21)):
        top_k = min(top_k, num_experts)
        moe = replace(MOE, num_experts=num_experts, top_k=top_k, null_rho=percent / 100)
        copies = max(1, num_experts * (100 - percent) // percent)
        assert null_copies(moe) == copies
        assert slots(moe) == min(-(-100 * top_k // percent), num_experts + copies)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_the_pool_written_out(kind: str) -> None:
    """Choices, weights, output and every gradient; tokens of no expert and of all of them occur."""
    moe = KINDS[kind]
    layer, x = layer_of(moe), randn(3, 25, 12)
    layer.router.expert_bias.copy_(0.2 * randn(8, seed=3))
    weights_TK, indices_TK, _ = layer.router(x, decoding=True)
    want_TE, chosen = naive_weights(layer.router, x.flatten(0, 1))
    assert [sorted(e for e in of if e < 8) for of in indices_TK.tolist()] == list(
        map(sorted, chosen)
    )
    found_TE = torch.zeros(75, 9).double().scatter(1, indices_TK, weights_TK)
    assert not found_TE[:, 8].any() and (found_TE[:, :8] - want_TE).abs().max() < FP64
    numbers = {len(of) for of in chosen}
    assert len(numbers) > 2 or moe.null_rho != 0.5
    got, want = gradients(layer, layer, x), gradients(layer, lambda x: dense(layer, x), x)
    for name, value in want.items():
        assert value.any() and (got[name] - value).abs().max() < FP64 * max(1, value.abs().max())


@pytest.mark.parametrize("kind", ["sigmoid", "softmax_post", "softmax_pre", "roomy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tokens_of_nulls_alone(kind: str, dtype: torch.dtype) -> None:
    """The shared expert carries them: routed output exactly 0, gradients finite and its alone.

    Once all tokens are such: then no expert has a row. In training and one by one.
    """
    layer = layer_of(
        replace(KINDS[kind], **LOSSES), torch.float32 if dtype.itemsize == 2 else dtype
    )
    layer = layer.to(dtype)
    layer.router.null_score.fill_(9.0)
    x = randn(2, 30, 12, dtype=dtype)
    got = gradients(layer, layer, x)
    assert layer.shared is not None
    assert torch.equal(got["y"], layer.shared(x.flatten(0, 1)).view_as(x))
    assert not any(got[f"experts.{w}"].any() for w in ("w1", "w2", "w3"))
    assert all(value.isfinite().all() for value in got.values())
    assert got["x"].any() and got["router.weight"].any()  # by the shared expert, and z-loss
    y_BD, _ = layer.step(x[:, 3], None)
    assert y_BD.isfinite().all() and torch.allclose(
        y_BD.double(), got["y"][:, 3].double(), atol=1e-2
    )


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_one_token_of_nulls_among_others(score: str) -> None:
    """In fp32, of the smallest weights that there are: no NaN reaches anything."""
    layer = layer_of(replace(MOE, score=score), torch.float32)  # type: ignore[arg-type]
    x = randn(1, 40, 12).float()
    with torch.no_grad():
        indices_TK = layer.router(x, decoding=True)[1]
    nulls = (indices_TK == 8).all(1)
    x[0, 0] = 0.0  # all scores alike: below the null
    layer.router.null_score.fill_(0.51 if score == "sigmoid" else 0.13)
    got = gradients(layer, layer, x)
    assert all(value.isfinite().all() for value in got.values()) and not nulls.all()
    weights_TK, indices_TK, _ = layer.router(x, decoding=True)
    assert (indices_TK[0] == 8).all() and not weights_TK[0].any()


def test_without_nulls_nothing_is_different() -> None:
    router = layer_of(replace(MOE, null_rho=1.0)).router
    assert not router.nulls and router.top_k == 2 and len(router.tokens_per_expert) == 8
    assert "null_bias" not in router.state_dict()
    with_nulls = layer_of(MOE).router
    assert set(with_nulls.state_dict()) == {"weight", "expert_bias", "null_bias", "null_score"}
    assert with_nulls.weight.shape == (8, 12)  # no score of a null has a gradient
    assert set(with_nulls.init_rules()) == {
        *dict(with_nulls.named_parameters()),
        *dict(with_nulls.named_buffers()),
    }


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("top_k,rho", [(2, 0.5), (2, 0.7), (3, 0.4)])
def test_the_mean_is_kept(score: str, top_k: int, rho: float) -> None:
    """At the start about top_k experts a token; then too, where all scores fall ten times as fast
    as a bias could follow; with steps of a bias, exactly.

    2 / 0.7 are 3 slots: not 0.3 but 1/3 of them are nulls then.
    """
    moe = replace(MOE, score=score, top_k=top_k, null_rho=rho, bias_update_rate=0.002)  # type: ignore[arg-type]
    router, x_BTD = layer_of(moe).router, F.normalize(randn(8, 64, 12), dim=-1) * 12**0.5
    x_BTD[..., 0] = 1.0

    def mean() -> float:
        router.forget()
        router(x_BTD)
        return router.tokens_per_expert[:8].sum().item() / 512

    assert mean() == pytest.approx(top_k, rel=0.4)  # of 8 experts
    for _ in range(20):
        router.update_bias()
        with torch.no_grad():
            router.weight[:, 0] -= 0.1
        assert mean() == pytest.approx(top_k, rel=0.4)
    means = []
    for _ in range(200):
        router.update_bias()
        means.append(mean())
    assert sum(means[-20:]) / 20 == pytest.approx(top_k, rel=0.03)


def test_the_score_is_measured() -> None:
    """Between the second and the third best, bias included; the sum is of whole numbers."""
    router, x_BTD = layer_of(MOE).router, randn(2, 30, 12)
    router.expert_bias.copy_(0.1 * randn(8, seed=3))
    router(x_BTD[:1])
    router(x_BTD[1:])
    best_TK = (router.route(x_BTD.flatten(0, 1)).scores_TE + router.expert_bias).topk(3).values
    want = best_TK[:, 1:].mean().item()
    router.update_bias()
    assert router.null_score.item() == pytest.approx(want, abs=2.0**-24)
    router.update_bias()  # of no token: it stays
    assert router.null_score.item() == pytest.approx(want, abs=2.0**-24)
    assert not router.tokens_per_expert.any()


def test_bias_update_by_hand() -> None:
    """Of 4 columns 2 are to be real: of 3 tokens 6 choices. 7 are too many, 4 and 3 too few."""
    router = layer_of(MOE).router
    router.null_bias.zero_()
    for chosen, moved in (([0, 1, 2, 3], 1e-3), ([0, 8, 8, 8], 0.0), ([8, 8, 8, 8], -1e-3)):
        router.count(torch.tensor([chosen, [4, 5, 8, 8], [6, 8, 8, 8]]))
        assert router.tokens_per_expert[:9].sum() == 12
        router.update_bias()
        assert router.null_bias.item() == pytest.approx(moved, abs=1e-9)
    router.count(torch.tensor([[0, 1, 8, 8], [4, 5, 8, 8], [6, 7, 8, 8]]))
    router.update_bias()
    assert router.null_bias.item() == pytest.approx(-1e-3, abs=1e-9)


def test_losses_know_real_experts_alone() -> None:
    """The same as without null experts, whatever the null's score is."""
    off = replace(MOE, null_rho=1.0, balance_loss=0.5, **LOSSES)
    x_TD, docs = randn(40, 12), Documents.from_ids(torch.tensor([[0] * 15 + [1] * 25]))
    found = []
    for moe in (off, replace(off, null_rho=0.5)):
        router = layer_of(moe).router
        found.append(router.auxiliary_losses(router.route(x_TD), docs))
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("balance", "sequence", "z"))


@pytest.mark.parametrize("kind", ["sigmoid", "softmax_post", "softmax_pre"])
def test_documents_are_isolated(kind: str) -> None:
    """Other tokens in one document: bitwise nothing for the others, though counts change."""
    layer = layer_of(replace(KINDS[kind], **LOSSES, hidden_dim=36), torch.float32)
    docs = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 80 + [2] * 30] * 2))
    x = randn(2, 150, 12, dtype=torch.float32)
    first = gradients(layer, lambda x: layer(x, docs), x)
    counts = layer.router.tokens_per_expert.clone()
    other = torch.ones(2, 150, dtype=torch.bool)
    other[0, 40:120] = False
    for seed in range(3):
        changed = x.clone()
        changed[0, 40:120] = randn(1, 12, seed=seed).float() + 0.3 * changed[0, 40:120]
        layer.router.forget()
        second = gradients(layer, lambda x: layer(x, docs), changed)
        assert (layer.router.tokens_per_expert - counts).abs().max() > 10
        for name in ("y", "x"):
            assert torch.equal(first[name][other], second[name][other]), name
            assert not torch.equal(first[name][~other], second[name][~other]), name


@pytest.mark.parametrize("kind", ["sigmoid", "softmax_post", "softmax_pre", "groups"])
def test_step_is_forward(kind: str) -> None:
    layer, x = layer_of(KINDS[kind]), randn(3, 8, 12)
    y = layer(x)
    for t in range(8):
        y_BD, _ = layer.step(x[:, t], None)
        assert (y_BD - y[:, t]).abs().max() < FP64


@pytest.mark.parametrize("region", ["expert_gemm", "block"])
@pytest.mark.parametrize("kind", ["sigmoid", "softmax_post", "roomy"])
def test_again_is_the_same(kind: str, region: Any) -> None:
    """Bitwise, with biases that by then would choose others: decisions are kept."""
    x, docs, found = randn(2, 40, 12).float(), Documents.rows(2, 40), []
    for regions in (frozenset(), frozenset({region})):
        layer, replays = layer_of(replace(KINDS[kind], **LOSSES), torch.float32), Replays()
        give(layer, BlockRecompute(regions, replays))

        def forward(x: Tensor, layer: MixtureOfExperts = layer) -> Tensor:
            y = layer.experts.recompute("block", layer, x, docs)
            layer.router.expert_bias += torch.linspace(1.0, -1.0, 8)
            layer.router.null_bias += 0.3
            return y

        found.append([*gradients(layer, forward, x).values(), layer.router.tokens_per_expert])
        assert replays.counts == dict.fromkeys(regions, 1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nulls_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every product: the real choices, groups rounded up to 48; none of a null."""
    layer, x, rows = layer_of(MOE), randn(4, 100, 12), []

    def counted(x_SD: Tensor, *rest: Any) -> Tensor:
        rows.append(len(x_SD))
        return products(x_SD, *rest)

    monkeypatch.setattr(expert_products, "products", counted)
    layer(x)
    counts = layer.router.tokens_per_expert.tolist()
    assert set(rows) == {sum(-(-n // 48) * 48 for n in counts[:8])}
    assert counts[8] > 500 and rows[0] < 4 * 400


def test_flops_are_those_of_real_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula takes top_k for their mean; torch counts the choices that were made."""
    monkeypatch.setattr(moe_module, "row_multiple", lambda device: 1)
    layer, x = layer_of(MOE), randn(4, 100, 12)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    real = layer.router.tokens_per_expert[:8].sum().item() / 400
    config = layer.router.config
    two, three = (block_flops("E", replace(config, moe=replace(MOE, top_k=k)), 100) for k in (2, 3))
    assert counter.get_total_flops() / 400 == pytest.approx(two + (real - 2) * (three - two))
    assert block_flops("E", replace(config, moe=replace(MOE, null_rho=1.0)), 100) == two


def test_capacity_counts_mean_choices() -> None:
    """An even share of top_k choices a token; a null takes no slot from anybody."""
    indices_TK = torch.tensor([[8, 0, 8], [0, 8, 1], [8, 8, 8], [0, 1, 2]])
    groups = group_rows_to_capacity(indices_TK, 8, 2)
    assert groups.kept_KT is not None
    first, second = [False, True, False], [True, False, True]
    assert groups.kept_KT.T.tolist() == [first, second, [False] * 3, [False, True, True]]
    x_TD = randn(4, 5)
    assert torch.equal(
        sum_rows(spread_rows(x_TD, groups), groups), x_TD * torch.tensor([[1], [2], [0], [2]])
    )


def test_slots_of_nobody() -> None:
    """A device whose host doesn't wait has as many slots as there can be; the rest is nobody's."""
    indices_TK = torch.tensor([[3, 8], [8, 8], [3, 0]])
    groups = group_rows(indices_TK, 8, 4, expected=1)
    assert isinstance(groups.counts_E, Tensor)
    assert groups.counts_E.tolist() == [4, 0, 0, 4, 0, 0, 0, 0, 0]
    x_SD, w_EDF = randn(12, 5), randn(8, 5, 3, seed=1)
    counts_X = torch.tensor([4, 0, 0, 4, 0, 0, 0, 0, 4])
    y_SF = products(x_SD, w_EDF, counts_X)
    want_SF = torch.cat([x_SD[:4] @ w_EDF[0], x_SD[4:8] @ w_EDF[3]])
    assert (y_SF[:8] - want_SF).abs().max() < FP64
    y_EFD = outer_products(y_SF[:, :2], x_SD, counts_X, 8)
    assert (y_EFD[3] - y_SF[4:8, :2].T @ x_SD[4:8]).abs().max() < FP64
    assert not y_EFD[[1, 2, 4, 5, 6, 7]].any() and len(y_EFD) == 8


def test_neighbours_keep_to_few_groups() -> None:
    """Of 32 experts in 8 groups, 4 kept, 8 neighbours meet at most 4; over all, evenly."""
    order = circle(32, 8, 4)
    assert sorted(order) == list(range(32))
    for first in range(0, 32, 8):
        assert len({e // 4 for e in order[first : first + 8]}) <= 4
    moe = MoEConfig(num_experts=32, top_k=8, num_groups=8, top_k_groups=4)
    assert [visited_ranks(moe, ep) for ep in (1, 4, 8, 16)] == [1, 4, 4, 8]
    assert math.isclose(visited_ranks(replace(moe, num_groups=1, top_k_groups=1), 16), 8)
