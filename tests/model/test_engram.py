"""Engram against its formula token by token, its hashes, its start, its state, what it keeps.

Legend: B rows, T tokens of a row, D model, S residual streams, M memory width, H tables.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.engram.module import NORM_EPS, Engram, LayerHash, layer_hash
from megacpp.blocks.engram.sizes import engram_primes, table_rows
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.kernels.memory_gate import LEAST, memory_gate, memory_gate_reference
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import SMALL_ENGRAM, small

B, T = 2, 12
LENGTHS = [[3, 1, 8], [1, 11]]
ENGRAM = dataclasses.replace(SMALL_ENGRAM, max_order=4, conv_kernel=3)


def packed(ids_BT: Tensor) -> Documents:
    ids = [[i for i, n in enumerate(row) for _ in range(n)] for row in LENGTHS]
    return Documents.from_ids(torch.tensor(ids)).with_tokens(ids_BT, ids_BT)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


def engram_of(streams: int = 1, settings: EngramConfig = ENGRAM) -> Engram:
    """In fp64, with weights large enough that every path carries signal."""
    engram = Engram(small("AFA", engram=settings), 2, streams).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in engram.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return engram


# ---- the gate -----------------------------------------------------------------------------------


def gate_case(streams: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(streams)
    shapes = [(3, 4, streams, 6), (3, 4, 6), (3, 4, streams, 6), (streams, 6), (streams, 6)]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[0][0, 0] = 0.0  # a key of zeros: s is 0, and held at LEAST
    found[0][0, 1] = found[2][0, 1].roll(1, -1) * 1e-9  # a key as small as eps allows
    return [x.to(dtype).requires_grad_() for x in found]


@pytest.mark.parametrize("streams", [1, 3])
def test_gate_and_its_gradients_are_those_of_autograd(streams: int) -> None:
    results = []
    for form in (memory_gate, memory_gate_reference):
        inputs = gate_case(streams)
        out = form(*inputs)
        weighted = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        results.append((out, *torch.autograd.grad(weighted, inputs)))
    for fast, reference in zip(*results, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_the_gate() -> None:
    inputs = [x.detach()[1:].requires_grad_() for x in gate_case(2)[:3]]
    inputs += [x.detach().requires_grad_() for x in gate_case(2)[3:]]
    assert torch.autograd.gradcheck(memory_gate, inputs)


def test_a_gate_that_is_held_is_a_half_on_the_right_side() -> None:
    key, value, x, key_norm, x_norm = (t.detach() for t in gate_case(1))
    out = memory_gate(key, value, x, key_norm, x_norm)
    assert torch.equal(out[0, 0, 0], value[0, 0] * 0.5), "sgn(0) is 0"
    least = torch.sigmoid(torch.tensor(math.sqrt(LEAST), dtype=torch.float64))
    tiny = torch.full((1, 1, 1, 6), 1e-30, dtype=torch.float64)
    held = memory_gate(
        tiny, value[:1, :1], torch.ones_like(tiny), tiny[0, 0] * 0 + 1, key_norm * 0 + 1
    )
    torch.testing.assert_close(held[0, 0, 0], value[0, 0] * least, rtol=1e-12, atol=0)


def test_gate_keeps_its_inputs_and_three_numbers() -> None:
    norms = gate_case(2, torch.float32)[3:]  # of the fp32 contract
    inputs = [*gate_case(2, torch.bfloat16)[:3], *norms]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = memory_gate(*inputs)
    assert out.dtype == torch.bfloat16
    given = {t.data_ptr() for t in inputs}
    rest = [t for t in kept if t.data_ptr() not in given]
    assert [(t.shape, t.dtype) for t in rest] == [((3, 4, 2, 1), torch.float32)] * 3
    # One rounding to bf16 at the end (half a unit in the last of 8 bits), and those of fp32.
    exact = memory_gate_reference(*(t.float() for t in inputs))
    assert ((out - exact).abs() <= exact.abs() * (2.0**-8 + 1e-5)).all()


# ---- the module ---------------------------------------------------------------------------------


def by_hand(engram: Engram, x_BTSD: Tensor, ids_BT: Tensor) -> Tensor:
    """The formula, one token at a time, in Python's numbers where it counts."""
    e, D = engram.config.engram, engram.config.dim
    hashes = layer_hash(engram.config, engram.layer, 50)
    out = []
    for b, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            values: list[Tensor] = []
            for t in range(length):
                rows, offset = [], 0
                for n, primes in enumerate(hashes.primes, start=2):
                    mix = 0
                    for j in range(n):
                        number = int(ids_BT[b, start + t - j]) if j <= t else 0
                        mix ^= number * hashes.multipliers[j]  # fits: 63 bits
                    for prime in primes:
                        rows.append(offset + mix % prime)
                        offset += prime
                e_M = engram.tables.weight[rows].flatten()
                assert len(rows) == e.heads * (e.max_order - 1)
                k_SD = engram.wk(e_M).view(-1, D)
                x_SD = x_BTSD[b, start + t]
                k_SD = (
                    k_SD / k_SD.square().mean(-1, keepdim=True).sqrt() * engram.key_norm.weight_SD
                )
                x_SD = x_SD / x_SD.square().mean(-1, keepdim=True).sqrt() * engram.x_norm.weight_SD
                s_S1 = (k_SD * x_SD).sum(-1, keepdim=True) / math.sqrt(D)
                values.append(torch.sigmoid(s_S1.sign() * s_S1.abs().sqrt()) * engram.wv(e_M))
            normed = [
                v
                / (v.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
                * engram.value_norm.weight_SD
                for v in values
            ]
            for t in range(length):
                total = torch.zeros_like(values[0])
                for i in range(e.conv_kernel):
                    lag = i * e.max_order
                    if lag <= t:
                        total = total + normed[t - lag] * engram.conv.weight[:, 0, -1 - i].view(
                            -1, D
                        )
                out.append(values[t] + torch.nn.functional.silu(total))
            start += length
    return torch.stack(out).view_as(x_BTSD)


@pytest.mark.parametrize("streams", [1, 2])
def test_output_and_gradients_are_those_of_the_formula(streams: int) -> None:
    ids_BT, results = tokens(), []
    generator = torch.Generator().manual_seed(3)
    shape = (B, T, streams, 16)
    start, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "xw")
    for form in ("module", "hand"):
        engram, x = engram_of(streams), start.clone().requires_grad_()
        given = x if streams > 1 else x[:, :, 0]
        if form == "module":
            y = engram(given, packed(ids_BT))
            assert y.shape == given.shape
            y = y.view(shape)
        else:
            y = by_hand(engram, x, ids_BT)
        (y * weights).sum().backward()
        results.append((y, x.grad, *(p.grad for p in engram.parameters())))
    for found, expected in zip(*results, strict=True):
        scale = expected.abs().max()
        assert scale > 0 and (found - expected).abs().max() <= 1e-12 * scale


