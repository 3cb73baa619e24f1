"""Picture of expert dispatch: the rows that tokens send, per expert and per rank."""

from __future__ import annotations

from typing import Literal

import torch

from bench.pictures.svg import Drawing
from megacpp.blocks.experts.config import MoEConfig
from megacpp.config.schema import MeshConfig
from megacpp.kernels.backend import PLAIN_KERNELS
from parallel.expert.parallel import ExpertDispatch
from parallel.start import join
from tests.ranks import run_ranks

Kind = Literal["per_expert", "per_rank"]
KINDS: tuple[tuple[int, Kind], ...] = ((0, "per_expert"), (380, "per_rank"))
# Experts of each rank's tokens, as in chapter 14; rank r of 4 holds experts 2 r and 2 r + 1.
CHOSEN = [[[0, 1], [2, 6]], [[2, 3], [3, 7]], [], [[0, 1], [1, 6], [6, 7]]]


def sent(rank: int, size: int, kind: Kind) -> list[int]:
    """Return how many rows this rank sends to each, by the dispatch of a real exchange."""
    world = join(MeshConfig(dp_shard=size, ep=size), torch.device("cpu"))
    moe = MoEConfig(num_experts=2 * size, top_k=2, hidden_dim=4, num_shared=0)
    dispatch = ExpertDispatch(moe, world.group("ep"), kind, False, PLAIN_KERNELS)
    indices_TK = torch.tensor(CHOSEN[rank], dtype=torch.int64).view(-1, 2)
    x_TD, weights_TK = torch.ones(len(indices_TK), 8), torch.ones(len(indices_TK), 2)
    return dispatch(x_TD, indices_TK, weights_TK)[1].leaving


def expert_dispatch() -> Drawing:
    """Draw seven tokens on four ranks, and the rows that they send to eight experts."""
    drawing = Drawing(760, "Rows that seven tokens send to eight experts on four ranks")
    for left, kind in KINDS:
        rows = run_ranks(sent, 4, kind)
        total = sum(map(sum, rows))
        drawing.text(left + 16, 24, kind, "head")
        drawing.text(left + 110, 24, f"{total} rows", "note")
        for rank, tokens in enumerate(CHOSEN):
            top = 44.0 + rank * 76
            drawing.text(left + 16, top + 12, f"rank {rank}", "note")
            drawing.rect(left + 246, top, 116, 62, "off")
            drawing.text(left + 252, top + 56, f"gets {sum(row[rank] for row in rows)}", "note")
            for i in range(2):
                drawing.rect(left + 252 + i * 54, top + 6, 50, 30, rank, f"expert {2 * rank + i}")
            if not tokens:
                drawing.text(left + 70, top + 12, "no tokens", "note")
            else:
                drawing.text(left + 16, top + 30, f"sends {sum(rows[rank])}", "note")
            for place, experts in enumerate(tokens):
                y = top + place * 22
                names = ", ".join(map(str, experts))
                drawing.rect(left + 74, y, 62, 18, "line", "")
                drawing.text(left + 80, y + 13, f"to {names}", "note")
                targets = experts if kind == "per_expert" else sorted({e // 2 for e in experts})
                for target in targets:
                    to = target // 2 if kind == "per_expert" else target
                    shift = target % 2 * 8 if kind == "per_expert" else 4
                    end = left + 246, 44.0 + to * 76 + 16 + shift
                    drawing.path([(left + 136, y + 9), end], f"s{to}")
    return drawing
