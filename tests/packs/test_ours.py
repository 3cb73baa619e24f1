"""The defects of packs 10, 11, 12 and 16 in our own code: none of them, in models with everything.

One process, or two forked gloo ranks where FSDP2 shards. What an operator makes passes through a
dispatch mode; nothing is estimated. Details of each: tests/model/test_loss.py, test_mtp.py,
test_lightning_indexer.py and test_fp32_contract.py.

Legend: B rows, T tokens, D model, V vocabulary, N = B T, S keys, I indexer heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import megacpp.blocks.top.module
import megacpp.model.head
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.presets import tiny_full
from megacpp.config.schema import Config
from megacpp.kernels.linear_cross_entropy.chunked import CrossEntropy, linear_cross_entropy
from megacpp.kernels.linear_cross_entropy.reference import linear_cross_entropy_plain
from megacpp.kernels.sparse_attention.indexer import index_scores
from megacpp.lessons.mesh_models import everything
from megacpp.model.documents import Documents
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import small
from tests.model.test_fp32_contract import sharded_step
from tests.ranks import run_ranks

CPU = World(0, 1, torch.device("cpu"))
EVERYTHING = everything(small("AEMRAFA"))


# ---- pack 10: a device without a kernel of its own ----------------------------------------------


def test_the_path_of_any_architecture_holds_no_logits() -> None:
    """Whatever the device: the chunked loss equals the plain one and never holds N * V numbers."""
    N, D, V = 1024, 16, 2048
    g = torch.Generator().manual_seed(0)
    x_ND = torch.randn(N, D, generator=g, dtype=torch.float64)
    weight_VD = torch.randn(V, D, generator=g, dtype=torch.float64)
    target_N = torch.randint(V, (N,), generator=g)
    found = []
    for loss in (linear_cross_entropy, linear_cross_entropy_plain):
        leaves = x_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        with LiveBytes() as live:
            out = loss(*leaves, target_N).loss_sum
            out.backward()
        found.append((live.largest, [out.detach(), *(leaf.grad for leaf in leaves)]))
    (chunked, got), (whole, want) = found
    assert chunked < 8 * N * V == whole
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * b.abs().max().item())


# ---- pack 11: every head of a hybrid model ------------------------------------------------------

TOKENS, VOCAB = 256, 8192


def large_vocabulary() -> HybridLM:
    """`tiny_full`, every letter and every head, where N * V is more than anything else."""
    config = dataclasses.replace(tiny_full().model, vocab_size=VOCAB)
    torch.manual_seed(0)
    model = build_model(Config(model=config), CPU)
    assert isinstance(model, HybridLM)
    for name in ("mtp", "top"):
        getattr(model, name).aux_scale.fill_(1.0)
    model.mtp.weights_K.fill_(1.0)  # type: ignore[operator]
    return model


def largest_tensor(model: HybridLM) -> int:
    """Numbers in the largest tensor of one forward and backward in fp32."""
    ids_BT = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with LiveBytes() as live:
        model(ids_BT, ids_BT, Documents.rows(1, TOKENS)).loss_sum.backward()
    for head in ("head", "top", "mtp"):
        gradients = [p.grad for p in getattr(model, head).parameters()]
        assert any(g is not None and g.norm() > 0 for g in gradients), f"{head} learned nothing"
    return live.largest // 4


def test_no_head_of_a_hybrid_model_makes_logits() -> None:
    model = large_vocabulary()
    assert max(p.numel() for p in model.parameters()) < TOKENS * VOCAB
    assert largest_tensor(model) < TOKENS * VOCAB


def unfused(further: bool) -> Callable[..., CrossEntropy]:
    """The head's loss with one lost wiring: of the next token, or of those further ahead."""

    def loss(*args: Any, weight_N: Tensor | None = None, **kwargs: Any) -> CrossEntropy:
        if (weight_N is not None) != further:
            return linear_cross_entropy(*args, weight_N=weight_N, **kwargs)
        x_ND, weight_VD, target_N, softcap, z_loss = args
        return linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap, z_loss)

    return loss


def plain_order(x_ND: Tensor, weight_VD: Tensor, *_: Any, **__: Any) -> Tensor:
    """Token order from whole logits."""
    return F.linear(x_ND, weight_VD).log_softmax(1).sum()


