"""What an E mixer keeps for its backward: bytes by hand, with and without the policy.

Legend: B rows, T tokens of all rows, D model, E experts, K experts of a token, I hidden of an
expert, S slots.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import megacpp.kernels.flop_formulas  # noqa: F401 - registers those of our operators
from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.experts import module as moe_module
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import ModelConfig
from megacpp.kernels.experts import mlp as expert_products
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from megacpp.model.recompute import PLAIN
from megacpp.model.regions import Region

B, T, D = 2, 140, 32
MOE = MoEConfig(num_experts=6, top_k=2, hidden_dim=24, num_shared=0, route_scale=1.7)
KINDS = {
    "swiglu": MOE,
    "relu2": replace(MOE, activation="relu2"),
    "shared": replace(MOE, num_shared=1, shared_hidden_dim=40),
    "post_softmax": replace(MOE, score="softmax"),
    "pre_softmax": replace(MOE, score="softmax", softmax_order="pre"),
    "capacity": replace(MOE, capacity_factor=1.25),
    "balance": replace(MOE, balance_loss=0.7),
    "sequence": replace(MOE, sequence_loss=0.3),
    "z": replace(MOE, z_loss=0.2),
}
EXPERT_GEMM: frozenset[Region] = frozenset({"expert_gemm"})
WHOLE: frozenset[Region] = frozenset({"block"})
DTYPES = [torch.float32, torch.bfloat16]


def layer_of(moe: MoEConfig, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    layer = MixtureOfExperts(ModelConfig(dim=D, depth=8, init_std=0.5, moe=moe)).to(dtype)
    initialise(layer, layer.init_rules(), seed=1)
    layer.router.aux_scale.fill_(0.01)
    return layer


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Documents]:
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(B, T // B, D, generator=generator, dtype=torch.float64)
    docs = Documents.from_ids(torch.tensor([[0] * 30 + [1] * 40, [0] * 70]))
    _ = docs.lengths  # made once per batch, for all layers
    return x_BTD.to(dtype).requires_grad_(), docs


def spread(layer: MixtureOfExperts, x_BTD: Tensor) -> Any:
    """The groups that a forward makes."""
    x_TD = x_BTD.detach().flatten(0, 1)
    weights_TK, indices_TK, _ = layer.router(x_TD, decoding=True)
    return layer.dispatch(x_TD, indices_TK, weights_TK)[0].groups


def routing_bytes(moe: MoEConfig) -> int:
    """fp32 and int64, per token; of the scores of all experts only what the losses need."""
    E, K = moe.num_experts, moe.top_k
    per_token = 8 * K  # the choices
    if moe.softmax_order == "pre":
        per_token += 4 * E
    else:  # scores of the chosen and, of sigmoids, their sum
        per_token += 4 * K + 4 * (moe.score == "sigmoid")
    if moe.balance_loss or moe.sequence_loss:
        per_token += 4 * E + 4  # scores once more and their sum
    if moe.sequence_loss:
        per_token += 4 * E  # loads of each token's document
    if moe.z_loss:
        per_token += 4 * E + 4  # logits and what they sum up to
    return T * per_token + 4 * E * bool(moe.balance_loss)


def slot_bytes(moe: MoEConfig, slots: int) -> int:
    """Slots of copies, tokens and weights of slots; slots of each expert, or what has a slot."""
    if moe.capacity_factor is None:
        return 8 * T * moe.top_k + 8 * slots + 4 * (slots + 1) + 8 * moe.num_experts
    return (8 + 1) * T * moe.top_k + (8 + 4) * (slots + 1)


def hidden_bytes(moe: MoEConfig, slots: int, dtype: torch.dtype) -> int:
    """Gate and up, or what the ReLU is taken of."""
    return (2 if moe.activation == "swiglu" else 1) * slots * moe.hidden_dim * dtype.itemsize


def shared_bytes(moe: MoEConfig, dtype: torch.dtype) -> int:
    """Gate and up of the shared expert."""
    return 2 * T * moe.num_shared * moe.shared_hidden_dim * dtype.itemsize


def kept(layer: MixtureOfExperts, x_BTD: Tensor, docs: Documents) -> tuple[int, Tensor]:
    """Bytes alive after the forward beside its input and output; and the output."""
    gc.collect()
    with LiveBytes() as live:
        y_BTD = layer.experts.recompute("block", layer, x_BTD, docs)
        alive = live.alive()
    return alive - y_BTD.untyped_storage().nbytes(), y_BTD


def with_recompute(layer: MixtureOfExperts, regions: frozenset[Region]) -> Replays:
    replays = Replays()
    give(layer, BlockRecompute(regions, replays))
    return replays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_without_policy(kind: str, dtype: torch.dtype) -> None:
    """Not its rows: neither copies of tokens nor outputs of experts. Not `x` again in fp32."""
    moe = KINDS[kind]
    layer, (x, docs) = layer_of(moe, dtype), inputs(dtype)
    slots = len(spread(layer, x).token_S)
    assert slots % 48 == 0 or moe.capacity_factor is not None
    want = routing_bytes(moe) + slot_bytes(moe, slots) + hidden_bytes(moe, slots, dtype)
    if moe.num_shared:
        want += shared_bytes(moe, dtype)
    assert kept(layer, x, docs)[0] == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_with_expert_gemm(kind: str, dtype: torch.dtype) -> None:
    """The input and the routing; of the hidden units the shared expert's alone."""
    moe = KINDS[kind]
    layer, (x, docs) = layer_of(moe, dtype), inputs(dtype)
    slots = len(spread(layer, x).token_S)
    with_recompute(layer, EXPERT_GEMM)
    want = routing_bytes(moe) + slot_bytes(moe, slots)
    if moe.num_shared:
        want += shared_bytes(moe, dtype)
    assert kept(layer, x, docs)[0] == want


