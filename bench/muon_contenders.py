"""Muon and AdamW implementations that bench/muon.py measures, and their matrices.

Every Muon has the same rule: momentum 0.95 with Nesterov, five quintic steps in bf16, updates
scaled by 0.2 sqrt(longer side), decoupled weight decay. Other people's packages are imported where
they are installed and are no part of this repository.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megacpp.torch_extras import local_part
from optim.muon_adamw import MuonAdamW
from optim.ownership import MatrixView

LR, MOMENTUM, DECAY, STEPS = 0.02, 0.95, 0.1, 5
QUINTIC = (3.4445, -4.7750, 2.0315)

# Name -> (how many, shape). `mixed` is a small hybrid: q and o, k and v, gate and up, down, in and
# out projections of mixers. `experts` are stacks of small matrices, cut between experts.
SETS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "tiny": [(48, (64, 256)), (48, (256, 64))],
    "mixed": [
        *((14, (256, 256)), (14, (64, 256)), (12, (768, 256))),
        *((6, (256, 768)), (5, (1152, 256)), (5, (256, 512))),
    ],
    "small": [(24, (256, 1024)), (24, (1024, 256))],
    "big": [(24, (512, 2048)), (24, (2048, 512))],
    "experts": [(8, (32, 16, 64))],
}
# What AdamW gets of a model: vectors and scalars per channel alone, or with embedding and head.
ADAMW_SETS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "vectors": [(96, (256,)), (32, (1024,)), (32, (64,)), (16, (1024, 4))],
    "embeddings": [(96, (256,)), (32, (1024,)), (32, (64,)), (16, (1024, 4)), (2, (4096, 256))],
}


def shapes_of(kinds: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the shape of each matrix."""
    return [shape for count, shape in kinds for _ in range(count)]


@dataclass(frozen=True)
class Contender:
    """Optimizer on its own copy of the parameters.

    Attributes:
        params: parameters to compare: DTensors on ranks, plain tensors in one process.
        stepped: the optimizer's parameters: `params`, or every matrix of their local shards.
    """

    params: list[nn.Parameter]
    stepped: list[nn.Parameter]
    step: Callable[[], Any]

    def feed(self, grads: Sequence[Tensor]) -> None:
        """Set the gradients of the optimizer's parameters."""
        apart = len(self.stepped) != len(self.params)
        for p, g in zip(self.stepped, _apart(grads) if apart else grads, strict=True):
            p.grad = g


Build = Callable[[list[nn.Parameter]], Contender]


def ours(params: list[nn.Parameter]) -> Contender:
    """Return this project's Muon, with momenta in bf16 as by default."""
    group = {
        "algorithm": "muon",
        "params": params,
        "views": [MatrixView(batched=p.ndim == 3) for p in params],
        "lr": LR,
        "weight_decay": DECAY,
        "momentum": MOMENTUM,
        "nesterov": True,
        "steps": STEPS,
        "coefficients": "quintic",
        "scale": "rms",
    }
    return Contender(params, params, MuonAdamW([group], muon_width="bf16").step)


def torch_muon(params: list[nn.Parameter]) -> Contender:
    """Return torch.optim.Muon; stacks, which it rejects, are split, which needs no exchange."""
    stacks = params[0].ndim == 3
    stepped = [nn.Parameter(m) for m in _apart(params)] if stacks else params
    optimizer = torch.optim.Muon(
        stepped,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=True,
        ns_coefficients=QUINTIC,
        ns_steps=STEPS,
        adjust_lr_fn="match_rms_adamw",
    )
    return Contender(params, stepped, optimizer.step)


def gather(params: list[nn.Parameter]) -> Contender:
    """Return Muon by `full_tensor()`: every rank gathers and orthogonalises every matrix."""
    momenta = [torch.zeros_like(local_part(p)) for p in params]

    @torch.no_grad()
    def step() -> None:
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        weights = [local_part(p) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        torch._foreach_mul_(weights, 1 - LR * DECAY)
        for p, w, g, m in zip(params, weights, grads, momenta, strict=True):
            update = torch.lerp(g, m, MOMENTUM).bfloat16()
            alpha = -LR * 0.2 * math.sqrt(max(p.shape[-2:]))
            if not isinstance(p, DTensor):
                w.add_(quintic(update), alpha=alpha)
                continue
            whole = DTensor.from_local(update, p.device_mesh, p.placements).full_tensor()
            rows = len(whole) // p.device_mesh.size()
            first = p.device_mesh.get_local_rank() * rows
            w.add_(quintic(whole)[first : first + rows], alpha=alpha)

    return Contender(params, params, step)


def dion_muon(params: list[nn.Parameter]) -> Contender:
    """Return microsoft/dion's Muon, with the others' quintic instead of its own polynomials."""
    import dion  # pyright: ignore[reportMissingImports]

    mesh = params[0].device_mesh if isinstance(params[0], DTensor) else None
    optimizer = dion.Muon(
        params,
        distributed_mesh=mesh,
        lr=LR,
        mu=MOMENTUM,
        weight_decay=DECAY,
        nesterov=True,
        adjust_lr="rms_norm",
        newton_schulz_func=quintic,
    )
    return Contender(params, params, optimizer.step)


def present() -> tuple[dict[str, Build], dict[str, str]]:
    """Return contenders that can run here, ours first, and the reasons for the others."""
    found: dict[str, Build] = {
        "ours": ours,
        "torch.optim.Muon": torch_muon,
        "full_tensor()": gather,
    }
    absent = {
        "torchtitan DistMuon": "only runs on CUDA; its bytes are those of its formula"
        if importlib.util.find_spec("torchtitan")
        else "no package `torchtitan` here; its bytes are those of its formula"
    }
    if importlib.util.find_spec("dion"):
        found["dion"] = dion_muon
    else:
        absent["dion"] = "no package `dion` here (github.com/microsoft/dion on PYTHONPATH)"
    return found, absent


def quintic(x: Tensor, epsilon: Any = 1e-7) -> Tensor:
    """Run Newton-Schulz in bf16 on a matrix `[R, C]` or batch `[K, R, C]`, `x`."""
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16().contiguous()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + epsilon)
    product = torch.addmm if y.ndim == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = y @ y.mT
        y = product(y, product(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def ours_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the AdamW half of this project's optimizer."""
    group = {"algorithm": "adamw", "params": params, "lr": 1e-3, "betas": (0.9, 0.95)}
    return MuonAdamW([{**group, "eps": 1e-8, "weight_decay": DECAY}])


def torch_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(
        params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, fused=True
    )


def bare_adamw(params: list[nn.Parameter]) -> Callable[[], None]:
    """Return the fused kernel on lists made once: the lower bound of any optimizer."""
    weights = [local_part(p).detach() for p in params]
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    steps = [torch.zeros(()) for _ in weights]
    grads: list[Tensor] = []

    @torch.no_grad()
    def step() -> None:
        if not grads:
            grads.extend(local_part(p.grad) for p in params if p.grad is not None)
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            *(weights, grads, means, squares, [], steps),
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=DECAY,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices of stacks' local shards, as views."""
    return [m for t in tensors for m in local_part(t.detach()).unbind(0)]
