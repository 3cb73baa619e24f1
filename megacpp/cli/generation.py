"""Bytes of generation, and of evaluation without gradients, on one device.

    found = generation_memory(config.model, GenerationArgs(prompts=8), gpu=True)
    found.point                    # weights, and the fullest moment beside them

The model runs without values, as `megacpp sample` and `megacpp eval` run it: prompts in one
forward, then one token at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.cli.memory_generate import GenerationArgs, GenerationMemory
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.token_cache import TokenCache, mapped
from parallel.simulate.fake import fake_tensors


def generation_memory(config: ModelConfig, args: GenerationArgs, gpu: bool) -> GenerationMemory:
    """Return the bytes of a batch, from a run without values.

    Args:
        config: the model.
        args: size of the batch.
        gpu: allocate as on a GPU.
    """
    return _followed(config, args, torch.device("cpu"), fake_tensors(memory=True, gpu=gpu))


def measured_memory(
    config: ModelConfig, args: GenerationArgs, device: torch.device
) -> GenerationMemory:
    """Return the bytes of a batch that runs with random weights.

    Args:
        config: the model.
        args: size of the batch.
        device: where it runs.
    """
    return _followed(config, args, device, nullcontext())


def last_growth(prompt: int, new: int, window: int = 0) -> int | None:
    """Return the tokens in the cache when it last doubles; None: it never grows.

    Args:
        prompt: tokens of the prompt, for which it has room.
        new: new tokens, of which the last isn't fed.
        window: tokens that are kept (0: all).
    """
    most = window or prompt + new
    found, room = None, min(prompt, most)
    while room < min(prompt + new - 1, most):
        found, room = room, min(2 * (room + 1), most)
    return found


def _followed(
    config: ModelConfig,
    args: GenerationArgs,
    device: torch.device,
    values: AbstractContextManager[None],
) -> GenerationMemory:
    """Return the bytes of a batch that runs inside of `values`."""
    with torch.device("meta"):
        model = HybridLM(config).eval()
    with values, torch.no_grad(), LiveBytes() as live:
        model.to_empty(device=device)
        for p in model.parameters():
            p.normal_(std=config.init_std)
        weights = live.now
        live.restart()
        if not args.new_tokens:
            _loss(model, _ids(args.prompts, args.prompt_tokens, device))
            return GenerationMemory(weights, 0, live.peak - weights)
        logits_BV, state = model.prefill(_ids(args.prompts, args.prompt_tokens, device))
        cache = live.now - weights - logits_BV.nbytes
        full = live.peak, cache
        for grown in sorted(_growths(config, args)):
            if grown > args.prompt_tokens:
                state = mapped(state, partial(_full, tokens=grown))
            live.restart()
            logits_BV, state = model.step(_ids(args.prompts, 1, device)[:, 0], state)
            cache = live.now - weights - logits_BV.nbytes
            full = max(full, (live.peak, cache))
        peak, cache = full
        return GenerationMemory(weights, cache, peak - weights - cache)


def _growths(config: ModelConfig, args: GenerationArgs) -> set[int]:
    """Return the tokens in caches of either kind, with a window and without, as they last grow."""
    sizes = args.prompt_tokens, args.new_tokens
    found = {last_growth(*sizes, window) for window in (0, config.attention.window)}
    return {tokens for tokens in found if tokens is not None}


def _full(part: Tensor | TokenCache, tokens: int) -> Tensor | TokenCache:
    """Return a cache with room for so many tokens that are all there; a copy of other tensors.

    What a prompt leaves may be views of more.
    """
    if isinstance(part, Tensor):
        return part.clone()
    buffers = tuple(b.new_zeros(len(b), part.kept(tokens), *b.shape[2:]) for b in part.buffers)
    lengths_B = torch.full_like(part.lengths_B, tokens)
    return replace(part, buffers=buffers, lengths_B=lengths_B, longest=tokens)


def _loss(model: HybridLM, ids_BT: Tensor) -> None:
    docs = Documents.rows(*ids_BT.shape, device=ids_BT.device)
    model(ids_BT, ids_BT, docs)


def _ids(rows: int, tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, tokens, dtype=torch.int64, device=device)
