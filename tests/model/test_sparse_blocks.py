"""Sparse A blocks in a model: whose choice, whose gradient, documents, decoding, warm-up.

One process, fp64. The kernels are held in test_lightning_indexer.py and test_sparse_attention.py,
upstream's numbers in tests/golden.

Legend: B rows, T tokens, S key tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacpp.blocks.attention import sparse
from megacpp.blocks.attention.indexer import Indexer, rotate_halves
from megacpp.blocks.attention.rope import rotary_table, rotate
from megacpp.blocks.attention.sparse import SparseAttention
from megacpp.config.presets import PRESETS
from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.sparse_attention.indexer import index_scores
from megacpp.kernels.sparse_attention.reference import chosen_mask
from megacpp.model.decoding import decode, init_state
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import layer_kinds
from optim.qk_clip import QKClip
from tests.model.sparse_cases import MODELS, TOKENS, build, sparse_model, train
from tests.synthetic import ragged_batch

SAME_FORMULA = 1e-12
every_model = pytest.mark.parametrize("name", MODELS)


def indexers(model: HybridLM) -> list[Indexer]:
    return [m for m in model.modules() if isinstance(m, Indexer)]


def sparse_mixers(model: HybridLM) -> list[SparseAttention]:
    return [m for m in model.modules() if isinstance(m, SparseAttention)]


# --- which layers --------------------------------------------------------------------------------


def test_the_published_map_of_nam56r() -> None:
    """DSA on nine of 13 A blocks, and of every three of these the first chooses: F S S."""
    model = PRESETS["nam56r"]().model
    assert model.attention.kind == "mla"
    kinds = layer_kinds(model)
    short = {"A": "-", "A.index": "F", "A.share": "S"}
    assert "".join(short[kind] for kind in kinds if kind[0] == "A") == "-FSS-FSS-FSS-"


def test_a_layer_that_shares_has_no_indexer() -> None:
    model = build(sparse_model("sparse_stages", share=2))
    assert model.kinds == ["A.index", "A.share", "E", "A.index", "A.share", "A.index"]
    found = {n.split(".")[1] for n, _ in model.named_parameters() if "indexer" in n}
    assert found == {"0", "3", "5"}
    assert [mixer.inner.source for mixer in sparse_mixers(model)] == [0, 0, 3, 3, 5]


def test_a_choice_is_taken_over() -> None:
    model, seen = build(sparse_model("sparse_stages", share=2)), []

    def spy(*args: object) -> Tensor:
        seen.append(args[3])
        return original(*args)  # type: ignore[arg-type]

    original = sparse.sparse_attention
    with mock.patch.object(sparse, "sparse_attention", spy):
        train(model)
    own, taken, other, as_well, last = seen
    assert taken is own and as_well is other
    assert not any(torch.equal(a, b) for a, b in ((own, other), (other, last), (own, last)))


# --- numbers -------------------------------------------------------------------------------------


def test_halves_turn_as_pairs_do() -> None:
    """The same rotation of the same numbers in another order."""
    config, docs = sparse_model("sparse_mla").attention, Documents.rows(1, 9)
    x = torch.randn(1, 9, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = rotary_table(docs, 8, config, x.dtype)
    in_pairs = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    want = rotate(in_pairs, table).unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    assert (rotate_halves(x, table) - want).abs().max() <= 1e-15


@every_model
def test_all_keys_chosen_is_attention_to_all(name: str) -> None:
    """Then the layers differ from those of the warm-up in nothing but the choice."""
    all_keys, warm_up = (
        train(build(sparse_model(name, **settings)))
        for settings in ({"top_k": TOKENS}, {"stage": "dense"})
    )
    assert abs(all_keys["loss"] / warm_up["loss"] - 1) <= SAME_FORMULA
    for key, gradient in warm_up.items():
        error = (all_keys[key] - gradient).abs().max()
        assert error <= SAME_FORMULA * gradient.abs().max(), key
    assert not torch.equal(train(build(sparse_model(name)))["loss"], warm_up["loss"])


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("name", ["sparse_mla", "sparse_mla_direct", "sparse_gqa"])
def test_the_loss_and_its_gradients_are_the_naive_formula(name: str, stage: str) -> None:
    """Of the whole model, the losses of all indexers written out with whole matrices."""
    config = sparse_model(name, stage=stage)
    found = train(build(config))
    naive = build(config)
    losses: list[Tensor] = []

    def written_out(self, o, index, target):  # type: ignore[no-untyped-def]
        visible = document_mask(target.queries, target.keys)[:, 0]
        if target.chosen_BTC is not None:
            visible = visible & chosen_mask(target.chosen_BTC, visible.shape[-1])
        group = target.q_BTNH.shape[2] // target.k_BSKH.shape[2]
        k_BSNH = target.k_BSKH.repeat_interleave(group, 2)
        logits = target.scale * torch.einsum("btnh,bsnh->bnts", target.q_BTNH, k_BSNH)
        p = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)
        q = index_scores(*index).masked_fill(~visible, -torch.inf).log_softmax(-1)
        kl = torch.where(visible, torch.xlogy(p, p) - p * q.masked_fill(~visible, 0.0), 0.0)
        losses.append(self.sparse.loss * kl.sum() * self.aux_scale)
        return o

    with mock.patch.object(Indexer, "attach", written_out):
        naive_found = train(naive)
    before = {n: p.grad.clone() for n, p in naive.named_parameters() if p.grad is not None}
    assert not any("indexer" in n for n in before), "no gradient of the model's loss reaches one"
    torch.stack(losses).sum().backward()
    assert torch.equal(naive_found["loss"], found["loss"])
    for key, p in naive.named_parameters():
        if "indexer" in key:
            assert p.grad is not None and p.grad.abs().max() > 0
            error = (found[key] - p.grad).abs().max()
            assert error <= SAME_FORMULA * p.grad.abs().max(), (key, error)
        elif key in before:
            assert p.grad is not None and torch.equal(p.grad, before[key]), key


@every_model
def test_neither_loss_reaches_what_the_other_trains(name: str) -> None:
    """A loss of twice the weight: twice the gradients of indexers, the same bits elsewhere."""
    once, twice = (train(build(sparse_model(name, loss=c))) for c in (0.25, 0.5))
    for key, gradient in once.items():
        if key.endswith("loss_sums"):
            continue
        factor = 2.0 if "indexer" in key else 1.0
        assert torch.equal(twice[key], factor * gradient), key


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@every_model
def test_documents_do_not_see_each_other(name: str, stage: str) -> None:
    model = build(sparse_model(name, stage=stage)).eval()
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS) % model.config.vocab_size
    documents_T = torch.arange(TOKENS) // 9
    docs = Documents.from_ids(documents_T.expand(2, -1))
    other_BT = torch.where(documents_T == 0, (ids_BT + 7) % model.config.vocab_size, ids_BT)
    with torch.no_grad():
        a, b = (model.hidden(ids, Documents.from_ids(docs.ids_BT)) for ids in (ids_BT, other_BT))
    assert (a[:, 9:] - b[:, 9:]).abs().max() == 0
    assert (a[:, :9] - b[:, :9]).abs().min() > 0


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@every_model
def test_step_is_forward(name: str, stage: str) -> None:
    model = build(sparse_model(name, stage=stage)).eval()
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS) * 11 % model.config.vocab_size
    with torch.no_grad():
        want_BTV = model.head.logits(model.hidden(ids_BT))
        state = init_state(model, 2, ids_BT.device, torch.float64)
        for t in range(TOKENS):
            logits_BV, state = decode(model, ids_BT[:, t], state)
            assert (logits_BV - want_BTV[:, t]).abs().max() <= SAME_FORMULA, t


@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
@every_model
def test_narrow_types(name: str, how: str) -> None:
    """The norm of keys and the weights of heads stay wide, gradients are of their weight's type."""
    model = build(sparse_model(name), dtype="fp32")
    if how == "bf16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = train(model)
    parameters = dict(model.named_parameters())
    narrow = {n.rpartition("indexer.")[2] for n, p in parameters.items() if p.itemsize == 2}
    assert ("wk.weight" in narrow, "wq_b.weight" in narrow) == (how == "bf16",) * 2
    assert not narrow & {"k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    assert all(
        found[n].isfinite().all() and found[n].dtype == p.dtype for n, p in model.named_parameters()
    )
    error = abs(found["loss"].double() / train(build(sparse_model(name)))["loss"] - 1)
    assert error < (1e-6 if how == "fp32" else 0.02), error


