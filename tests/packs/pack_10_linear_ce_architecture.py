"""Megatron-LM: fused linear cross entropy that raises on every GPU but one architecture.

Upstream: NVIDIA/Megatron-LM#2256 brought the loss with a gate on capability 10 (Blackwell), and
NVIDIA/Megatron-LM#3345 adds kernels for capability 9 (Hopper). Megatron isn't installed here:
`gate` is its check, modelled in a line. `two_tiers` is what it should be: native where the
architecture has a kernel, else the same loss in chunks with a warning that names the device.
No GPU is needed: capabilities are given, and the chunked loss runs wherever this runs.

    python pack_10_linear_ce_architecture.py     exit 0: the gate fails and two tiers hold

Legend: N tokens, D model, V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHOWN = ("torch", "triton", "nvidia-cutlass-dsl", "megatron-core", "liger-kernel")
DEVICES = {
    "A100": (8, 0),
    "L40": (8, 9),
    "H200": (9, 0),
    "B200": (10, 0),
    "GB10": (12, 1),
}
KERNELS = {9: "native Hopper", 10: "native Blackwell"}
N, D, V, CHUNK = 1024, 32, 4096, 128


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


def gate(capability: tuple[int, int]) -> str:
    """The upstream dispatcher: one architecture, an error for all others."""
    if capability[0] != 10:
        raise ValueError(f"Unsupported architecture: {capability[0]}")
    return KERNELS[10]


def two_tiers(device: str, capability: tuple[int, int]) -> str:
    """A kernel of the architecture, else the chunked loss, said aloud."""
    if capability[0] in KERNELS:
        return KERNELS[capability[0]]
    warnings.warn(
        f"linear cross entropy: no native kernel for {device} (capability {capability[0]}."
        f"{capability[1]}); the chunked torch path runs instead",
        RuntimeWarning,
        stacklevel=2,
    )
    return "chunked"


class Chunked(torch.autograd.Function):
    """Mean cross entropy of `x W^T`; a chunk's logits and gradients are made before the next."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        loss, dw_VD, dx_nD = x_ND.new_zeros(()), torch.zeros_like(weight_VD), []
        for x_nD, target_n in zip(x_ND.split(CHUNK), target_N.split(CHUNK), strict=True):
            logits_nV = x_nD @ weight_VD.T
            lse_n = logits_nV.logsumexp(1)
            loss += (lse_n - logits_nV.gather(1, target_n[:, None])[:, 0]).sum()
            g_nV = logits_nV.sub_(lse_n[:, None]).exp_()
            g_nV[torch.arange(len(x_nD)), target_n] -= 1
            dx_nD.append(g_nV @ weight_VD)
            dw_VD += g_nV.T @ x_nD
        ctx.save_for_backward(torch.cat(dx_nD) / len(x_ND), dw_VD / len(x_ND))
        return loss / len(x_ND)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        dx_ND, dw_VD = ctx.saved_tensors
        return dx_ND * scale, dw_VD * scale, None


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *made])
        return out


def loss_and_gradients(fused: bool) -> tuple[list[Tensor], int]:
    """Loss, dx and dW in fp64, and the largest tensor made on the way."""
    g = torch.Generator().manual_seed(0)
    x_ND = torch.randn(N, D, generator=g, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(V, D, generator=g, dtype=torch.float64).requires_grad_()
    target_N = torch.randint(V, (N,), generator=g)
    with Largest() as largest:
        if fused:
            loss = Chunked.apply(x_ND, weight_VD, target_N)
        else:
            loss = F.cross_entropy(x_ND @ weight_VD.T, target_N)
        loss.backward()  # type: ignore[union-attr]
    assert x_ND.grad is not None and weight_VD.grad is not None
    return [loss.detach(), x_ND.grad, weight_VD.grad], largest.numel  # type: ignore[union-attr]


def main() -> int:
    print(host())
    refused, chosen, silent = [], {}, []
    for device, capability in DEVICES.items():
        try:
            gate(capability)
        except ValueError as error:
            refused.append(device)
            print(f"{device}: gate: ValueError: {error}")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            chosen[device] = two_tiers(device, capability)
        told = [str(w.message) for w in heard if w.category is RuntimeWarning]
        print(f"{device}: two tiers: {chosen[device]}{'; RuntimeWarning: ' if told else ''}", *told)
        if chosen[device] == "chunked" and not any(device in text for text in told):
            silent.append(device)
    bug = refused == [d for d in DEVICES if d != "B200"]
    if bug:
        print(f"PACK 10 BUG FIRES: the gate raises on {', '.join(refused)}")
    (whole, logits), (chunked, most) = loss_and_gradients(False), loss_and_gradients(True)
    pairs = zip(chunked, whole, strict=True)
    apart = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    drift = torch.stack(apart).max().item()  # NaN if one is; Python's max may drop it
    print(f"chunked against whole logits, fp64: relative difference {drift:.1e}")
    print(f"largest tensor: {logits} numbers with logits, {most} in chunks (N * V = {N * V})")
    # fp64: 4096 terms a sum, each rounded by 1e-16, so 1e-12 parts a wrong formula from rounding
    holds = not silent and drift < 1e-12 and most < N * V <= logits
    if holds:
        print("PACK 10 FIX HOLDS: every device has a path, and the chunked one never holds N * V")
    return 0 if bug and holds else 1


if __name__ == "__main__":
    sys.exit(main())
