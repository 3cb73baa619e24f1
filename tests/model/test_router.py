"""The router: choices by enumeration, losses by loops, the bias by hand, gradients of sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.loads import document_load
from megacpp.blocks.experts.router import Router, switch_loss, z_loss
from megacpp.config.schema import ModelConfig
from megacpp.model.auxiliary import TERMS, AttachLoss
from megacpp.model.documents import Documents
from megacpp.model.init import initialise

FP64 = 1e-12
MOE = MoEConfig(num_experts=8, top_k=3, route_scale=1.5)
LOSSES = replace(MOE, sequence_loss=0.3, z_loss=0.2)
KINDS = {
    "sigmoid": MOE,
    "groups": replace(MOE, num_groups=4, top_k_groups=2),
    "softmax_post": replace(MOE, score="softmax"),
    "softmax_pre": replace(MOE, score="softmax", softmax_order="pre"),
    "softmax_groups": replace(MOE, score="softmax", num_groups=2, top_k_groups=1),
}


def router_of(moe: MoEConfig, dtype: torch.dtype = torch.float64, dim: int = 6) -> Router:
    router = Router(ModelConfig(dim=dim, moe=moe, init_std=1.0)).to(dtype)
    initialise(router, router.init_rules(), seed=3)
    return router


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def choose_by_hand(selection: list[float], moe: MoEConfig) -> set[int]:
    """Sort the groups by their best two, then the experts of the best groups."""
    size = moe.num_experts // moe.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(moe.num_groups)]
    groups.sort(key=lambda g: -sum(sorted((selection[e] for e in g), reverse=True)[:2]))
    kept = groups[: moe.top_k_groups] if moe.num_groups > 1 else groups
    return set(sorted((e for g in kept for e in g), key=lambda e: -selection[e])[: moe.top_k])


@pytest.mark.parametrize("kind", KINDS)
def test_choice_and_weights(kind: str) -> None:
    moe = KINDS[kind]
    router, x_TD = router_of(moe), randn(50, 6)
    router.expert_bias.copy_(0.4 * randn(8, seed=1))
    routing = router.route(x_TD)
    for t in range(50):
        logits = (router.weight * x_TD[t]).sum(1).tolist()
        if moe.score == "sigmoid":
            scores = [1.0 / (1.0 + math.exp(-v)) for v in logits]
            selection = [s + float(b) for s, b in zip(scores, router.expert_bias, strict=True)]
            part = scores
        else:
            scores = selection = [math.exp(v) / sum(map(math.exp, logits)) for v in logits]
            part = [math.exp(v) for v in logits]
        chosen = routing.indices_TK[t].tolist()
        assert set(chosen) == choose_by_hand(selection, moe)
        over = 1.0 if moe.softmax_order == "pre" else sum(part[e] for e in chosen)
        values = scores if moe.softmax_order == "pre" else part
        want = torch.tensor([1.5 * values[e] / over for e in chosen], dtype=torch.float64)
        assert (routing.weights_TK[t] - want).abs().max() < FP64


def test_bias_moves_the_choice_and_nothing_else() -> None:
    router, x_TD = router_of(replace(MOE, top_k=8)), randn(20, 6)
    before = router.route(x_TD)
    weights_TE = torch.zeros(20, 8).double().scatter_(1, before.indices_TK, before.weights_TK)
    router.moe = MOE
    router.expert_bias[5] = 10.0
    routing = router.route(x_TD)
    assert (routing.indices_TK == 5).any(1).all()
    chosen_TK = weights_TE.gather(1, routing.indices_TK)
    want_TK = 1.5 * chosen_TK / chosen_TK.sum(1, keepdim=True)
    assert (routing.weights_TK - want_TK).abs().max() < FP64


def test_bias_update_by_hand() -> None:
    """Counts of two microbatches, 4 experts: mean 5, so 3 and 4 go up, 8 goes down, 5 stays."""
    router = router_of(replace(MOE, num_experts=4, top_k=2))
    router.count(torch.tensor([[0, 1], [2, 3], [2, 3], [2, 0], [2, 1]]))
    router.count(torch.tensor([[2, 3], [2, 3], [2, 0], [2, 1], [1, 3]]))
    assert router.tokens_per_expert.tolist() == [3, 4, 8, 5]
    router.update_bias()
    assert router.expert_bias.tolist() == [1e-3, 1e-3, -1e-3, 0.0]
    assert router.tokens_per_expert.tolist() == [0, 0, 0, 0]
    router.count(torch.tensor([[0, 1], [2, 3]]))
    router.update_bias()
    assert router.expert_bias.tolist() == [1e-3, 1e-3, -1e-3, 0.0]


def test_softmax_has_no_bias() -> None:
    router = router_of(KINDS["softmax_post"])
    router(randn(1, 9, 6))
    assert router.tokens_per_expert.sum() == 9 * 3
    router.update_bias()
    assert not router.expert_bias.any() and not router.tokens_per_expert.any()


def test_bias_evens_out_the_load() -> None:
    """A router that sends most tokens to one expert is even after the bias has found its place."""
    moe = replace(MOE, top_k=1, bias_update_rate=0.002)
    router, x_BTD = router_of(moe), randn(4, 256, 6) + 0.5
    loads = []
    for _ in range(400):
        router(x_BTD)
        loads.append(router.tokens_per_expert.max().item() / (4 * 256 / 8))
        router.update_bias()
    assert loads[0] > 2.0 and loads[-1] < 1.1, (loads[0], loads[-1])


def test_counts_in_training_only() -> None:
    router, x_BTD = router_of(LOSSES), randn(2, 5, 6)
    router(x_BTD[:, 0], decoding=True)
    router.eval()
    router(x_BTD)
    assert not router.tokens_per_expert.any() and not router.loss_sums.any()
    router.train()
    router(x_BTD)
    assert router.tokens_per_expert.sum() == 2 * 5 * 3
    assert router.loss_sums.ne(0).tolist() == [term in ("z", "sequence") for term in TERMS]
    router.update_bias()
    assert not router.tokens_per_expert.any() and not router.loss_sums.any()


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_losses_by_loops(score: str) -> None:
    """Switch loss of the batch and per document, z loss: sums over 12 tokens in 4 documents."""
    moe = replace(LOSSES, score=score, balance_loss=0.7, num_groups=4, top_k_groups=2)
    router, x_BTD = router_of(moe), randn(2, 6, 6)
    router.expert_bias.copy_(randn(8, seed=2))
    docs = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 2, 2], [0] * 6]))
    documents = [[0, 1, 2], [3], [4, 5], list(range(6, 12))]
    routing = router.route(x_BTD.flatten(0, 1))
    p_TE = routing.scores_TE / routing.scores_TE.sum(1, keepdim=True)
    p = p_TE.tolist()
    plain = [set(sorted(range(8), key=row.__getitem__, reverse=True)[:3]) for row in p]

    def switch(tokens: list[int]) -> float:
        count = [sum(e in plain[t] for t in tokens) for e in range(8)]
        mass = [sum(p[t][e] for t in tokens) for e in range(8)]
        product = sum(c * m for c, m in zip(count, mass, strict=True))
        return 8 / (3 * len(tokens) ** 2) * product

    lse = [math.log(sum(map(math.exp, row))) for row in routing.logits_TE.tolist()]
    want = {
        "z": 0.2 * sum(v * v for v in lse),
        "balance": 0.7 * 12 * switch(list(range(12))),
        "sequence": 0.3 * sum(len(d) * switch(d) for d in documents),
    }
    got = router.auxiliary_losses(routing, docs)
    assert set(got) == set(want)
    for name, value in got.items():
        assert abs(value.item() - want[name]) < FP64 * 12, name
    for rounds in (1, 2):
        router(x_BTD, docs)
        for name, value in zip(TERMS, router.loss_sums.tolist(), strict=True):
            assert abs(value - rounds * want.get(name, 0.0)) < FP64 * 12, name


def test_even_load_costs_one_per_token() -> None:
    p_TE = torch.full((5, 8), 1 / 8, dtype=torch.float64)
    assert float(switch_loss(p_TE, torch.full((8,), 3 / 8), 3)) == pytest.approx(5.0, abs=FP64)
    logits_TE = torch.full((5, 8), -math.log(8.0), dtype=torch.float64)
    assert float(z_loss(logits_TE)) == pytest.approx(0.0, abs=FP64)


def test_a_slice_of_a_document_starts_a_row() -> None:
    """Rows that begin inside a document (context parallelism) do not join the row before."""
    chosen_TK = torch.tensor([[0], [0], [1], [1]])
    docs = Documents(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0, 1], [2, 3]]))
    load_TE = document_load(chosen_TK, docs, 2, torch.float32)
    assert load_TE.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_attached_loss_has_the_gradient_of_its_scale() -> None:
    x, loss = randn(3).requires_grad_(), randn(2, seed=1).requires_grad_()
    scale = torch.tensor(0.25, dtype=torch.float64)
    y = AttachLoss.apply(x, loss.square().sum(), scale)
    assert torch.equal(y, x)
    gx, gl = torch.autograd.grad(y.sum(), (x, loss))
    assert torch.equal(gx, torch.ones_like(x)) and torch.equal(gl, 0.25 * 2.0 * loss)


def router_gradient(router: Router, x_BTD: Tensor, docs: Documents, rows: int) -> Tensor:
    """Gradient of the auxiliary losses alone, `rows` rows at a time, as a training step does it."""
    router.weight.grad = None
    router.aux_scale.fill_(1.0 / x_BTD[..., 0].numel())  # before the first forward
    for part in range(0, len(x_BTD), rows):
        here = slice(part, part + rows)
        part_docs = Documents(docs.ids_BT[here], docs.positions_BT[here])
        weights_TK, *_ = router(x_BTD[here], part_docs)
        weights_TK.backward(torch.zeros_like(weights_TK))
    assert router.weight.grad is not None
    return router.weight.grad.clone()


def test_microbatches_do_not_change_the_losses() -> None:
    """Four rows at once, two and two, or one by one: the same step gradient, and the mean's."""
    router, x_BTD = router_of(LOSSES), randn(4, 7, 6)
    docs = Documents.from_ids(torch.randint(0, 2, (4, 7), generator=torch.manual_seed(0)))
    want = router_gradient(router, x_BTD, docs, 4)
    assert want.abs().max() > 1e-2
    for rows in (2, 1):
        assert (router_gradient(router, x_BTD, docs, rows) - want).abs().max() < FP64
    losses = router.auxiliary_losses(router.route(x_BTD.flatten(0, 1)), docs)
    mean = (losses["z"] + losses["sequence"]) / (4 * 7)
    assert (torch.autograd.grad(mean, router.weight)[0] - want).abs().max() < FP64


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_gradients_of_the_logits_are_measured_apart(score: str) -> None:
    """What pulls at the logits from behind the router, and what the auxiliary losses pull."""
    router, x_BTD = router_of(replace(LOSSES, score=score)), randn(2, 6, 6)
    docs, pull_TK = Documents.from_ids(torch.zeros(2, 6, dtype=torch.int64)), randn(12, 3, seed=4)
    router.aux_scale.fill_(0.3)
    for _ in range(2):
        (router(x_BTD, docs)[0] * pull_TK).sum().backward()
    routing = router.route(x_BTD.flatten(0, 1))
    logits_TE = routing.logits_TE
    main = torch.autograd.grad((routing.weights_TK * pull_TK).sum(), logits_TE, retain_graph=True)
    own = 0.3 * torch.stack(list(router.auxiliary_losses(routing, docs).values())).sum()
    for found, (grad_TE,) in zip(
        router.gradient_squares.tolist(), (main, torch.autograd.grad(own, logits_TE)), strict=True
    ):
        want = 2 * grad_TE.square().sum().item()
        assert want > 1e-6 and abs(found - want) < FP64 * want


