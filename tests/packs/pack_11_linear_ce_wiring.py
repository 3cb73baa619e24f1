"""Megatron-LM: a hybrid model whose heads lost the fused loss and hold whole logits again.

Upstream: NVIDIA/Megatron-LM#3226 wired the fused linear cross entropy into GPT and hybrid models,
and NVIDIA/Megatron-LM#3207 (the hybrid model's multi-token heads, first #2363), rebased from
before it, brought plain output layers back: with the same switch on, GPT is fused and hybrid isn't,
without a word. Megatron isn't installed here: `Model` models both wirings in a few lines, a main
head and two heads for tokens further ahead. What is measured is real: the largest tensor that
training makes, and how many are as large as logits of the batch.

    python pack_11_linear_ce_wiring.py     exit 0: the lost wiring is caught and the right one holds

Legend: N tokens, D model, V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

SHOWN = ("torch", "triton", "megatron-core", "mamba-ssm", "liger-kernel")
N, D, V, CHUNK, AHEAD = 512, 32, 2048, 128, 2


def host() -> str:
    """GPU capability and versions: what decides the outcome."""
    gpu = torch.cuda.is_available()
    found = "capability {}.{}".format(*torch.cuda.get_device_capability()) if gpu else "no GPU"
    versions = [f"{name} {v}" for name in SHOWN if (v := version(name))]
    return "host: " + ", ".join([found, *versions])


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class PlainHead(nn.Linear):
    """An output layer that returns logits; the loss comes after it."""

    def forward(self, x_ND: Tensor, target_N: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x_ND), target_N, reduction="sum")


class FusedHead(nn.Linear):
    """The same loss, a chunk at a time; the backward makes a chunk's logits again."""

    def forward(self, x_ND: Tensor, target_N: Tensor) -> Tensor:  # type: ignore[override]
        def of_chunk(x_nD: Tensor, target_n: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x_nD, self.weight), target_n, reduction="sum")

        chunks = zip(x_ND.split(CHUNK), target_N.split(CHUNK), strict=True)
        losses = [checkpoint(of_chunk, x, t, use_reentrant=False) for x, t in chunks]
        return torch.stack([loss for loss in losses if isinstance(loss, Tensor)]).sum()


class Model(nn.Module):
    """A trunk and its heads: one for the next token, two for tokens further ahead."""

    def __init__(self, fuse: bool, wired: bool) -> None:
        """`fuse` is the user's switch; `wired` says whether this model's heads look at it."""
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.trunk = nn.Linear(D, D)
        self.further = nn.ModuleList(nn.Linear(D, D) for _ in range(AHEAD))
        kind = FusedHead if fuse and wired else PlainHead
        self.heads = nn.ModuleList(kind(D, V, bias=False) for _ in range(1 + AHEAD))
        self.double()

    def forward(self, ids_N: Tensor) -> Tensor:
        x_ND = self.trunk(self.embed(ids_N)).tanh()
        states = [x_ND, *(layer(x_ND).tanh() for layer in self.further)]
        targets = [ids_N.roll(-1 - ahead) for ahead in range(1 + AHEAD)]
        heads = zip(self.heads, states, targets, strict=True)
        return torch.stack([head(x, target) for head, x, target in heads]).sum()


class Large(TorchDispatchMode):
    """Counts the tensors of at least `numel` numbers that operators make, and keeps the largest."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count, self.largest = numel, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.count += sum(n >= self.numel for n in made)
        self.largest = max([self.largest, *made])
        return out


def step(wired: bool) -> tuple[Tensor, list[Tensor], Large]:
    """Loss, gradients and what was large, with the switch on."""
    model = Model(fuse=True, wired=wired)
    ids_N = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    with Large(N * V) as large:
        loss = model(ids_N)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], large


def main() -> int:
    print(host())
    loss, gradients, lost = step(wired=False)
    wanted_loss, wanted, kept = step(wired=True)
    for name, large in (("lost wiring", lost), ("wired", kept)):
        print(f"{name}: largest {large.largest} numbers, {large.count} of N * V = {N * V} or more")
    bug = lost.count > 0
    if bug:
        print(f"PACK 11 BUG FIRES: the switch is on, and {lost.count} tensors of N * V were made")
    pairs = zip([loss, *gradients], [wanted_loss, *wanted], strict=True)
    apart = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    drift = torch.stack(apart).max().item()  # NaN if one is; Python's max may drop it
    print(f"same loss and gradients, fp64: relative difference {drift:.1e}")
    holds = kept.count == 0 and drift < 1e-12  # fp64: apart only by the order of sums
    if holds:
        print(f"PACK 11 FIX HOLDS: {1 + AHEAD} heads fused, no tensor of N * V")
    return 0 if bug and holds else 1


if __name__ == "__main__":
    sys.exit(main())
