"""E blocks against every expert evaluated on every token; capacity, isolation, precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacpp.blocks.experts.choices import expert_capacity
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.init import Constant, Normal, initialise

FP64 = 1e-12
MOE = MoEConfig(num_experts=6, top_k=2, hidden_dim=10, shared_hidden_dim=7, route_scale=1.7)
CONFIG = ModelConfig(dim=12, depth=8, init_std=0.5, moe=MOE)
KINDS = {
    "swiglu": MOE,
    "relu2": replace(MOE, activation="relu2"),
    "shared_gate": replace(MOE, shared_gate=True, num_shared=2),
    "no_shared": replace(MOE, num_shared=0),
    "softmax": replace(MOE, score="softmax", top_k=3),
    "every_expert": replace(MOE, top_k=6),
    "groups": replace(MOE, num_groups=3, top_k_groups=1),
    "roomy": replace(MOE, capacity_factor=3.0),  # 6 / 2: every expert could take every token
}


def layer_of(moe: MoEConfig, dtype: torch.dtype = torch.float64, dim: int = 12) -> MixtureOfExperts:
    layer = MixtureOfExperts(replace(CONFIG, moe=moe, dim=dim)).to(dtype)
    initialise(layer, layer.init_rules(), seed=1)
    layer.router.aux_scale.fill_(0.01)
    return layer


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def dense(layer: MixtureOfExperts, x_BTD: Tensor, kept_TE: Tensor | None = None) -> Tensor:
    """Every expert on every token, weighted by a [T, E] matrix that is mostly zeros."""
    x_TD, e = x_BTD.flatten(0, 1), layer.experts
    weights_TK, indices_TK, _ = layer.router(x_BTD, decoding=True)
    weights_TE = torch.zeros(len(x_TD), layer.moe.num_experts).to(weights_TK)
    weights_TE = weights_TE.scatter(1, indices_TK, weights_TK)
    if kept_TE is not None:
        weights_TE = weights_TE * kept_TE
    up_ETI = torch.einsum("td,eid->eti", x_TD, e.w1)
    if layer.moe.activation == "swiglu":
        h_ETI = F.silu(up_ETI) * torch.einsum("td,eid->eti", x_TD, e.w3)
    else:
        h_ETI = F.relu(up_ETI) ** 2
    y_TD = torch.einsum("eti,edi,te->td", h_ETI, e.w2, weights_TE)
    if layer.shared is not None:
        s = layer.shared
        shared_TD = (F.silu(x_TD @ s.w1.weight.T) * (x_TD @ s.w3.weight.T)) @ s.w2.weight.T
        gate = 1.0 if s.gate is None else torch.sigmoid(x_TD @ s.gate.weight.T)
        y_TD = y_TD + gate * shared_TD
    return y_TD.view_as(x_BTD)


def gradients(layer: MixtureOfExperts, function: Callable, x: Tensor) -> dict[str, Tensor]:
    """Output, gradient of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = function(x)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    cotangent = randn(*y.shape, seed=7).to(y)
    grads = torch.autograd.grad(y, (x, *layer.parameters()), cotangent)
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    for name, value in want.items():
        error = (got[name] - value).abs().max() / value.abs().max().clamp(min=1.0)
        assert error < limit, (name, float(error))


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_the_dense_sum(kind: str) -> None:
    layer, x = layer_of(KINDS[kind]), randn(3, 25, 12)
    got, want = gradients(layer, layer, x), gradients(layer, lambda x: dense(layer, x), x)
    assert_close(got, want, FP64)
    assert all(value.any() for value in want.values())