@pytest.mark.parametrize("how", ["module", "autocast"])
def test_logits_are_fp32(how: str) -> None:
    """Bitwise: neither `.to(bfloat16)` nor autocast touches weight, bias, counts or product."""
    plain = router_of(LOSSES, torch.float32, dim=64)
    x_TD = randn(40, 64).to(torch.bfloat16)
    want = F.linear(x_TD.float(), plain.weight)
    router = router_of(LOSSES, torch.float32, dim=64)
    router = router.to(torch.bfloat16) if how == "module" else router
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        routing = router.route(x_TD)
    assert torch.equal(routing.logits_TE, want) and torch.equal(router.weight, plain.weight)
    assert routing.weights_TK.dtype == router.expert_bias.dtype == torch.float32
    assert router.aux_scale.dtype == torch.float32
    assert router.tokens_per_expert.dtype == torch.int64
    assert router.to(torch.float64).weight.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_inputs_are_widened_again(dtype: torch.dtype) -> None:
    """Bitwise what autograd makes of the wide copy."""
    router = router_of(MOE, torch.float32, dim=64)
    results = []
    for function in (
        lambda x: router.route(x).logits_TE,
        lambda x: F.linear(x.to(torch.float32), router.weight),
    ):
        x_TD = randn(40, 64).to(dtype).requires_grad_()
        logits_TE = function(x_TD)
        pull_TE = randn(40, 8, seed=1).float()
        results.append((logits_TE, *torch.autograd.grad(logits_TE, (x_TD, router.weight), pull_TE)))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


def test_only_the_bias_is_saved() -> None:
    router = router_of(MOE)
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    tensors = {**dict(router.named_parameters()), **dict(router.named_buffers())}
    assert set(tensors) == set(router.init_rules())
    assert not any(t.any() for name, t in tensors.items() if name != "weight")