@contextmanager
def calls(sorting: ModuleType = moe_module) -> Iterator[dict[str, int]]:
    """How often `sorting` puts tokens into groups, and rows are multiplied with experts' matrices.

    Products of rows with matrices, and outer products of rows for gradients of matrices.
    """
    found = {"sort": 0, "products": 0, "outer_products": 0}

    def counted(key: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found[key] += 1
            return fn(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        sorts = [name for name in vars(sorting) if name.startswith("group_rows")]
        kernels = ["products", "outer_products"]
        for module, names in ((sorting, sorts), (expert_products, kernels)):
            for name in names:
                key = name if module is expert_products else "sort"
                patch.setattr(module, name, counted(key, getattr(module, name)))
        yield found


def gradients(layer: MixtureOfExperts, x: Tensor, docs: Documents) -> list[Tensor]:
    """Output, gradients and all that the router counted and recorded."""
    x.grad = None
    layer.zero_grad()
    y = layer.experts.recompute("block", layer, x, docs)
    layer.router.expert_bias += torch.linspace(3.0, -3.0, 6)  # would choose others from here on
    y.backward(torch.randn(y.shape, generator=torch.manual_seed(3)).to(y))
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(grad is not None and grad.any() for grad in grads)
    router = layer.router
    counted = router.tokens_per_expert, router.loss_sums, router.gradient_squares
    return [y.detach(), *grads, *counted]  # type: ignore[list-item]


@pytest.mark.parametrize("regions", [EXPERT_GEMM, WHOLE], ids=["expert_gemm", "block"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2", "shared", "capacity", "losses", "softmax"])
def test_again_is_the_same(kind: str, regions: frozenset[Region]) -> None:
    """Bitwise, with a router that by then would choose others, and counted once.

    The experts' region makes gate and up again and nothing else; nothing is sorted again.
    """
    losses = replace(MOE, balance_loss=0.7, sequence_loss=0.3, z_loss=0.2)
    moe = {**KINDS, "losses": losses, "softmax": replace(losses, score="softmax")}[kind]
    (x, docs), found = inputs(), []
    for chosen in (frozenset[Region](), regions):
        layer = layer_of(moe)
        replays = with_recompute(layer, chosen)
        with calls() as counts, FlopCounterMode(display=False) as flops:
            slots = len(spread(layer, x).token_S)
            found.append((gradients(layer, x, docs), counts, flops.get_total_flops(), slots))
        assert replays.counts == dict.fromkeys(chosen, 1)
    (plain, once, flops, slots), (again, twice, more_flops, _) = found
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    if regions == EXPERT_GEMM:
        into = 2 if moe.activation == "swiglu" else 1
        assert once == {"sort": 2, "products": 2 * (into + 1), "outer_products": into + 1}
        assert twice == once | {"products": 2 * (into + 1) + into}
        if moe.capacity_factor is None:
            assert more_flops - flops == into * 2 * slots * D * moe.hidden_dim


def test_decisions_are_decided_once() -> None:
    """A recomputed block asks neither for experts nor for loads again."""
    layer, (x, docs) = layer_of(replace(MOE, balance_loss=0.7, sequence_loss=0.3)), inputs()
    with_recompute(layer, WHOLE)
    asked: list[str] = []

    def noted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asked.append(name)
            return fn(*args)

        return call

    for name in ("_choose", "_plain"):
        setattr(layer.router, name, noted(name, getattr(layer.router, name)))
    loads = layer.router.batch_load
    loads.forward = noted("batch_load", loads.forward)
    layer.experts.recompute("block", layer, x, docs).sum().backward()
    assert asked == ["_choose", "_plain", "batch_load"]


def test_regions_are_plain_unless_given() -> None:
    layer = layer_of(MOE)
    assert layer.experts.recompute is layer.router.recompute is PLAIN