@pytest.mark.parametrize("favourite", [0, 3, 5])
def test_one_expert_gets_everything(favourite: int) -> None:
    """All tokens to one expert and its neighbour, four experts empty: zero gradients there."""
    layer, x = layer_of(MOE), randn(2, 60, 12)
    layer.router.expert_bias[[favourite, (favourite + 1) % 6]] = torch.tensor([9.0, 5.0]).double()
    got, want = gradients(layer, layer, x), gradients(layer, lambda x: dense(layer, x), x)
    assert_close(got, want, FP64)
    visited = {favourite, (favourite + 1) % 6}
    assert {e for e in range(6) if got["experts.w1"][e].any()} == visited
    assert layer.router.tokens_per_expert.tolist() == [120 * (e in visited) for e in range(6)]


def test_capacity_is_the_rule() -> None:
    assert (
        expert_capacity(2**20, MoEConfig(num_experts=64, top_k=6, capacity_factor=1.25)) == 122880
    )
    assert expert_capacity(10, replace(MOE, capacity_factor=1.0)) == 4  # 10 * 2 / 6 = 3.33
    even = MoEConfig(num_experts=8, top_k=4, capacity_factor=1.1)
    assert expert_capacity(100, even) == 55  # in floats 50 * 1.1 is above 55


def test_small_capacity_drops_the_latest() -> None:
    """Each expert takes its first 3 tokens in order; the others add nothing, nor get gradients."""
    layer, x = layer_of(replace(MOE, capacity_factor=0.5)), randn(1, 18, 12)
    assert expert_capacity(18, layer.moe) == 3
    indices_TK = layer.router(x, decoding=True)[1]
    kept_TE, taken = torch.zeros(18, 6).double(), [0] * 6
    for t, chosen in enumerate(indices_TK.tolist()):
        for e in chosen:
            kept_TE[t, e] = float(taken[e] < 3)
            taken[e] += 1
    assert sum(max(0, n - 3) for n in taken) > 9
    got = gradients(layer, layer, x)
    assert_close(got, gradients(layer, lambda x: dense(layer, x, kept_TE), x), FP64)
    # A later token takes no place from an earlier one.
    later = x.clone()
    later[0, 12:] = randn(6, 12, seed=5)
    assert torch.equal(layer(later)[0, :12], got["y"][0, :12])


def test_capacity_reads_no_value() -> None:
    """Forward and backward on tensors that have shapes and no values: what a planner traces."""
    layer = layer_of(replace(MOE, capacity_factor=1.0, z_loss=0.1))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(mode.from_tensor(parameter)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, mode.from_tensor(buffer))
        x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.slow
def test_capacity_compiles_without_a_break() -> None:
    """Static shapes and no value read by the host: one graph, same figures."""
    layer, x = layer_of(replace(MOE, capacity_factor=1.0, z_loss=0.1)), randn(2, 9, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = gradients(layer, lambda x: compiled(x), x)
    assert_close(got, gradients(layer, layer, x), FP64)


@pytest.mark.parametrize("kind", ["swiglu", "relu2", "roomy"])
def test_two_walks_are_one(kind: str) -> None:
    """Gradients of inputs first and of weights later, as zero-bubble pipelines ask for them."""
    layer, x = layer_of(KINDS[kind]), randn(3, 25, 12).requires_grad_()
    cotangent, params = randn(3, 25, 12, seed=7), tuple(layer.parameters())
    want = torch.autograd.grad(layer(x), (x, *params), cotangent)
    y = layer(x)
    (first,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
    got = first, *torch.autograd.grad(y, params, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def tokens_per_expert(layer: MixtureOfExperts, x: Tensor) -> list[int]:
    return layer.router(x, decoding=True)[1].flatten().bincount(minlength=6).tolist()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_documents_are_isolated(dtype: torch.dtype, activation: str) -> None:
    """Other tokens in one document: bitwise nothing for the others, though counts change.

    Sequence and z losses are on. (The balance loss of a whole microbatch couples its documents
    by definition, and so does a capacity.)
    """
    moe = replace(MOE, activation=activation, sequence_loss=0.5, z_loss=0.5, hidden_dim=36)  # type: ignore[arg-type]
    layer = layer_of(moe, dtype)
    docs = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 80 + [2] * 30] * 2))
    x = randn(2, 150, 12, dtype=dtype)
    first, counts = gradients(layer, lambda x: layer(x, docs), x), tokens_per_expert(layer, x)
    other = torch.ones(2, 150, dtype=torch.bool)
    other[0, 40:120] = False
    for seed in range(5):
        changed = x.clone()
        changed[0, 40:120] = randn(1, 12, seed=seed, dtype=dtype) + 0.3 * changed[0, 40:120]
        second = gradients(layer, lambda x: layer(x, docs), changed)
        moved = [a - b for a, b in zip(tokens_per_expert(layer, changed), counts, strict=True)]
        assert max(map(abs, moved)) > 10
        for name in ("y", "x"):
            assert torch.equal(first[name][other], second[name][other]), name
            assert not torch.equal(first[name][~other], second[name][~other]), name