# --- warm-up -------------------------------------------------------------------------------------


def test_in_the_warm_up_indexers_alone_are_trained() -> None:
    model = build(sparse_model("sparse_mla", stage="dense"))
    found = train(model)
    with_gradient = {n for n in found if "loss" not in n}
    assert with_gradient == {n for n, _ in model.named_parameters() if "indexer" in n}
    router = model.get_submodule("blocks.2.mixer.router")
    before = router.expert_bias.clone()
    router.tokens_per_expert.copy_(torch.tensor([9, 0, 3, 4]))
    router.update_bias()
    assert torch.equal(router.expert_bias, before), "a frozen router chooses as it did"


def test_the_warm_up_goes_through_every_kind_of_block() -> None:
    """Behind an indexer the loss's own backward passes everything, and trains nothing of it."""
    model = sparse_model("sparse_gqa_warmup")
    found = train(build(replace(model, pattern="AMERFA", depth=6)))
    assert {n.split(".")[1] for n in found if n.startswith("blocks")} == {"0", "2"}  # router's sums
    assert all(t.isfinite().all() for t in found.values())


# --- neighbours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if "mla" in name])
def test_qk_clip_bounds_the_logits_of_all_keys(name: str) -> None:
    """What was recorded is at least what any query meets, chosen or not."""
    model = build(sparse_model(name))
    tau = 1e-3
    clip, seen = QKClip(model, tau, lambda values: values), {}

    def spy(self, o, index, target):  # type: ignore[no-untyped-def]
        group = target.q_BTNH.shape[2] // target.k_BSKH.shape[2]
        k_BSNH = target.k_BSKH.repeat_interleave(group, 2)
        logits = target.scale * torch.einsum("btnh,bsnh->bnts", target.q_BTNH, k_BSNH)
        visible = document_mask(target.queries, target.keys)
        seen[id(self)] = logits.masked_fill(~visible, -torch.inf).max()
        return o

    with mock.patch.object(Indexer, "attach", spy):
        train(model)
    report = clip.clip()
    assert report.numbers[0] >= torch.stack(list(seen.values())).max() > tau
    assert report.numbers[1] > 0


def test_evaluation_chooses_and_records_nothing() -> None:
    model = build(sparse_model("sparse_mla")).eval()
    batch = ragged_batch([1, 2], TOKENS, model.config.vocab_size)
    with torch.no_grad():
        model(batch.ids_BT, batch.labels_BT, batch.docs)
    assert all(not i.loss_sums.any() for i in indexers(model))
