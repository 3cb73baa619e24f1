"""Megatron-LM: index scores of sparse attention through a product of every head at once.

Upstream: NVIDIA/Megatron-LM#4039 (a fused kernel, open) and #2869, of which it is part; what it
replaces makes `[sq, b, h, sk]` fp32 numbers with one einsum, cuts them at zero, weights them and
adds up the heads. Megatron isn't installed here: `einsum_scores` is that formula in a line,
`Streamed` adds head after head into the result and makes each head's products again in the
backward. Bytes are counted as operators make and free them, so no GPU is needed.

    python pack_12_index_scores_memory.py     exit 0: the einsum holds all heads, the stream doesn't

Legend: B rows, T queries, S keys, I heads, H dim of a head; b, t, s, i, h in the einsum.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHOWN = ("torch", "triton", "tilelang", "megatron-core", "nvidia-cutlass-dsl")
B, T, I, H = 1, 512, 16, 32  # noqa: E741
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def einsum_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    """The formula as it is written: every head's product at once."""
    products_BTIS = torch.einsum("btih,bsh->btis", wide(q_BTIH), wide(k_BSH)).relu()
    return (products_BTIS * wide(w_BTI)[..., None]).sum(2)


class Streamed(torch.autograd.Function):
    """Head after head into one `[B, T, S]`; keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
        ctx.save_for_backward(q_BTIH, k_BSH, w_BTI)
        k_BHS = wide(k_BSH).mT.contiguous()
        scores_BTS = k_BHS.new_zeros(*w_BTI.shape[:2], k_BHS.shape[2])
        for q_BTH, w_BT in zip(q_BTIH.unbind(2), wide(w_BTI).unbind(2), strict=True):
            scores_BTS.add_(torch.bmm(wide(q_BTH), k_BHS).relu_().mul_(w_BT[..., None]))
        return scores_BTS

    @staticmethod
    def backward(ctx: Any, d_BTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTIH, k_BSH, w_BTI = ctx.saved_tensors
        k, w = wide(k_BSH), wide(w_BTI)
        dq, dk, dw = torch.empty_like(q_BTIH), torch.zeros_like(k), torch.empty_like(w_BTI)
        for i in range(q_BTIH.shape[2]):
            q_BTH = wide(q_BTIH[:, :, i])
            seen_BTS = torch.bmm(q_BTH, k.mT).gt_(0).mul_(d_BTS)
            u_BTH = seen_BTS @ k
            dw[:, :, i] = (q_BTH * u_BTH).sum(2)
            dq[:, :, i] = u_BTH * w[:, :, i, None]
            dk += seen_BTS.mT @ (q_BTH * w[:, :, i, None])
            del seen_BTS
        return dq, dk.to(k_BSH.dtype), dw


def streamed_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    return Streamed.apply(q_BTIH, k_BSH, w_BTI)  # type: ignore[return-value]


class Bytes(TorchDispatchMode):
    """Most bytes alive at once, and of the largest storage, among those that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self.known.add(t.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.known:
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self.known.add(key)
                self.now += size
                self.largest = max(self.largest, size)
                weakref.finalize(storage, self.freed, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def inputs(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((B, tokens, heads, dim), (B, tokens, dim), (B, tokens, heads))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def measure(scores: Scores) -> tuple[Bytes, Tensor, list[Tensor]]:
    """Bytes of forward and backward in fp32, scores and gradients."""
    leaves = inputs(T, I, H, torch.float32)
    with Bytes() as count:
        out_BTS = scores(*leaves)
        out_BTS.backward(torch.ones_like(out_BTS))
    return count, out_BTS.detach(), [x.grad for x in leaves if x.grad is not None]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def main() -> int:
    print(host())
    slab, pairs = 4 * B * T * I * T, 4 * B * T * T
    whole, want, want_gradients = measure(einsum_scores)
    stream, got, gradients = measure(streamed_scores)
    for name, count in (("einsum", whole), ("head by head", stream)):
        print(f"{name}: largest {count.largest} bytes, at most {count.peak} alive")
    bug = whole.largest >= slab
    if bug:
        print(f"PACK 12 BUG FIRES: {slab} bytes of [B, T, I, S] for {pairs} bytes of scores")
    drift = relative(got, want)
    apart = [relative(a, b) for a, b in zip(gradients, want_gradients, strict=True)]
    slopes = torch.tensor(apart).max().item()  # NaN if one is; Python's max may drop it
    print(f"fp32, relative difference: scores {drift:.1e}, gradients {slopes:.1e}")
    small = inputs(6, 3, 4, torch.float64)
    exact = torch.autograd.gradcheck(streamed_scores, small)
    print(f"gradcheck in fp64: {exact}")
    # Sums of I = 16 heads and H = 32 products in another order: a few of fp32's 6e-8 each; the
    # gradients of k add 512 queries as well.
    holds = exact and stream.largest <= pairs and drift < 2e-6 and slopes < 1e-5
    if holds:
        print(f"PACK 12 FIX HOLDS: nothing larger than the scores, {whole.peak / stream.peak:.0f}"
              " times less alive")  # fmt: skip
    return 0 if bug and holds else 1


if __name__ == "__main__":
    sys.exit(main())