def test_step_is_forward() -> None:
    layer, x = layer_of(MOE), randn(3, 8, 12)
    state = layer.init_state(3, x.device, x.dtype)
    y = layer(x)
    counted = layer.router.tokens_per_expert.clone()
    for t in range(8):
        y_BD, state = layer.step(x[:, t], state)
        assert state is None and (y_BD - y[:, t]).abs().max() < FP64
    assert torch.equal(layer.router.tokens_per_expert, counted)


def test_dropping_is_for_training() -> None:
    """A capacity that drops: decoding still computes every choice."""
    layer, x = layer_of(replace(MOE, capacity_factor=0.2)), randn(3, 8, 12)
    y_BD, _ = layer.step(x[:, 0], None)
    assert (y_BD - dense(layer, x)[:, 0]).abs().max() < FP64


@pytest.mark.parametrize("how", ["fp32", "bf16_weights", "autocast"])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_dtypes(how: str, factor: float | None) -> None:
    """Each of x, weights, two projections, hidden, rows and output is rounded once: 8 * 2^-9."""
    moe = replace(MOE, capacity_factor=factor, z_loss=0.1, shared_gate=True)
    x = randn(2, 40, 12, dtype=torch.bfloat16)
    plain = layer_of(moe, torch.float32)
    rounded = plain if how == "fp32" else layer_of(moe, torch.float32).to(torch.bfloat16)
    want = gradients(rounded.double(), rounded, x.double())
    layer = layer_of(moe, torch.float32)
    layer = layer.to(torch.bfloat16) if how == "bf16_weights" else layer
    x = x if how == "bf16_weights" else x.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = gradients(layer, layer, x)
    assert got["y"].dtype == x.dtype == got["x"].dtype
    assert layer.router.weight.dtype == torch.float32 == got["router.weight"].dtype
    for name, value in want.items():
        error = float((got[name].double() - value).norm() / value.norm())
        assert error < (1e-5 if how == "fp32" else 8 * 2.0**-9), (name, error)


@pytest.mark.parametrize("kind", ["shared_gate", "relu2", "no_shared"])
def test_rules_cover_every_tensor(kind: str) -> None:
    with torch.device("meta"):
        layer = MixtureOfExperts(replace(CONFIG, moe=KINDS[kind]))
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert all(t.is_meta for t in tensors.values())
    rules = layer.init_rules()
    assert set(rules) == set(tensors)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes["experts.w1"] == (6, 10, 12) and shapes["experts.w2"] == (6, 12, 10)
    assert ("experts.w3" in shapes) == (kind != "relu2")
    if kind == "shared_gate":
        assert shapes["shared.w1.weight"] == (14, 12) and shapes["shared.gate.weight"] == (1, 12)
    for name, rule in rules.items():
        if name in dict(layer.named_buffers()):
            assert rule == Constant(0.0)
        else:
            assert rule == Normal(0.5 / math.sqrt(16) if ".w2" in name else 0.5), name
