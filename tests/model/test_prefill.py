"""Prompt read in one forward: the same logits and the same state as token by token."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.generate import work
from megacpp.config.presets import tiny
from megacpp.config.schema import ModelConfig
from megacpp.kernels.causal_conv_steps import last_inputs
from megacpp.model import token_cache
from megacpp.model.decoding import decode, init_state, prefill
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.model.token_cache import TokenCache, chosen_rows, joined
from megacpp.run import sample
from megacpp.run.sample import generate
from tests.model.small import small, variants
from tests.state.small import build

MODELS = {**variants(), "G": small("GAF"), "whole": small("AEMERGAF")}


def model_of(config: ModelConfig) -> HybridLM:
    model = build(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for p in model.parameters():  # away from zeros and ones, where much is the same
            p.add_(0.05 * torch.randn(p.shape, generator=GENERATOR.manual_seed(p.numel())))
    return model


GENERATOR = torch.Generator()


@torch.no_grad()
def by_steps(model: HybridLM, ids_BT: Tensor) -> tuple[Tensor, list[Any]]:
    state = init_state(model, len(ids_BT), ids_BT.device, torch.float64)
    logits_BV = torch.empty(0)
    for ids_B in ids_BT.unbind(1):
        logits_BV, state = decode(model, ids_B, state)
    return logits_BV, state


def tensors(state: Any) -> list[Tensor]:
    """Return what a state consists of, without the rooms of buffers."""
    if isinstance(state, TokenCache):
        return [*state.parts_BS, state.lengths_B]
    if isinstance(state, Tensor):
        return [state]
    if dataclasses.is_dataclass(state):
        state = [getattr(state, field.name) for field in dataclasses.fields(state)]
    return [] if state is None else [x for part in state for x in tensors(part)]


@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_at_once_is_its_tokens_one_by_one(name: str, tokens: int) -> None:
    model = model_of(MODELS[name])
    ids_BT = torch.randint(3, 50, (2, tokens), generator=GENERATOR.manual_seed(tokens))
    want_BV, want = by_steps(model, ids_BT)
    with torch.no_grad():
        got_BV, got = prefill(model, ids_BT)
        torch.testing.assert_close(got_BV, want_BV, rtol=1e-12, atol=1e-12)
        following = torch.tensor([7, 8])
        torch.testing.assert_close(
            decode(model, following, got)[0],
            decode(model, following, want)[0],
            rtol=1e-12,
            atol=1e-12,
        )
    found = [x for x in tensors(got) if x.dtype != torch.int32]  # choices of keys: of one token
    wanted = [x for x in tensors(want) if x.dtype != torch.int32]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_lengths_go_on_as_alone(name: str) -> None:
    model = model_of(MODELS[name])
    prompts = [torch.randint(3, 50, (1, n), generator=GENERATOR.manual_seed(n)) for n in (9, 2, 5)]
    more_BT = torch.randint(3, 50, (3, 6), generator=GENERATOR.manual_seed(3))
    with torch.no_grad():
        states = [prefill(model, ids_1T)[1] for ids_1T in prompts]
        state = chosen_rows(joined(states), torch.tensor([2, 0, 1]))
        for ids_B in more_BT.unbind(1):
            logits_BV, state = decode(model, ids_B[[2, 0, 1]], state)
        for place, row in enumerate((2, 0, 1)):
            alone_1V, _ = by_steps(model, torch.cat([prompts[row], more_BT[row : row + 1]], 1))
            torch.testing.assert_close(logits_BV[place], alone_1V[0], rtol=1e-12, atol=1e-12)


def test_a_cache_grows_by_doubling_and_is_written_in_place() -> None:
    cache = TokenCache.empty(torch.empty(2, 0, 3))
    rooms = []
    for t in range(40):
        cache = cache.append(torch.full((2, 1, 3), float(t)))
        rooms.append(cache.buffers[0].shape[1])
        assert cache.parts_BS[0][0, :, 0].tolist() == list(range(t + 1))
    assert len(set(rooms)) <= 6  # copies of the whole, not one a token
    assert cache.lengths_B.tolist() == [40, 40]


@pytest.mark.parametrize("name", MODELS)
def test_generation_makes_every_cache_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the prompt and all new tokens: one copy of each buffer, which stays where it is."""
    model, wider, made, places = model_of(MODELS[name]), token_cache._wider, [], []
    monkeypatch.setattr(token_cache, "_wider", lambda *args: made.append(args[1]) or wider(*args))

    def seen(model: HybridLM, ids_B: Tensor, state: Any) -> Any:
        logits_BV, state = decode(model, ids_B, state)
        places.append([(b.data_ptr(), b.shape[1]) for b in buffers(state)])
        return logits_BV, state

    monkeypatch.setattr(sample, "decode", seen)
    texts = generate(model, [[3, 4, 5], [6, 7, 8]], 40)
    assert [len(text) for text in texts] == [40, 40] and len(places) == 39
    assert all(place == places[0] for place in places)
    assert len(made) == len(places[0])
    assert set(made) <= {3 + 39, MODELS[name].attention.window}


