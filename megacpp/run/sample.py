"""Generation: prompts are read in one forward, then each new token is fed once.

Recurrent states and key-value caches carry what came before. Prompts of different lengths go on
together; a row that has ended leaves the batch.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp.errors import config_error
from megacpp.model.decoding import decode, read_prompts
from megacpp.model.hybrid import HybridLM
from megacpp.model.token_cache import chosen_rows, reserve


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of the next token, applied in this order.

    Attributes:
        repetition_penalty: logits of ids in the row so far are divided by it if above 0, else
            multiplied (1: off; arXiv 1909.05858).
        temperature: 0 takes the likeliest token; else softmax(logits / temperature).
        top_k: sample among the k likeliest only (0: among all).
        top_p: sample among the fewest likeliest that have this share together (1: all).
        min_p: sample among those with at least this share of the likeliest's probability.
        seed: seed of the draws of the first prompt; each further one has the next seed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value outside of its range.
        """
        for key in ("temperature", "top_k"):
            value = getattr(self, key)
            if not value >= 0:
                name = key.replace("_", "-")
                raise config_error(name, value, "must be 0 or more", f"write --{name} 0 or more")
        ranges = {
            "top-p": (self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min-p": (self.min_p, 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "repetition-penalty": (
                self.repetition_penalty,
                0.0 < self.repetition_penalty < float("inf"),
                "above 0",
            ),
        }
        for name, (number, good, rule) in ranges.items():
            if not good:
                raise config_error(name, number, f"must be {rule}", f"write a --{name} {rule}")


GREEDY = Sampling(temperature=0.0)


@torch.no_grad()
def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop_id: int | None = None,
    num_ids: int | None = None,
    stream: Callable[[int, int], None] | None = None,
    finished: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue prompts together.

    Args:
        model: whole on one device (an unsharded or an exported one).
        prompts: ids to continue, of any lengths.
        max_tokens: most new ids of a prompt.
        sampling: choice of the next token.
        stop_id: id that ends a text; it isn't part of it.
        num_ids: ids from here on are never sampled (rows of a table larger than the tokenizer).
        stream: called with a prompt's number and each of its ids as soon as it is sampled.
        finished: called with a prompt's number and its ids so far; True ends its text.

    Returns:
        For each prompt the new ids, at most `max_tokens`.

    Raises:
        ConfigError: no prompt, an empty one, an id out of vocabulary, or a setting out of range.
    """
    sampling.check()
    if not max_tokens >= 0:
        rule, fix = "must be 0 or more", "write --max-tokens 0 or more"
        raise config_error("max-tokens", max_tokens, rule, fix)
    _check_prompts(model, prompts)
    made: list[list[int]] = [[] for _ in prompts]
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    was_training = model.training
    model.eval()
    try:
        logits_BV, state = read_prompts(model, prompts) if max_tokens else (None, [])
        reserve(state, max_tokens - 1)  # the last one isn't fed
        rows = list(range(len(prompts))) if max_tokens else []
        while rows:
            assert logits_BV is not None
            going = []
            for place, row in enumerate(rows):
                so_far = (*prompts[row], *made[row])
                i = choose(logits_BV[place, :num_ids], sampling, generators[row], so_far)
                if i == stop_id:
                    continue
                made[row].append(i)
                if stream is not None:
                    stream(row, i)
                if len(made[row]) < max_tokens and not (finished and finished(row, made[row])):
                    going.append(place)
            if going and len(going) < len(rows):
                places_B = torch.tensor(going, device=logits_BV.device)
                state = chosen_rows(state, places_B)
            rows = [rows[place] for place in going]
            if rows:
                ids_B = torch.tensor([made[row][-1] for row in rows], device=logits_BV.device)
                logits_BV, state = decode(model, ids_B, state)
        return made
    finally:
        model.train(was_training)


def choose(
    logits_V: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    so_far: Sequence[int] = (),
) -> int:
    """Sample one token.

    Args:
        logits_V: logits of the next token.
        sampling: settings of the choice.
        generator: CPU generator.
        so_far: ids of the row, for the repetition penalty.
    """
    if sampling.repetition_penalty != 1.0 and so_far:
        logits_V = _penalised(logits_V, sampling.repetition_penalty, so_far)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scores_V = logits_V.detach().to("cpu", torch.float64)
    scores_V = (scores_V - scores_V.max()) / sampling.temperature  # at most 0: no overflow near 0
    few = 0 < sampling.top_k < len(scores_V)
    if not few and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return int(torch.multinomial(scores_V.softmax(0), 1, generator=generator))
    # Exactly k, even with ties, the likeliest first.
    kept = scores_V.topk(sampling.top_k if few else len(scores_V))
    share = kept.values.softmax(0)
    before = share.cumsum(0) - share
    stays = (before < sampling.top_p) & (share >= sampling.min_p * share[0])
    pick = torch.multinomial(share * stays, 1, generator=generator)
    return int(kept.indices[pick])


def _penalised(logits_V: Tensor, penalty: float, so_far: Sequence[int]) -> Tensor:
    seen = torch.tensor(sorted({i for i in so_far if i < len(logits_V)}), device=logits_V.device)
    values = logits_V[seen]
    values = torch.where(values > 0, values / penalty, values * penalty)
    return logits_V.index_copy(0, seen, values)


def _check_prompts(model: HybridLM, prompts: Sequence[Sequence[int]]) -> None:
    vocab = model.config.vocab_size
    if not prompts or not all(prompts):
        raise config_error("prompt", "", "has no token to start from", "write a longer prompt")
    bad = next((i for prompt in prompts for i in prompt if not 0 <= i < vocab), None)
    if bad is not None:
        rule = f"id {bad} is outside of the {vocab} ids of the model"
        raise config_error("prompt", bad, rule, "use the tokenizer of the run")
