"""Prompts of several lengths, read into one decoding state.

Legend: B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp.model.hybrid import HybridLM
from megacpp.model.token_cache import chosen_rows, joined


def read_prompts(model: HybridLM, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Any]]:
    """Return logits `[B, V]` behind prompts, and the state; prompts as long are read together.

    Args:
        model: whole on one device.
        prompts: ids of each row, one or more.
    """
    device = model.embed.weight.device
    lengths = [len(prompt) for prompt in prompts]
    order: list[int] = []
    logits, states = [], []
    for length in dict.fromkeys(lengths):
        rows = [row for row, own in enumerate(lengths) if own == length]
        ids_BT = torch.tensor([list(prompts[row]) for row in rows], device=device)
        logits_BV, state = model.prefill(ids_BT)
        logits.append(logits_BV)
        states.append(state)
        order += rows
    if len(states) == 1:
        return logits[0], states[0]
    place_B = torch.tensor(order, device=device).argsort()
    return torch.cat(logits)[place_B], chosen_rows(joined(states), place_B)