def buffers(state: Any) -> list[Tensor]:
    """Return the buffers of all caches of a state."""
    found: list[Tensor] = []

    def noted(part: Any) -> Any:
        found.extend(() if isinstance(part, Tensor) else part.buffers)
        return part

    token_cache.mapped(state, noted)
    return found


@pytest.mark.parametrize("tokens", [3, 5, 23])
def test_a_window_bounds_the_cache(tokens: int) -> None:
    model = model_of(small("AF", attention=dataclasses.replace(small().attention, window=5)))
    ids_BT = torch.randint(3, 50, (2, tokens), generator=GENERATOR.manual_seed(tokens))
    with torch.no_grad():
        states = [
            prefill(model, ids_BT)[1],
            init_state(model, 2, torch.device("cpu"), torch.float64),
        ]
        for state in states:
            for ids_B in ids_BT.unbind(1):
                _, state = decode(model, ids_B, state)
            assert {buffer.shape[1] for buffer in state[0].buffers} == {min(5, 2 * tokens)}
            assert state[0].parts_BS[0].shape[1] == min(5, state[0].longest)


def test_last_inputs_have_zeros_in_front_of_a_short_prompt() -> None:
    x_BTC = torch.arange(6.0).view(1, 3, 2)
    assert last_inputs(x_BTC, 2).tolist() == [[[2.0, 4.0], [3.0, 5.0]]]
    assert last_inputs(x_BTC, 4)[0, 0].tolist() == [0.0, 0.0, 2.0, 4.0]
    assert last_inputs(x_BTC, 0).shape == (1, 2, 0)


def test_the_work_of_a_long_prompt_and_of_a_token_behind_it() -> None:
    """Counted in `tiny` at 1,000 tokens: no time, which depends on the machine."""
    config = tiny().model
    model = HybridLM(config).eval()
    initialise(model, model.init_rules(), 0)
    ids_1T = torch.randint(3, config.vocab_size, (1, 1000), generator=GENERATOR.manual_seed(0))
    with torch.no_grad():
        states = [prefill(model, ids_1T[:, :tokens])[1] for tokens in (10, 1000)]
    read = work(lambda: prefill(model, ids_1T))
    early, late = (work(lambda state=state: decode(model, ids_1T[:, 0], state)) for state in states)
    # Reading at once beside token by token, with less than the average step.
    assert 100 * read.launches <= 1000 * early.launches
    assert 20 * read.bytes <= 1000 * early.bytes
    # A new token with a cache beside all tokens again.
    assert 5 * late.launches <= read.launches and 20 * late.bytes <= read.bytes
    # The cache isn't copied: keys and values are read, repeated for the heads of a group and read.
    a = config.attention
    keys = 4 * 2 * a.num_kv_heads * a.head_dim * model.letters.count("A")
    assert early.launches == late.launches
    assert late.bytes - early.bytes <= 990 * keys * (1 + 2 * a.num_heads // a.num_kv_heads)
