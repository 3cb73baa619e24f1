"""Numbers of experts that a token chooses, and of tokens an expert takes; no torch import here.

With null experts (arXiv 2601.15370) the router of N experts chooses `slots` of a pool of N and
`null_copies`, top_k of them real ones on average. Copies of one null are all alike, so the chosen
ones are the best `columns` real experts, as far as they are better than the null.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from statistics import NormalDist

from megacpp.blocks.experts.config import MoEConfig
from megacpp.config.schema import ModelConfig

DECIMALS = 6  # of a number that is cut off: 8 (1 - 0.8) / 0.8 is 1.9999999999999996 in floats


def null_copies(moe: MoEConfig) -> int:
    """Null experts in the pool: they are 1 - rho of it, rounded down."""
    rho = moe.null_rho
    return 0 if rho >= 1 else max(1, int(round(moe.num_experts * (1 - rho) / rho, DECIMALS)))


def open_experts(moe: MoEConfig) -> int:
    """Real experts that a token can choose from: those of the best groups."""
    return moe.top_k_groups * moe.num_experts // moe.num_groups


def slots(moe: MoEConfig) -> int:
    """Choices of a token, null ones included: top_k / rho, or the whole pool."""
    choices = math.ceil(round(moe.top_k / moe.null_rho, DECIMALS))
    return min(choices, open_experts(moe) + null_copies(moe))


def columns(moe: MoEConfig) -> int:
    """Most real experts of a token; top_k without null experts."""
    return min(slots(moe), open_experts(moe))


def expert_capacity(tokens: int, moe: MoEConfig) -> int:
    """Slots per expert in capacity mode: an even share of the choices times the factor, up.

    Of null experts there are none: top_k is how many real ones a token chooses on average.
    """
    assert moe.capacity_factor is not None
    return math.ceil(round(tokens * moe.top_k / moe.num_experts * moe.capacity_factor, DECIMALS))


def visited_ranks(moe: MoEConfig, ep: int) -> int:
    """Most ranks of `ep` that hold experts of one token, with groups placed as the rules say."""
    most = min(columns(moe), ep)
    if moe.num_groups == 1:
        return most
    return min(most, moe.top_k_groups * max(1, ep // moe.num_groups))


def first_null_score(config: ModelConfig) -> float:
    """Return the score that a null starts with: about top_k experts of a token are better.

    The logits of a token that a norm made are normal with deviation init_std sqrt(D).
    """
    moe, deviation = config.moe, config.init_std * math.sqrt(config.dim)
    part = min(moe.top_k / moe.num_experts, 0.999)
    logit = deviation * NormalDist().inv_cdf(1 - part)
    if moe.score == "sigmoid":
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit - deviation**2 / 2) / moe.num_experts


@lru_cache(maxsize=64)
def circle(num_experts: int, num_groups: int = 1, top_k_groups: int = 1) -> tuple[int, ...]:
    """Every expert once, shuffled; in runs without values a token visits neighbours.

    Experts of `top_k_groups` groups lie together, so that neighbours are as near to each other as
    groups keep them.
    """
    draw, found = random.Random(0), list[int]()
    groups, each = list(range(num_groups)), num_experts // num_groups
    if num_groups > 1:
        draw.shuffle(groups)
    for first in range(0, num_groups, top_k_groups):
        some = groups[first : first + top_k_groups]
        experts = [g * each + e for g in some for e in range(each)]
        draw.shuffle(experts)
        found += experts
    return tuple(found)
