"""Bytes of generation, and of evaluation without gradients, on one device.

    found = generation_memory(config.model, GenerationArgs(prompts=8), gpu=True)
    found.point                    # weights, and the fullest moment beside them

The model runs without values, as `megacpp sample` and `megacpp eval` run it: prompts in one
forward, then one token at a time.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.cli.memory_generate import GenerationArgs, GenerationMemory
from megacpp.config.schema import ModelConfig
from megacpp.model.decoding import decode, prefill
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.token_cache import TokenCache, mapped, reserve
from parallel.simulate.fake import fake_tensors


def generation_memory(
    config: ModelConfig, args: GenerationArgs, gpu: bool = False, on: torch.device | None = None
) -> GenerationMemory:
    """Return the bytes of a batch, from a run without values or with random weights.

    Args:
        config: the model.
        args: size of the batch.
        gpu: allocate as on a GPU, without values.
        on: device that runs it with random weights; None: it has no values.
    """
    values = nullcontext() if on else fake_tensors(memory=True, gpu=gpu)
    device = on or torch.device("cpu")
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
        logits_BV, state = prefill(model, _ids(args.prompts, args.prompt_tokens, device))
        cache = live.now - weights - logits_BV.nbytes
        full = live.peak, cache
        if fed := args.new_tokens - 1:  # the last one isn't
            reserve(state, fed)
            full = max(full, (live.peak, live.now - weights - logits_BV.nbytes))
            for tokens in sorted({args.prompt_tokens, args.prompt_tokens + fed - 1}):
                if tokens > args.prompt_tokens:
                    state = mapped(state, partial(_full, tokens=tokens))
                live.restart()
                logits_BV, state = decode(model, _ids(args.prompts, 1, device)[:, 0], state)
                full = max(full, (live.peak, live.now - weights - logits_BV.nbytes))
        peak, cache = full
        return GenerationMemory(weights, cache, peak - weights - cache)


def _full(part: Tensor | TokenCache, tokens: int) -> Tensor | TokenCache:
    """Return a cache that has so many tokens; a copy of other tensors.

    What a prompt leaves may be views of more.
    """
    if isinstance(part, Tensor):
        return part.clone()
    return replace(part, lengths_B=torch.full_like(part.lengths_B, tokens), longest=tokens)


def _loss(model: HybridLM, ids_BT: Tensor) -> None:
    docs = Documents.rows(*ids_BT.shape, device=ids_BT.device)
    model(ids_BT, ids_BT, docs)


def _ids(rows: int, tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, tokens, dtype=torch.int64, device=device)
