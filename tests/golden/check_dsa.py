"""The lightning indexer against Megatron-LM: scores, choice, both losses and their gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megacpp.kernels.sparse_attention.indexer import choose_keys, index_scores
from megacpp.kernels.sparse_attention.indexer_loss import Target, indexer_loss
from megacpp.kernels.sparse_attention.reference import chosen_mask
from megacpp.model.documents import Documents
from tests.golden.harness import GoldenFile

KNOWN = ("dsa_index*.safetensors",)


def check(golden: GoldenFile) -> None:
    stored = dict(golden.config)
    top_k, scale, coefficient = (stored.pop(k) for k in ("topk", "softmax_scale", "loss_coeff"))
    assert not stored
    leaves = [golden.input(name, grad=True) for name in ("q", "k", "weights")]
    q_BTJX, k_BSX, w_BTJ = (x.transpose(0, 1) for x in leaves)
    docs = golden.documents() or Documents.rows(*w_BTJ.shape[:2], w_BTJ.device)

    scores_BTS = index_scores(q_BTJX, k_BSX, w_BTJ)
    golden.expect("index_scores", scores_BTS)
    expect_gradients(golden, "halfsq", 0.5 * scores_BTS.square().sum(), leaves)
    chosen_BTC = choose_keys(q_BTJX, k_BSX, w_BTJ, docs, docs, top_k)
    golden.expect("topk_mask", chosen_mask(chosen_BTC, k_BSX.shape[1]))
    q_BTNH, k_BSNH = (golden.input(name).transpose(0, 1) for name in ("attn_query", "attn_key"))
    target = Target(q_BTNH, k_BSNH, scale, None, docs, docs)
    for name, compared in (("dense", target), ("sparse", replace(target, chosen_BTC=chosen_BTC))):
        loss = indexer_loss(q_BTJX, k_BSX, w_BTJ, compared) * coefficient / w_BTJ[..., 0].numel()
        golden.expect(f"loss_{name}", loss)
        expect_gradients(golden, f"loss_{name}", loss, leaves)


def expect_gradients(golden: GoldenFile, name: str, of: Tensor, leaves: list[Tensor]) -> None:
    gradients = torch.autograd.grad(of, leaves)
    for leaf, gradient in zip(("q", "k", "weights"), gradients, strict=True):
        golden.expect(f"grad_{name}.{leaf}", gradient)