@pytest.mark.parametrize("streams", [1, 2])
def test_steps_equal_the_whole_row(streams: int) -> None:
    """1e-12: a product of one row instead of many may sum in another order."""
    engram, ids_BT = engram_of(streams), tokens()
    shape = (B, T, 16) if streams == 1 else (B, T, streams, 16)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = engram(x, Documents.rows(B, T).with_tokens(ids_BT, ids_BT))
    state, found = engram.init_state(B, x.device, x.dtype), []
    for t in range(T):
        y, state = engram.step(x[:, t], ids_BT[:, t], state)
        found.append(y)
    torch.testing.assert_close(torch.stack(found, 1), want, rtol=1e-12, atol=1e-12)


def test_ids_that_spell_the_same_word_are_one() -> None:
    engram, ids_BT = engram_of(), tokens()
    x = torch.randn(B, T, 16, dtype=torch.float64)
    engram.lookup_V = torch.arange(50) // 2
    one = engram(x, packed(ids_BT))
    assert torch.equal(one, engram(x, packed(ids_BT ^ 1)))
    state = engram.init_state(B, x.device, x.dtype)
    first, _ = engram.step(x[:, 0], ids_BT[:, 0], state)
    torch.testing.assert_close(first, one[:, 0], rtol=1e-12, atol=1e-12)
    engram.lookup_V = None
    assert not torch.equal(engram(x, packed(ids_BT)), engram(x, packed(ids_BT ^ 1)))


