"""Multi-token prediction against explicit loops, and that no answer is fed.

fp64; 1e-12 where two orders of the same sums meet, equal bits where nothing else is done.

Legend: B rows, T tokens, D model, K depths, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megacpp.model.head
from checkpointing.apply import set_recompute
from checkpointing.recompute import Replays
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.mtp.plan import coefficient, depth_weights, hidden_width
from megacpp.config.arguments import parse_run
from megacpp.config.schema import KEEP, Config, ModelConfig
from megacpp.data.batches import IGNORED, Batch
from megacpp.errors import ConfigError
from megacpp.model.count import count_parameters, meta_model
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.model.regions import NOTHING
from megacpp.model.sizes import embedding_parameters, head_parameters, layer_parameters
from optim.groups import assign
from optim.qk_clip import QKClip
from parallel.boundary import AccumulationBoundary
from parallel.mesh import World
from tests.model.small import small
from tests.synthetic import ragged_batch

MTP = MTPConfig(depths=3, hidden_dim=24)
VARIANTS = {
    "shared": MTP,
    "own": replace(MTP, shared=False, beta=1.0),
    "post_norm": replace(MTP, hidden="post_norm", order="hidden_embedding"),
    "one": replace(MTP, depths=1, loss=1.0),
}
STEPS = 10


def model_of(mtp: MTPConfig = MTP, pattern: str = "AF", **changes: object) -> ModelConfig:
    return replace(small(pattern), mtp=mtp, init_std=0.1, **changes)  # type: ignore[arg-type]


def build(config: ModelConfig) -> HybridLM:
    model = HybridLM(config).double()
    initialise(model, model.init_rules(), seed=3)
    return model.train()


def boundary(model: HybridLM) -> AccumulationBoundary:
    config = Config(model=model.config)
    config = replace(config, run=replace(config.run, steps=STEPS))
    return AccumulationBoundary(model, World(0, 1, torch.device("cpu")), config)


def batch(rows: range = range(3), tokens: int = 12) -> Batch:
    return ragged_batch(rows, tokens)


def naive(model: HybridLM, of: Batch) -> Tensor:
    """The whole objective, token by token: mean loss of the next, and of those after it."""
    mtp, docs = model.config.mtp, of.docs
    x_BTD = model.embed(of.ids_BT)
    for block in model.blocks.values():
        x_BTD = block(x_BTD, docs)
    y_BTD = model.norm(x_BTD)
    out = model.head(y_BTD, of.labels_BT)
    total = out.loss_sum / out.valid_tokens
    post = mtp.hidden == "post_norm"
    hidden_BTD = y_BTD if post else x_BTD
    B, T = of.ids_BT.shape
    for k in range(1, mtp.depths + 1):
        ids_BT, answers = torch.zeros_like(of.ids_BT), []
        for b in range(B):
            for t in range(T - k):
                if docs.ids_BT[b, t] == docs.ids_BT[b, t + k]:
                    ids_BT[b, t] = of.ids_BT[b, t + k]
                    if (label := int(of.labels_BT[b, t + k])) != IGNORED:
                        answers.append((b, t, label))
        block = model.mtp.blocks[0 if mtp.shared else k - 1]
        halves = [block.embed_norm(model.embed(ids_BT)), block.hidden_norm(hidden_BTD)]
        halves = halves if mtp.order == "embedding_hidden" else halves[::-1]
        x_BTD = block.projection(torch.cat(halves, -1))
        x_BTD = x_BTD + block.attention.mixer(block.attention.norm(x_BTD), docs)
        x_BTD = x_BTD + block.feed_forward.mixer(block.feed_forward.norm(x_BTD), docs)
        y_BTD = block.norm(x_BTD)
        hidden_BTD = y_BTD if post else x_BTD
        logits_BTV = model.head.logits(y_BTD)
        losses = []
        for b, t, label in answers:
            log_z = logits_BTV[b, t].logsumexp(0)
            losses.append(log_z - logits_BTV[b, t, label] + model.head.z_loss * log_z**2)
        share = mtp.beta**k / sum(mtp.beta**j for j in range(1, mtp.depths + 1))
        total = total + mtp.loss * share * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_loss_and_gradients_are_those_of_explicit_loops(name: str, tied: bool) -> None:
    options = {"tie_embeddings": tied, "logit_softcap": 5.0, "z_loss": 1e-2}
    model, of = build(model_of(VARIANTS[name], **options)), batch()
    edge = boundary(model)
    sums = edge.accumulate([of])
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    total = naive(model, of)
    total.backward()
    tokens = of.ids_BT.numel()
    main = sums.loss_sum / sums.valid_tokens
    recorded = model.mtp.loss_sums.sum() / tokens
    assert abs((main + recorded) / total - 1) <= 1e-12
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.norm() > 0, key
        error = (found[key] - p.grad).abs().max() / p.grad.abs().max()
        assert error <= 1e-12, (key, error)


def test_no_answer_is_fed() -> None:
    """Where a token's number is its place: place t is fed t + k and asked for t + k + 1."""
    mtp = build(model_of()).mtp
    docs = Documents.from_ids(torch.tensor([[0] * 5 + [1] * 7]))
    places_BT = torch.arange(12)[None]
    labels_BT = torch.where(docs.ends_BT, IGNORED, places_BT + 1)
    docs = docs.with_tokens(places_BT, labels_BT)
    ids_KT = mtp.ids(docs).view(3, 12)
    ahead = mtp.ahead(torch.zeros(3, 12, 16), docs)
    for k in range(1, 4):
        for t in range(12):
            end = 5 if t < 5 else 12
            assert ids_KT[k - 1, t] == (t + k if t + k < end else 0)
            label = t + k + 1 if t + k + 1 < end else IGNORED
            assert ahead.labels_NT[k - 1, t] == label


