"""Golden: targets, loss and gradients of token order prediction, upstream's and within documents.

The stored rows are shifted: word `t` of `seq` is the one after token `t`, so a word before them
makes them rows again. Upstream's plain code also counts the word `window` after the next one, with
a score of 0: that is a window of one word more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.token_order import TokensAhead, token_order_loss
from tests.golden.harness import GoldenFile

KNOWN = ("top*.safetensors",)


def check(golden: GoldenFile) -> None:
    seq_BT, window = golden.input("seq"), golden.config["window"]
    tokens = golden.input("x").shape[1]
    ids_BT = F.pad(seq_BT, (1, 0))
    ends_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    ends_BT[:, -1] = True
    cut_BT = ends_BT.clone()
    cut_BT[:, golden.input("cu_seqlens")[1:].long() - 1] = True
    index_T = torch.arange(tokens)
    check_one(golden, "naive", TokensAhead.from_rows(ids_BT, ends_BT, window + 1, index_T))
    check_one(golden, "triton", TokensAhead.from_rows(ids_BT, ends_BT, window, index_T))
    check_one(golden, "docs", TokensAhead.from_rows(ids_BT, cut_BT, window, index_T))


def check_one(golden: GoldenFile, name: str, ahead: TokensAhead) -> None:
    x_BTD, weight_VD = golden.input("x", grad=True), golden.input("weight", grad=True)
    (B, T, _), V = x_BTD.shape, len(weight_VD)
    scores_NV = scores(ahead, V, golden.config["window"])
    golden.expect(f"targets_{name}", scores_NV.view(B, T, V))
    has_N = (scores_NV >= 0).any(1)
    divisor = has_N.sum() if name == "docs" else B * T
    # The gradient of the logits is that of x under a unit matrix.
    logits_NV = (x_BTD @ weight_VD.T).detach().flatten(0, 1).requires_grad_()
    unit_VV = torch.eye(V, dtype=x_BTD.dtype)
    (token_order_loss(logits_NV, unit_VV, ahead, chunk=5) / divisor).backward()
    assert logits_NV.grad is not None
    golden.expect(f"grad_logits_{name}", logits_NV.grad.view(B, T, V))
    loss_sum = token_order_loss(x_BTD.flatten(0, 1), weight_VD, ahead, chunk=5)
    if name == "docs":
        golden.expect("loss_docs_mean_valid", loss_sum / divisor)
        golden.expect("loss_docs_mean_all", loss_sum / (B * T))
        return
    golden.expect(f"loss_{name}", loss_sum / divisor)
    (loss_sum / divisor).backward()
    for leaf, tensor in (("x", x_BTD), ("weight", weight_VD)):
        if f"grad_{leaf}_{name}" in golden:
            golden.expect(f"grad_{leaf}_{name}", tensor.grad)


def scores(ahead: TokensAhead, vocab: int, window: int) -> Tensor:
    """`[N, V]`: window - words between, -1 where there is none, out of the lists."""
    words_NK, share_NK = ahead.targets(slice(None), torch.float64)
    ahead_K = torch.arange(words_NK.shape[1])
    scores_NK = torch.where(share_NK > 0, window - ahead_K, -1)
    empty_NV = torch.full((len(words_NK), vocab), -1)
    return empty_NV.scatter_reduce(1, words_NK, scores_NK, "amax")
