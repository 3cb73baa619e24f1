"""Fused linear cross entropy: mean loss, gradients, and log-sum-exp whole and per shard."""

from __future__ import annotations

import re

import torch

from megacpp.kernels.linear_cross_entropy.chunked import linear_cross_entropy, merge_statistics
from megacpp.kernels.linear_cross_entropy.reference import vocab_shard_statistics
from tests.golden.harness import GoldenFile

KNOWN = ("linear_ce*.safetensors",)


def softcap_of(golden: GoldenFile) -> float | None:
    """The cap from the configuration, else from the text that names the stored function."""
    if "softcap" in golden.config:
        return golden.config["softcap"]
    found = re.search(r"softcap\s*=?\s*([0-9.]+)", golden.metadata["function"])
    assert found or "softcap" not in golden.path.stem, "a soft-capped file that hides its cap"
    return float(found[1]) if found else None


def check(golden: GoldenFile, backend: str = "torch") -> None:
    cap = softcap_of(golden)
    x, weight = golden.input("x", grad=True), golden.input("weight", grad=True)
    target = golden.input("target")
    out = linear_cross_entropy(x, weight, target, softcap=cap, chunk=5, backend=backend)
    loss = out.loss_sum / out.valid_tokens
    loss.backward()
    golden.expect("loss", loss)
    golden.expect("grad_x", x.grad)
    golden.expect("grad_weight", weight.grad)
    golden.expect("lse", out.lse_N)

    with torch.no_grad():
        num_shards = len(golden.input("lse_shard"))
        shards = weight.chunk(num_shards)
        firsts = range(0, len(weight), len(shards[0]))
        parts = [
            vocab_shard_statistics(x, shard, target, first, softcap=cap, chunk=4)
            for shard, first in zip(shards, firsts, strict=True)
        ]
    golden.expect("lse_shard", torch.stack([part.lse_N for part in parts]))
    whole = merge_statistics(parts)
    golden.expect("lse", whole.lse_N)
    golden.expect("loss", (whole.lse_N - whole.correct_N)[target >= 0].mean())