@pytest.mark.parametrize("name", ["shared", "post_norm"])
def test_what_a_depth_says_depends_on_no_token_that_it_is_asked_for(name: str) -> None:
    """A token changed: equal bits wherever it is still to be predicted, others where it was fed."""
    model, T = build(model_of(VARIANTS[name], "AM")), 9
    ids_BT = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(1))

    def hidden(ids_BT: Tensor) -> Tensor:
        docs = Documents.rows(1, T).with_tokens(ids_BT, ids_BT)
        x_BTD = model.embed(ids_BT)
        for block in model.blocks.values():
            x_BTD = block(x_BTD, docs)
        return model.mtp(model.embed, x_BTD, model.norm(x_BTD), docs)

    with torch.no_grad():
        before_KTD = hidden(ids_BT)
        for changed in range(1, T):
            other_BT = ids_BT.clone()
            other_BT[0, changed] = (other_BT[0, changed] + 7) % 50
            same_KT = (hidden(other_BT) == before_KTD).all(-1)
            for k in range(1, 4):
                for t in range(T - k):  # beyond, nothing is asked
                    assert same_KT[k - 1, t] == (t + k < changed), (k, t, changed)


def test_a_token_changes_nothing_in_other_documents() -> None:
    """Not what their tokens predict, nor the gradients of what they were made from: exactly 0."""
    model, T = build(model_of(pattern="AR")), 14
    docs = Documents.from_ids(torch.tensor([[0] * 4 + [1] + [2] * 6 + [3] * 3]))
    ids_BT = torch.randint(1, 50, (1, T), generator=torch.Generator().manual_seed(2))
    model.mtp.aux_scale.fill_(1.0)
    model.mtp.weigh(T, torch.full((3,), 5), 0, STEPS)

    def run(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        labels_BT = torch.where(docs.ends_BT, IGNORED, ids_BT.roll(-1, 1))
        embedded = []
        hook = model.embed.register_forward_hook(lambda m, a, out: embedded.append(out))
        states = []
        other = model.mtp.register_forward_hook(lambda m, a, out: states.append(out))
        out = model(ids_BT, labels_BT, docs)
        hook.remove(), other.remove()
        grads = torch.autograd.grad(out.loss_sum, embedded)
        return states[0], torch.cat(grads)

    states_KTD, grads_NTD = run(ids_BT)
    for document in range(4):
        inside_T = docs.ids_BT[0] == document
        other_BT = torch.where(inside_T, (ids_BT + 7) % 50, ids_BT)
        states2_KTD, grads2_NTD = run(other_BT)
        assert torch.equal(states2_KTD[:, ~inside_T], states_KTD[:, ~inside_T])
        assert torch.equal(grads2_NTD[:, ~inside_T], grads_NTD[:, ~inside_T])
        assert not torch.equal(states2_KTD[:, inside_T], states_KTD[:, inside_T])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_next_token_s_loss_is_that_of_the_model_without(name: str) -> None:
    """Equal bits in training, and in evaluation, where nothing of it runs."""
    model, of = build(model_of(VARIANTS[name])), batch()
    plain = build(model_of(MTPConfig()))
    edges = [boundary(m) for m in (model, plain)]
    ours, theirs = (edge.accumulate([of]) for edge in edges)
    assert ours.loss_sum.item() == theirs.loss_sum.item()
    model.mtp.forward = None  # type: ignore[method-assign]
    ours, theirs = (edge.evaluate([of]) for edge in edges)
    assert ours.loss_sum.item() == theirs.loss_sum.item()
    ids_BT = of.ids_BT[:1, :5]
    assert torch.equal(model.hidden(ids_BT), plain.hidden(ids_BT))


def test_microbatches_of_any_size_are_one_step() -> None:
    """Means over the valid labels of the step: rows with many and rows with few count by label."""
    grads, losses = [], []
    for parts in ([range(6)], [range(1), range(1, 4), range(4, 6)]):
        model = build(model_of())
        edge = boundary(model)
        sums = edge.accumulate([batch(rows) for rows in parts])
        grads.append([p.grad for p in model.parameters()])
        losses.append((sums.loss_sum.item(), model.mtp.loss_sums.sum().item()))
    for a, b in zip(*losses, strict=True):
        assert abs(a / b - 1) <= 1e-12
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_a_step_without_labels_further_ahead_gives_zeros_not_nan() -> None:
    model = build(model_of())
    of = batch(range(1), tokens=3)
    model.zero_grad()
    boundary(model).accumulate([dataclasses.replace(of, docs=Documents.from_ids(
        torch.arange(3)[None]))])  # fmt: skip
    for name, p in model.mtp.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


def test_weights_of_depths_and_the_schedule() -> None:
    weights = depth_weights(replace(MTP, beta=0.5))
    assert weights == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert depth_weights(replace(MTP, beta=1.0)) == pytest.approx([1 / 3] * 3)
    later = replace(MTP, loss=0.3, loss_final=0.1, switch=0.6)
    assert [coefficient(later, step, 10) for step in range(10)] == [0.3] * 6 + [0.1] * 4
    assert coefficient(replace(later, switch=1.0), 9, 10) == 0.3
    model, of = build(model_of(later)), batch()
    edge, seen = boundary(model), []
    for step in (5, 6):
        edge.accumulate([of], step)
        seen.append(model.mtp.loss_sums.sum().item())
        model.mtp.forget()
    assert seen[1] == pytest.approx(seen[0] / 3, rel=1e-12)


def test_detached_parts_learn_nothing_from_it() -> None:
    of = batch()

    def grads(**changes: object) -> dict[str, Tensor]:
        model = build(model_of(replace(MTP, **changes)))  # type: ignore[arg-type]
        boundary(model).accumulate([of])
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, both = grads(depths=0), grads(detach_trunk=True, detach_head=True)
    trunk, head = grads(detach_trunk=True), grads(detach_head=True)
    for name, grad in plain.items():
        assert torch.equal(both[name], grad), name
        assert torch.equal(trunk[name], grad) == (name != "head.weight"), name
        beside = name in ("head.weight", "norm.weight")  # states are taken in front of the norm
        assert torch.equal(head[name], grad) == beside, name
    for name in both.keys() - plain.keys():
        assert both[name].norm() > 0, name


# ---- cost ---------------------------------------------------------------------------------------


def test_all_depths_take_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, the second for all depths; no tensor is as large as logits of a microbatch."""
    calls, fused = [], megacpp.model.head.linear_cross_entropy

    def counted(x_ND: Tensor, *args: object, **kwargs: object) -> object:
        calls.append(len(x_ND))
        return fused(x_ND, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(megacpp.model.head, "linear_cross_entropy", counted)
    T, V = 2048, 4096
    model = build(model_of(vocab_size=V, pattern="F")).float()
    generator = torch.Generator().manual_seed(0)
    documents_T = (torch.rand(T, generator=generator) < 0.05).cumsum(0)
    ids_BT = torch.randint(V, (1, T), generator=generator)
    docs = Documents.from_ids(documents_T[None])
    model.mtp.aux_scale.fill_(1.0)
    with LiveBytes() as live:
        model(ids_BT, ids_BT, docs).loss_sum.backward()
    assert calls == [T, 3 * T]
    # beside weight gradients of the head: chunks of logits, and the mask of attention, T x T
    assert live.largest <= T * T * 4 < T * V * 4


@pytest.mark.parametrize("shared", [True, False])
def test_depths_that_run_again_change_no_bit_and_keep_no_block(shared: bool) -> None:
    found = {}
    T = 64
    for again in (False, True):
        model = build(model_of(replace(MTP, shared=shared), pattern="F"))
        policy, replays = replace(KEEP, mtp=again), Replays()
        set_recompute(model, [NOTHING], policy, replays)
        edge, of = boundary(model), batch(range(2), T)
        with LiveBytes() as live:
            sums = edge.accumulate([of])
        grads = [p.grad for p in model.parameters()]
        found[again] = sums.loss_sum.item(), grads, live.peak, replays.counts.get("block", 0)
    (loss, grads, peak, none), (loss2, grads2, peak2, times) = found[False], found[True]
    assert loss == loss2 and (none, times) == (0, 2), "the last depth keeps its tensors"
    assert all(torch.equal(a, b) for a, b in zip(grads, grads2, strict=True))
    width = hidden_width(model_of())
    # hidden units of a block alone, for K - 1 blocks
    assert peak - peak2 >= 2 * (2 * T) * 2 * width * 8


# ---- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes_are_those_of_the_model(name: str) -> None:
    config = model_of(VARIANTS[name])
    total = sum(layer_parameters(config)) + embedding_parameters(config) + head_parameters(config)
    assert count_parameters(config).total == total


def test_a_width_of_its_own() -> None:
    plain = replace(MTP, hidden_dim=0)
    assert hidden_width(model_of(MTP)) == 24
    assert hidden_width(model_of(plain, dim=192)) == 512
    relu2 = replace(small().mlp, activation="relu2")
    assert hidden_width(model_of(plain, dim=192, mlp=relu2)) == 768


def test_projection_is_muon_s_and_norms_are_not() -> None:
    rows = {a.name: a.algorithm for a in assign(meta_model(model_of()), "muon_adamw")}
    assert rows["mtp.blocks.0.projection.weight"] == "muon"
    assert rows["mtp.blocks.0.attention.mixer.wq.weight"] == "muon"
    assert rows["mtp.blocks.0.feed_forward.mixer.w2.weight"] == "muon"
    norms = [name for name in rows if name.startswith("mtp.") and "norm" in name]
    assert len(norms) == 3 + 2 + 2 and {rows[name] for name in norms} == {"adamw"}


def test_its_attention_is_clipped_too() -> None:
    config = model_of(replace(MTP, shared=False))
    config = replace(config, attention=replace(config.attention, qk_norm=False))
    model = build(config)
    clip = QKClip(model, tau=1e-6, reduce_max=lambda values: values)
    before = {n: p.clone() for n, p in model.named_parameters()}
    boundary(model).accumulate([batch()])
    figures = clip.clip().figures()
    assert figures["n_clipped"] == figures["n_total"] == 4 * config.attention.num_heads
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    names = ("blocks.0", *(f"mtp.blocks.{k}.attention" for k in range(3)))
    assert changed == {f"{name}.mixer.{w}.weight" for name in names for w in ("wq", "wk")}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.mtp.hidden-dim 7 --mesh.tp 2", "mesh.tp=2: must divide model.mtp.hidden_dim (7)"),
        ("--mesh.tp 2 --model.pattern F --model.attention.num-kv-heads 1", "num_kv_heads (1)"),
    ],
)
def test_meshes_that_it_is_refused_on(flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["tiny", "--model.mtp.depths", "2", *flags.split()], 2)
    assert words in str(error.value)
