"""Decoding: logits of the next token, from a state of all tokens before it.

    logits_BV, state = prefill(model, prompts_BT)   # prompts at once
    logits_BV, state = decode(model, ids_B, state)  # one token after another

Every mixer has both forms with a state of its own (`init_state`, `prefill`, `step`). Here stand the
residual stream around the mixers, and the blocks in their order.

Legend: B rows, T tokens of a row, D model, n streams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megacpp.blocks.attention.sparse import choice_of, with_shared_selection
from megacpp.model.block import Block
from megacpp.model.hybrid import HybridLM, collapsed, spread
from megacpp.model.token_cache import chosen_rows, joined


def init_state(model: HybridLM, batch: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Return the decoding state of every block for empty sequences, then that of n-grams.

    Args:
        model: whole, on one device.
        batch: sequences.
        device: of the state.
        dtype: of the state.
    """
    found: list[Any] = []
    for block in _blocks(model):
        state = block.mixer.init_state(batch, device, dtype)
        if block.engram is not None:
            state = block.engram.init_state(batch, device, dtype), state
        found.append(state)
    return [*found, model.ngram.init_state(batch, device)] if hasattr(model, "ngram") else found


def prefill(model: HybridLM, ids_BT: Tensor) -> tuple[Tensor, list[Any]]:
    """Read prompts in one forward: return logits `[B, V]` of the next token, and the state.

    Args:
        model: whole, on one device.
        ids_BT: one prompt a row, all as long.
    """
    docs = model.documents(ids_BT, ids_BT)
    x_BTD, of_ngrams, state = model.embed(ids_BT), [], []
    if hasattr(model, "ngram"):
        x_BTD, recent = model.ngram.prefill(x_BTD, docs)
        of_ngrams = [recent]
    x_BTD = spread(model, x_BTD)
    for block in _blocks(model):
        memory = None
        if block.engram is not None:
            out_BTD, memory = block.engram.prefill(x_BTD, docs)
            x_BTD = x_BTD + out_BTD
        x_BTD, after = _layer(block, block.mixer.prefill, x_BTD, docs)
        state.append(after if memory is None else (memory, after))
    return _logits(model, x_BTD[:, -1]), [*state, *of_ngrams]


def read_prompts(model: HybridLM, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Any]]:
    """Return logits `[B, V]` behind prompts of any lengths, and the state; equal ones go together.

    Args:
        model: whole, on one device.
        prompts: ids of each row, one or more.
    """
    device = model.embed.weight.device
    lengths = [len(prompt) for prompt in prompts]
    order: list[int] = []
    logits, states = [], []
    for length in dict.fromkeys(lengths):
        rows = [row for row, own in enumerate(lengths) if own == length]
        ids_BT = torch.tensor([list(prompts[row]) for row in rows], device=device)
        logits_BV, state = prefill(model, ids_BT)
        logits.append(logits_BV)
        states.append(state)
        order += rows
    if len(states) == 1:
        return logits[0], states[0]
    place_B = torch.tensor(order, device=device).argsort()
    return torch.cat(logits)[place_B], chosen_rows(joined(states), place_B)


def decode(model: HybridLM, ids_B: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
    """Return logits `[B, V]` of the token behind one, and the next state.

    Args:
        model: whole, on one device.
        ids_B: the token of each row.
        state: from `init_state`, `prefill` or the step before.
    """
    x_BD, of_ngrams, following, choice = model.embed(ids_B), [], [], None
    if hasattr(model, "ngram"):
        *state, recent = state
        x_BD, recent = model.ngram.step(x_BD, ids_B, recent)
        of_ngrams = [recent]
    x_BD = spread(model, x_BD)
    for block, before in zip(_blocks(model), state, strict=True):
        memory = None
        if block.engram is not None:
            memory, before = before
            out_BD, memory = block.engram.step(x_BD, ids_B, memory)
            x_BD = x_BD + out_BD
        before = with_shared_selection(before, choice)
        x_BD, after = _layer(block, block.mixer.step, x_BD, before)
        choice = choice_of(after, choice)
        following.append(after if memory is None else (memory, after))
    return _logits(model, x_BD), [*following, *of_ngrams]


def _layer(block: Block, mix: Callable[..., Any], x: Tensor, context: Any) -> tuple[Tensor, Any]:
    """Return the residual stream behind a mixer's prefill or step, and the mixer's state.

    Args:
        block: of the mixer.
        mix: its `prefill` or `step`.
        x: `[..., D]`, or `[..., n, D]` with hyper-connections.
        context: document boundaries, or the state so far.
    """
    connection = block.connection
    u, *coefficients = (x,) if connection is None else connection.read(x)
    y, state = mix(u if block.post_norm else block.norm(u), context)
    y = block.norm(y) if block.post_norm else y
    return x + y if connection is None else connection.mix(x, y, *coefficients), state


def _logits(model: HybridLM, x: Tensor) -> Tensor:
    return model.head.logits(model.norm(collapsed(model, x)))


def _blocks(model: HybridLM) -> list[Block]:
    return [cast(Block, block) for block in model.blocks.values()]
