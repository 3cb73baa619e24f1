"""Hashed n-grams: which rows are read, what they add, and that the start is the model without.

Legend: B rows, T tokens, D model, K tables.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from torch import Tensor

from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.ngram.module import NgramEmbedding
from megacpp.blocks.ngram.sizes import ngram_primes, ngram_rows
from megacpp.config.schema import Config, ModelConfig, OptimConfig, PrecisionConfig
from megacpp.model.decoding import decode, init_state
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.primes import is_prime
from optim.groups import assign
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import small
from tests.synthetic import ragged_batch

B, T = 2, 13
NGRAM = NgramConfig(heads=3, max_order=4, table_size=40, dim=5)
CPU = torch.device("cpu")


def build(
    ngram: NgramConfig = NGRAM, precision: Literal["fp64", "fp32"] = "fp64", pattern: str = "AF"
) -> HybridLM:
    model = small(pattern, init_std=0.3, ngram=ngram)
    return build_model(Config(model=model, precision=PrecisionConfig(precision)), World(0, 1, CPU))


def awake(model: HybridLM) -> HybridLM:
    """With a projection that isn't zero."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        model.ngram.proj.weight.normal_(generator=generator)
    return model


def packed(seed: int = 0) -> tuple[Tensor, Documents]:
    batch = ragged_batch([seed, seed + 1], T)
    return batch.ids_BT, batch.docs.with_tokens(batch.ids_BT, batch.labels_BT)


def by_hand(model: ModelConfig, ngram: NgramEmbedding, history: list[int]) -> list[int]:
    """Rows of the token at the end of `history`, its document so far, in whole numbers."""
    found, first = [], 0
    primes = iter(ngram_primes(model.ngram))
    for order in range(2, model.ngram.max_order + 1):
        mix = 0
        for back, multiplier in zip(range(order), ngram.multipliers, strict=False):
            token = history[-1 - back] if back < len(history) else 0
            product = (token * multiplier + 2**63) % 2**64 - 2**63
            mix = mix ^ product
        for _ in range(model.ngram.heads):
            prime = next(primes)
            found.append(first + mix % prime)
            first += prime
    return found


def test_tables_have_prime_sizes_of_their_own() -> None:
    primes = ngram_primes(NGRAM)
    assert len(primes) == 9 == len(set(primes)) and all(map(is_prime, primes))
    assert min(primes) == 41 and ngram_rows(NGRAM) == 768 >= sum(primes) > 512
    published = NgramConfig(heads=8)
    assert len(ngram_primes(published)) == 16 and ngram_rows(published) % 256 == 0
    assert ngram_rows(published) * 16 == pytest.approx(0.129e9, rel=0.01)


def test_rows_by_hand() -> None:
    model, (ids_BT, docs) = build(), packed()
    rows_BTK = model.ngram.rows_of(docs)
    assert rows_BTK.shape == (B, T, 9) and len(model.ngram.tables.weight) == 768
    for b in range(B):
        for t in range(T):
            start = t - int(docs.positions_BT[b, t])
            history = ids_BT[b, start : t + 1].tolist()
            assert rows_BTK[b, t].tolist() == by_hand(model.config, model.ngram, history)


def test_some_tokens_of_every_row() -> None:
    model, (_, docs) = build(), packed()
    index_T = torch.tensor([9, 10, 11, 0, 1])
    assert torch.equal(
        model.ngram.rows_of(docs.take(index_T)), model.ngram.rows_of(docs)[:, index_T]
    )


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_start_is_the_model_without(precision: Literal["fp64", "fp32", "bf16"]) -> None:
    store = "fp64" if precision == "fp64" else "fp32"
    with_it, without = build(precision=store), build(NgramConfig(), store)
    ids_BT, docs = packed()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(with_it.hidden(ids_BT, docs), without.hidden(ids_BT, docs))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert not torch.equal(awake(with_it).hidden(ids_BT, docs), without.hidden(ids_BT, docs))


def test_gradients_are_those_of_one_hot_products() -> None:
    model, (_, docs) = awake(build()), packed()
    weight = torch.randn(B, T, 16, dtype=torch.float64)
    tables, proj = model.ngram.tables.weight, model.ngram.proj.weight
    zero = torch.zeros((), dtype=torch.float64)
    found = torch.autograd.grad((model.ngram(zero, docs) * weight).sum(), (tables, proj))
    hot_BTKR = torch.nn.functional.one_hot(model.ngram.rows_of(docs), len(tables)).double()
    plain_BTD = (hot_BTKR @ tables).flatten(2) @ proj.T
    wanted = torch.autograd.grad((plain_BTD * weight).sum(), (tables, proj))
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() <= 1e-12 * want.abs().max()
    used = model.ngram.rows_of(docs).unique()
    assert found[0].abs().amax(1).count_nonzero() == len(used) < len(tables)


def test_a_token_changes_nothing_in_other_documents_or_before_it() -> None:
    model, zero = awake(build()), torch.zeros((), dtype=torch.float64)
    ids_BT = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(0))
    docs = Documents.from_ids((torch.arange(T)[None] >= 6).long())
    for changed, same in ((slice(0, 6), slice(6, T)), (slice(8, 9), slice(0, 8))):
        other_BT = ids_BT.clone()
        other_BT[:, changed] = (other_BT[:, changed] + 1) % 50
        outs = [model.ngram(zero, docs.with_tokens(x, x)) for x in (ids_BT, other_BT)]
        assert torch.equal(outs[0][:, same], outs[1][:, same])
        assert not torch.equal(outs[0][:, changed], outs[1][:, changed])
    reach = NGRAM.max_order  # of the last change: the tokens whose n-grams hold it
    differs_T = (outs[0] != outs[1]).any(2)[0]
    assert differs_T.nonzero().flatten().tolist() == list(range(8, 8 + reach))


@pytest.mark.parametrize("pattern", ["AF", "MR"])
def test_step_is_forward(pattern: str) -> None:
    model = awake(build(pattern=pattern)).eval()
    ids_BT, _ = packed()
    logits_BTV = model.head.logits(model.hidden(ids_BT))
    state = init_state(model, B, CPU, torch.float64)
    for t in range(T):
        logits_BV, state = decode(model, ids_BT[:, t], state)
        torch.testing.assert_close(logits_BV, logits_BTV[:, t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("embed_lr", [0.0, 1e-2])
def test_tables_take_larger_steps_and_never_decay(embed_lr: float) -> None:
    optim = OptimConfig(lr=1e-3, embed_lr=embed_lr)
    model = build(dataclasses.replace(NGRAM, lr_factor=7.0))
    found = {a.name: a for a in assign(model, "muon_adamw")}
    tables, proj = found["ngram.tables.weight"], found["ngram.proj.weight"]
    assert tables.algorithm == "adamw" and tables.decay(optim) == 0
    assert tables.lr(optim) == pytest.approx(7 * (embed_lr or 1e-3))
    assert proj.algorithm == "muon" and proj.lr(optim) == optim.muon_lr
    assert found["embed.weight"].lr(optim) == (embed_lr or 1e-3)
