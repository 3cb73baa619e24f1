"""Golden: multi-token prediction with Megatron-LM's rolling of ids and labels; the blocks stand in.

Both chains: a depth hands on its hidden states as they are, or behind its norm (Megatron-LM).

Legend: B rows, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.mtp.module import IGNORED, MultiTokenPrediction, PredictionBlock
from megacpp.config.schema import ModelConfig
from megacpp.model.beside import beside, labels_beside
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead
from megacpp.model.init import initialise
from tests.golden.harness import GoldenFile

KNOWN = ("mtp*.safetensors",)
PER_DEPTH = ("enorm", "hnorm", "eh_proj", "A", "norm")
NAMES = (
    "embed_norm.weight",
    "hidden_norm.weight",
    "projection.weight",
    "attention.A",
    "norm.weight",
)


class StandIn(nn.Module):
    """z + tanh(z A), in the place of attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(dim, dim))

    def forward(self, z_BTD: Tensor, docs: Documents) -> Tensor:
        return z_BTD + torch.tanh(z_BTD @ self.A)


class Nothing(nn.Module):
    """In the place of the feed-forward."""

    def forward(self, z_BTD: Tensor, docs: Documents) -> Tensor:
        return z_BTD


def check(golden: GoldenFile) -> None:
    for chain in ("pre_norm", "post_norm"):
        check_chain(golden, chain == "post_norm")


def build(golden: GoldenFile, post: bool) -> tuple[MultiTokenPrediction, LanguageModelHead]:
    """The module and head with the file's weights."""
    vocabulary, dim = golden.input("emb").shape
    depths, loss = golden.config["depth"], golden.config["lam"]
    assert golden.config["order"].startswith("embedding first")
    model = ModelConfig(
        dim=dim,
        vocab_size=vocabulary,
        norm_eps=1e-6,
        mtp=MTPConfig(
            depths=depths,
            shared=False,
            loss=loss,
            beta=1.0,
            hidden="post_norm" if post else "pre_norm",
        ),
    )
    mtp, head = MultiTokenPrediction(model), LanguageModelHead(model)
    for module in mtp, head:
        initialise(module.to(golden.dtype), module.init_rules(), seed=0)
    with torch.no_grad():
        head.weight.copy_(golden.input("head"))
        for k, block in enumerate(mtp.blocks, 1):
            assert isinstance(block, PredictionBlock)
            block.attention = StandIn(dim).to(golden.dtype)  # type: ignore[assignment]
            block.feed_forward = Nothing()  # type: ignore[assignment]
            for ours, theirs in zip(NAMES, PER_DEPTH, strict=True):
                block.get_parameter(ours).copy_(golden.input(f"{theirs}{k}"))
    return mtp, head


def check_chain(golden: GoldenFile, post: bool) -> None:
    mtp, head = build(golden, post)
    tokens_BT = golden.input("tokens")
    B, T = tokens_BT.shape
    docs = golden.documents() or Documents.rows(B, T, golden.device)
    labels_BT = beside(tokens_BT, docs.ids_BT, 1, IGNORED)
    docs = docs.with_tokens(tokens_BT, labels_BT)
    depths = golden.config["depth"]
    emb, h0 = golden.input("emb", grad=True), golden.input("h0", grad=True)

    labels = [labels_beside(docs, k, IGNORED) for k in range(1, depths + 1)]
    valid = [(of_depth != IGNORED).sum() for of_depth in labels]
    mtp.weigh(B * T, torch.stack(valid), step=0, steps=1)
    hidden_NTD = mtp(partial(F.embedding, weight=emb), h0, h0, docs)
    ahead = mtp.ahead(hidden_NTD, docs)
    loss = head(h0.detach(), labels_BT, ahead).ahead_sum / (B * T)
    if not post:
        for k, (of_depth, x_BTD) in enumerate(
            zip(labels, hidden_NTD.chunk(depths), strict=True), 1
        ):
            golden.expect(f"labels{k}", of_depth.clamp(min=0))
            golden.expect(f"mask{k}", (of_depth != IGNORED).to(torch.uint8))
            of_this = head(x_BTD.detach(), of_depth).loss_sum
            golden.expect(f"loss{k}", of_this / valid[k - 1])
            golden.expect(f"loss{k}_div_T", of_this / (B * T))
    golden.expect("loss_postchain" if post else "loss", loss)
    loss.backward()
    prefix = "grad_postchain_" if post else "grad_"
    golden.expect(f"{prefix}emb", emb.grad)
    golden.expect(f"{prefix}h0", h0.grad)
    golden.expect(f"{prefix}head", head.weight.grad)
    for k, block in enumerate(mtp.blocks, 1):
        for ours, theirs in zip(NAMES, PER_DEPTH, strict=True):
            golden.expect(f"{prefix}{theirs}{k}", block.get_parameter(ours).grad)