@pytest.mark.parametrize("head", ["lm", "mtp", "top"])
def test_the_check_sees_a_head_that_lost_its_wiring(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large_vocabulary()
    if head == "top":
        monkeypatch.setattr(megacpp.blocks.top.module, "token_order_loss", plain_order)
    else:
        monkeypatch.setattr(megacpp.model.head, "linear_cross_entropy", unfused(head == "mtp"))
    assert largest_tensor(model) >= TOKENS * VOCAB


# ---- pack 12: index scores ----------------------------------------------------------------------


def einsum_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    products_BTIS = torch.einsum("btih,bsh->btis", q_BTIH.float(), k_BSH.float()).relu()
    return (products_BTIS * w_BTI.float()[..., None]).sum(2)


def test_index_scores_hold_no_number_per_head_and_pair() -> None:
    B, T, I, H = 2, 128, 16, 32  # noqa: E741
    g = torch.Generator().manual_seed(0)
    shapes = ((B, T, I, H), (B, T, H), (B, T, I))
    operands = [torch.randn(s, generator=g) for s in shapes]
    found = []
    for scores in (index_scores, einsum_scores):
        leaves = [x.clone().requires_grad_() for x in operands]
        with LiveBytes() as live:
            out_BTS = scores(*leaves)
            out_BTS.sum().backward()
        found.append((live.largest, [out_BTS.detach(), *(x.grad for x in leaves)]))
    (streamed, got), (slab, want) = found
    assert slab == 4 * B * T * I * T and streamed <= max(4 * B * T * T, 4 * B * T * I * H)
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        # fp32: sums of 16 heads, 32 products and 128 tokens in another order, 6e-8 each
        assert ((a - b).abs().max() / b.abs().max()).item() < 5e-6


def test_training_with_an_indexer_holds_no_number_per_head_and_pair() -> None:
    """A whole A block, its indexer's loss included; nothing comes near B T I S."""
    B, T, I = 2, 192, 32  # noqa: E741
    base = small("A", vocab_size=20)
    sparse = dataclasses.replace(EVERYTHING.attention.sparse, layers="0", num_heads=I, top_k=8)
    attention = dataclasses.replace(base.attention, sparse=sparse)
    model = build_model(Config(model=dataclasses.replace(base, attention=attention)), CPU)
    ids_BT = torch.randint(20, (B, T), generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        model(ids_BT, ids_BT, Documents.rows(B, T)).loss_sum.backward()
    indexer = model.blocks["0"].mixer.indexer
    assert indexer.wq_b.weight.grad is not None
    assert live.largest < 4 * B * T * I * T


# ---- pack 16: parameters that stay fp32 ---------------------------------------------------------


class ParameterCopies(TorchDispatchMode):
    """Conversions whose source is one of these parameters, to whatever dtype."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): n for n, p in parameters.items()}
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            name = self.names.get(args[0].untyped_storage().data_ptr())
            self.found += [(name, out.dtype)] if name else []
        return out


def steps_in_bf16(model: nn.Module, steps: int = 2) -> None:
    ids_BT = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids_BT, ids_BT, Documents.rows(2, 16)).loss_sum
        loss.backward()


def test_autocast_copies_no_parameter_of_the_contract() -> None:
    model = build_model(Config(model=EVERYTHING), CPU)
    contract = dict(contract_parameters(model))
    assert len(contract) > 40
    with ParameterCopies(contract) as copies:
        steps_in_bf16(model)
    assert copies.found == []
    assert {p.dtype for p in contract.values()} == {torch.float32}


def test_a_cast_of_the_whole_model_is_no_matter_of_steps() -> None:
    """`.bfloat16()` leaves the contract alone once, and no step repairs anything."""
    model = build_model(Config(model=EVERYTHING), CPU)
    contract = dict(contract_parameters(model))
    model.bfloat16()
    assert {p.dtype for p in contract.values()} == {torch.float32}
    with ParameterCopies(contract) as copies:
        steps_in_bf16(model)
    assert copies.found == []


def test_the_check_sees_a_restore_in_every_step() -> None:
    model = build_model(Config(model=EVERYTHING), CPU)
    contract = dict(contract_parameters(model))
    owner = next(m for m in model.modules() if isinstance(m, Mamba3))

    def restore(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data.copy_(p.bfloat16().float())

    owner.register_forward_pre_hook(restore)
    with ParameterCopies(contract) as copies:
        steps_in_bf16(model)
    assert len(copies.found) == 2 * len(list(owner.parameters(recurse=False)))


def test_fsdp_in_bf16_reads_the_contract_in_fp32() -> None:
    """Two gloo ranks, bf16 policy: every contract parameter that a forward reads is fp32.

    Connections of several streams and two norms of a memory have no forward of their own to watch;
    they are gathered with the others, and no conversion of them is found.
    """
    model = build_model(Config(model=EVERYTHING), CPU)
    contract = {name for name, _ in contract_parameters(model)}
    unwatched = ("connection.", "engram.key_norm.", "engram.x_norm.")
    watched = {n for n in contract if not any(part in n for part in unwatched)}
    for seen in run_ranks(sharded_step, 2, EVERYTHING, 2):
        assert set(seen["dtypes"].values()) == {torch.float32}
        assert seen["dtypes"].keys() == watched
        assert seen["casts"] == [] and seen["sharded"]
