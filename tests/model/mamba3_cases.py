"""Random Mamba-3 scans and layers, and packed documents, for the tests of the M room."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, ScanInputs
from megacpp.model.documents import Documents

VARIANTS = {
    "siso": Mamba3Config(),
    "siso_groups_rope1_outnorm": Mamba3Config(ngroups=2, rope_fraction=1.0, out_norm=True),
    "siso_conv_softplus": Mamba3Config(conv_kernel=4, a_activation="softplus"),
    "mimo": Mamba3Config(mimo_rank=2),
    "mimo_groups_conv_outnorm": Mamba3Config(
        mimo_rank=3, ngroups=2, conv_kernel=3, out_norm=True, rope_fraction=1.0
    ),
}


def random_scan(
    tokens: int,
    rank: int = 1,
    groups: int = 1,
    rows: int = 2,
    heads: int = 4,
    state: int = 8,
    head_dim: int = 3,
    angles: int = 2,
    shared_angles: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[ScanInputs, HeadWeights, Mamba3State]:
    """Inputs, weights and an initial state, every tensor a leaf that wants its gradient."""
    B, T, H, R, G, N, P, A = rows, tokens, heads, rank, groups, state, head_dim, angles

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}

    inputs = {
        "Q": normal(B, T, R, G, N),
        "K": normal(B, T, R, G, N),
        "V": normal(B, T, H, P),
        "Z": normal(B, T, H, P),
        "ADT": -0.3 * normal(B, H, T).exp(),
        "DT": 0.5 * normal(B, H, T).exp(),
        "Trap": normal(B, H, T),
        "Angles": normal(B, T, 1 if shared_angles else H, A),
    }
    weights = {"Q_bias": normal(H, R, N), "K_bias": normal(H, R, N), "D": normal(H)}
    if R > 1:
        weights |= {name: normal(H, R, P) for name in ("mimo_x", "mimo_z", "mimo_o")}
        weights["norm"] = normal(H, P)
    before = {
        "angle": normal(B, H, A),
        "ssm": normal(B, H, P, N),
        "k": normal(B, H, R, N),
        "v": normal(B, H, P),
    }
    return (
        ScanInputs(**leaves(inputs)),
        HeadWeights(**leaves(weights)),  # type: ignore[arg-type]
        Mamba3State(**leaves(before)),
    )


def scan_leaves(*parts: ScanInputs | HeadWeights | Mamba3State | None) -> list[Tensor]:
    return [t for part in parts if part for t in vars(part).values() if isinstance(t, Tensor)]


def packed(rows: int, tokens: int, seed: int = 0) -> Documents:
    """Random documents, many of length 1."""
    generator = torch.Generator().manual_seed(seed)
    starts_BT = torch.rand(rows, tokens, generator=generator) < 0.3
    return Documents.from_ids(starts_BT.cumsum(1))


def random_layer(variant: str, chunk: int = 8, dtype: torch.dtype = torch.float64) -> Mamba3:
    """A small layer whose parameters are all away from their special initial values."""
    small = {"d_state": 8, "headdim": 4, "chunk_size": chunk}
    mamba = Mamba3Config(**{**vars(VARIANTS[variant]), **small})
    layer = Mamba3(ModelConfig(dim=12, mamba3=mamba)).to(torch.float64)
    seed = int(hashlib.sha256(variant.encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 * noise)
    return layer.to(dtype)
