"""Generation, token by token, from recurrent state and key-value caches.

Legend: B rows (1 here), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp.errors import config_error
from megacpp.model.hybrid import HybridLM


@torch.no_grad()
def generate(
    model: HybridLM,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_id: int | None = None,
    num_ids: int | None = None,
    stream: Callable[[int], None] | None = None,
) -> list[int]:
    """Continue a prompt; each token is fed once and nothing is recomputed.

    Args:
        model: whole on one device (an unsharded or an exported one).
        prompt_ids: ids to continue.
        max_tokens: most new ids.
        temperature: 0 takes the likeliest token; else softmax(logits / temperature).
        top_k: sample among the k likeliest only (0: among all).
        seed: seed of the draws; the same seed gives the same text on the same device.
        stop_id: id that ends the text; it isn't part of it.
        num_ids: ids from here on are never sampled (rows of a table larger than the tokenizer).
        stream: called with every id as soon as it is sampled.

    Returns:
        The new ids, at most `max_tokens`.

    Raises:
        ConfigError: empty prompt, an id out of vocabulary, or a negative setting.
    """
    _check(model, prompt_ids, max_tokens, temperature, top_k)
    weight_VD = model.embed.weight
    state = model.init_state(1, weight_VD.device, weight_VD.dtype)
    was_training = model.training
    model.eval()
    try:
        logits_BV = None
        for i in prompt_ids:
            logits_BV, state = _feed(model, i, state)
        assert logits_BV is not None
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        while len(ids) < max_tokens:
            i = choose(logits_BV[0, :num_ids], temperature, top_k, generator)
            if i == stop_id:
                break
            ids.append(i)
            if stream is not None:
                stream(i)
            if len(ids) < max_tokens:
                logits_BV, state = _feed(model, i, state)
        return ids
    finally:
        model.train(was_training)


def choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Sample one token.

    Args:
        logits_V: logits of the next token.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest only (0: among all).
        generator: CPU generator.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    scores_V = logits_V.detach().to("cpu", torch.float64)
    scores_V = (scores_V - scores_V.max()) / temperature  # at most 0: no overflow near 0
    if 0 < top_k < len(scores_V):
        kept = scores_V.topk(top_k)  # exactly k, even with ties
        pick = torch.multinomial(kept.values.softmax(0), 1, generator=generator)
        return int(kept.indices[pick])
    return int(torch.multinomial(scores_V.softmax(0), 1, generator=generator))


def _feed(model: HybridLM, i: int, state: list[Any]) -> tuple[Tensor, list[Any]]:
    return model.step(torch.tensor([i], device=model.embed.weight.device), state)


def _check(
    model: HybridLM, prompt_ids: Sequence[int], max_tokens: int, temperature: float, top_k: int
) -> None:
    if not prompt_ids:
        raise config_error("prompt", "", "has no token to start from", "write a longer prompt")
    vocab = model.config.vocab_size
    bad = next((i for i in prompt_ids if not 0 <= i < vocab), None)
    if bad is not None:
        rule = f"id {bad} is outside of the {vocab} ids of the model"
        raise config_error("prompt", bad, rule, "use the tokenizer of the run")
    for key, value in (("max-tokens", max_tokens), ("temperature", temperature), ("top-k", top_k)):
        if not value >= 0:
            raise config_error(key, value, "must be 0 or more", f"write --{key} 0 or more")