# ---- tables and hashes --------------------------------------------------------------------------


def test_no_two_tables_of_a_model_are_alike() -> None:
    config = small("AFAFA", engram=dataclasses.replace(ENGRAM, layers="0,2", table_size=30))
    primes = [p for layer in (0, 4) for order in engram_primes(config, layer) for p in order]
    assert len(set(primes)) == len(primes) == 2 * 3 * ENGRAM.heads and min(primes) >= 30
    assert primes == sorted(primes)
    hashes = [layer_hash(config, layer, 50) for layer in (0, 4)]
    assert not set(hashes[0].multipliers) & set(hashes[1].multipliers)
    for found in hashes:
        flat = [p for order in found.primes for p in order]
        assert found.offsets[0] == 0 and found.offsets[-1] + flat[-1] <= table_rows(config)
        pairs = zip(found.offsets[:-1], flat[:-1], strict=True)
        assert list(found.offsets[1:]) == [o + p for o, p in pairs]
    assert table_rows(config) % 256 == 0


def test_rows_are_hashed_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    rows = LayerHash.rows
    monkeypatch.setattr(LayerHash, "rows", lambda self, ids: calls.append(1) or rows(self, ids))
    model, ids_BT = model_of(small("AFA", engram=ENGRAM)), tokens()
    docs = packed(ids_BT)
    model(ids_BT, ids_BT, docs).loss_sum.backward()
    assert len(calls) == 2, "one for each of its two layers"
    model(ids_BT, ids_BT, docs).loss_sum.backward()
    assert len(calls) == 2
    model(ids_BT, ids_BT, packed(ids_BT))
    assert len(calls) == 4


# ---- the start ----------------------------------------------------------------------------------


def model_of(config: ModelConfig) -> HybridLM:
    world = World(0, 1, torch.device("cpu"))
    return build_model(Config(model=config, precision=PrecisionConfig("fp64")), world)


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def test_a_model_starts_as_the_one_without() -> None:
    ids_BT, docs = tokens(), packed(tokens())
    plain, remembers = model_of(small("AFA")), model_of(small("AFA", engram=ENGRAM))
    found, expected = (m(ids_BT, ids_BT, docs) for m in (remembers, plain))
    assert torch.equal(found.loss_sum, expected.loss_sum)
    for out in (found, expected):
        out.loss_sum.backward()
    others = dict(remembers.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(gradient(p), gradient(others[name])), name
    # The way in learns at once, what is in front of it when that is no longer zero.
    learns = {n: bool(gradient(p).any()) for n, p in others.items() if ".engram." in n}
    assert {n.split("engram.")[1] for n, has in learns.items() if has} == {"wv.weight", "wv.bias"}
    with torch.no_grad():
        for p in others.values():
            p.sub_(gradient(p) * 0.1)
            p.grad = None
    remembers(ids_BT, ids_BT, docs).loss_sum.backward()
    still = {n for n, p in others.items() if not gradient(p).any()}
    assert {n.split("engram.")[1] for n in still} == {"value_norm.weight"}, "behind it is the conv"


def test_every_parameter_has_a_rule_of_its_shape() -> None:
    engram = Engram(small("AFA", engram=ENGRAM), 0)
    initialise(engram, engram.init_rules(), seed=1)
    assert engram.tables.weight.std() > 0 and not engram.wv.weight.any()
