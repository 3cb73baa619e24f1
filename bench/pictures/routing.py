"""Pictures of choices of experts: null experts, and groups of experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.pictures.svg import Drawing
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.model.init import initialise

EXPERTS, DIM, CELL = 32, 16, 13


def choices(moe: MoEConfig, tokens: int) -> Tensor:
    """Return the experts that an untrained router chooses, `[tokens, K]`; a null is number E.

    Args:
        moe: experts, nulls and groups.
        tokens: number of random tokens, the same ones for every `moe`.
    """
    router = Router(ModelConfig(dim=DIM, init_std=0.5, moe=moe)).double()
    initialise(router, router.init_rules(), seed=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, DIM, dtype=torch.float64, generator=generator)
    return router(x)[1].view(tokens, -1)


def null_experts() -> Drawing:
    """Draw how many experts each of 512 tokens has, with and without nulls."""
    drawing = Drawing(660, "Without null experts each token has four; with them some have none.")
    tokens, left, high = 512, 60, 120
    for column, rho in enumerate((1.0, 0.5)):
        moe = MoEConfig(num_experts=8, top_k=4, null_rho=rho, hidden_dim=8)
        count = (choices(moe, tokens) < 8).sum(1)
        x, base = left + 310 * column, 40 + high
        drawing.text(x, 24, "without nulls" if rho == 1 else "null_rho 0.5", "head")
        for number in range(9):
            share = (count == number).double().mean().item()
            bar = high * share
            if bar:
                drawing.rect(x + 28 * number, base - bar, 24, bar, 0 if number == 4 else 1)
            words = f"{share:.0%}" if share else ""
            drawing.text(x + 28 * number, base - bar - 4, words, "note")
            drawing.text(x + 28 * number + 9, base + 16, str(number), "note")
        mean = count.double().mean().item()
        drawing.text(x, base + 36, f"experts of a token: {mean:.1f} on average", "note")
    drawing.text(14, 24, "tokens", "note")
    return drawing


def groups_of_experts() -> Drawing:
    """Draw which experts ten tokens choose, anywhere and in two of four groups."""
    drawing = Drawing(
        660, "Six experts chosen anywhere lie on three or four machines, in two groups on two."
    )
    tokens, group = 10, EXPERTS // 4
    for row, bound in enumerate((False, True)):
        moe = MoEConfig(num_experts=EXPERTS, top_k=6, hidden_dim=8)
        if bound:
            moe = replace(moe, num_groups=4, top_k_groups=2)
        chosen_TK = choices(moe, tokens)
        top = 46 + row * (tokens * CELL + 46)
        drawing.text(14, top - 22, "in two of four groups" if bound else "anywhere", "head")
        drawing.text(560, top - 8, "machines", "note")
        for machine in range(4):
            x = 66 + machine * (group * CELL + 12)
            drawing.text(x, top - 8, f"machine {machine}", "note")
            for token in range(tokens):
                for expert in range(group):
                    taken = machine * group + expert in chosen_TK[token]
                    place = x + expert * CELL, top + token * CELL
                    drawing.rect(*place, CELL - 1, CELL - 1, machine if taken else "off")
        for token in range(tokens):
            visited = len({int(e) // group for e in chosen_TK[token]})
            y = top + token * CELL + 10
            drawing.text(14, y, f"token {token}", "note")
            drawing.text(560, y, str(visited), "note")
    return drawing
