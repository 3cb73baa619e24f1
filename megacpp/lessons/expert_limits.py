"""Rows that routed tokens send between ranks, with groups of experts and with null experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.config.schema import MeshConfig, ModelConfig
from megacpp.lessons.experts import CPU, Leaving, Waits, randn, spread_over
from megacpp.model.init import initialise
from parallel.expert.parallel import ExpertParallel, Kind
from parallel.start import join

KINDS: tuple[Kind, Kind] = ("per_rank", "per_expert")
FOUR = MeshConfig(dp_shard=4, ep=4)
TOKENS, DIM, EP = 256, 16, 4
FREE = MoEConfig(num_experts=32, top_k=6, hidden_dim=8, num_shared=0)
MODELS = {
    "free": FREE,
    "2 of 4 nodes": replace(FREE, num_groups=4, top_k_groups=2),
    "1 of 2 pairs of nodes": replace(FREE, num_groups=2, top_k_groups=1),
    "3 of 8 half nodes": replace(FREE, num_groups=8, top_k_groups=3),
    "nulls": replace(FREE, null_rho=0.5),
    "nulls, 2 of 4 nodes": replace(FREE, null_rho=0.5, num_groups=4, top_k_groups=2),
}


def of_rank(rank: int, _size: int) -> dict[str, dict[str, Any]]:
    """Return ranks that tokens met, rows that left this rank in both kinds, waits of the host."""
    world, found = join(FOUR, CPU), {}
    x_BTD = randn(1, TOKENS, DIM, seed=rank).to(torch.bfloat16)
    for name, moe in MODELS.items():
        mine: dict[str, Any] = {}
        for kind in KINDS:
            mixer = MixtureOfExperts(ModelConfig(dim=DIM, depth=1, init_std=0.5, moe=moe))
            initialise(mixer.to(torch.bfloat16), mixer.init_rules(), seed=0)
            indices_TK = mixer.router(x_BTD, decoding=True)[1]
            spread_over(mixer, world, ExpertParallel(kind))
            own = x_BTD.clone().requires_grad_()
            with Leaving() as seen, Waits() as waits:
                mixer(own).sum().backward()
            assert own.grad is not None and own.grad.isfinite().all()
            mine[kind] = seen.bytes[torch.bfloat16] / (4 * DIM * 2)  # there and back, twice
            mine["waits"] = waits.seen
        choices: list[list[int]] = indices_TK.tolist()
        met = [{e // 8 for e in of_token if e < 32} for of_token in choices]
        mine["most"] = max(map(len, met))
        mine["rows"] = sum(len(ranks - {rank}) for ranks in met)
        mine["copies"] = sum(e < 32 and e // 8 != rank for of in choices for e in of)
        mine["real"] = sum(e < 32 for of_token in choices for e in of_token)
        found[name] = mine
    return found
