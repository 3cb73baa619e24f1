"""QK-clip against attention written out, and what recording costs.

fp64 at 1e-12 is a wrong formula; weights of heads that aren't clipped are compared bit for bit.

Legend: B rows, T tokens, N query heads, K key/value heads, H query/key head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.gqa import GroupedQueryAttention
from megacpp.blocks.attention.logits import LogitRecorder, Statistic, largest_logits
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.attention.rope import inverse_frequencies
from megacpp.kernels.attention.causal import causal_attention
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.qk_clip import Attention, QKClip, row_factors, scale_rows
from tests.model.attention_cases import noise, packed
from tests.optim.qk_clip_cases import ATTENTION, GQA, model_config
from tests.synthetic import ragged_batch

T = 16


def model_of(attention: str) -> HybridLM:
    model = HybridLM(model_config(attention)).double()
    initialise(model, model.init_rules(), seed=5)
    return model.train()


def alone(flat: Tensor) -> Tensor:
    return flat


def mixers_of(model: HybridLM) -> dict[str, Attention]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    assert len(found) == 2
    return found


def seen_by(
    model: HybridLM, step: Callable[[], object]
) -> dict[str, list[tuple[Tensor, Documents]]]:
    """Return the inputs of each mixer while `step` ran."""
    inputs: dict[str, list[tuple[Tensor, Documents]]] = {}
    names = {mixer: name for name, mixer in mixers_of(model).items()}

    def keep(mixer: Attention, args: tuple[Tensor, Documents]) -> None:
        inputs.setdefault(names[mixer], []).append((args[0].detach().clone(), args[1]))

    handles = [mixer.register_forward_pre_hook(keep) for mixer in names]
    step()
    for handle in handles:
        handle.remove()
    return inputs


# ---- attention written out -----------------------------------------------------------------------
def turned(x_BTNR: Tensor, docs: Documents, config: AttentionConfig) -> Tensor:
    """Rotary positions by complex numbers."""
    angle_BTP = docs.positions_BT[..., None] * inverse_frequencies(x_BTNR.shape[-1], config)
    pairs = torch.complex(x_BTNR[..., ::2], x_BTNR[..., 1::2])
    turned = pairs * torch.polar(torch.ones_like(angle_BTP), angle_BTP)[:, :, None]
    return torch.view_as_real(turned).flatten(-2)


def queries_and_keys(mixer: Attention, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, Tensor]:
    """`[B, T, N, H]` of both, from the weights; keys once per query head."""
    if isinstance(mixer, GroupedQueryAttention):
        c = mixer.config.attention
        q, k = (x_BTD @ w.weight.T for w in (mixer.wq, mixer.wk))
        q_BTNH = turned(q.unflatten(-1, (c.num_heads, -1)), docs, c)
        k_BTKH = turned(k.unflatten(-1, (c.num_kv_heads, -1)), docs, c)
        return q_BTNH, k_BTKH.repeat_interleave(c.num_heads // c.num_kv_heads, 2)
    assert isinstance(mixer, MultiHeadLatentAttention)
    c = mixer.config.attention
    if c.q_lora_rank:
        q = mixer.q_norm(x_BTD @ mixer.wq_a.weight.T) @ mixer.wq_b.weight.T
    else:
        q = x_BTD @ mixer.wq.weight.T
    q_BTNH, n = q.unflatten(-1, (c.num_heads, -1)), c.qk_nope_head_dim
    latent = x_BTD @ mixer.wkv_a.weight.T
    kv = mixer.kv_norm(latent[..., : c.kv_lora_rank]) @ mixer.wkv_b.weight.T
    k_nope = kv.unflatten(-1, (c.num_heads, -1))[..., :n]
    k_pe = turned(latent[..., None, c.kv_lora_rank :], docs, c).expand(-1, -1, c.num_heads, -1)
    q_BTNH = torch.cat((q_BTNH[..., :n], turned(q_BTNH[..., n:], docs, c)), -1)
    return q_BTNH, torch.cat((k_nope, k_pe), -1)


@torch.no_grad()
def true_logits(
    mixer: Attention, inputs: list[tuple[Tensor, Documents]], statistic: Statistic
) -> Tensor:
    """`(N,)`: of every head the largest logit of all inputs, or its bound, token by token."""
    config, scale = mixer.config.attention, mixer.inner.scale
    pairs = [queries_and_keys(mixer, x, docs) for x, docs in inputs]
    if statistic == "bound":
        rotary = config.qk_rope_head_dim if config.kind == "mla" else 0
        total = torch.zeros(config.num_heads, dtype=torch.float64)
        width = pairs[0][0].shape[-1]
        for part in (slice(width - rotary), slice(width - rotary, width)):
            norms = [
                torch.stack([x[..., part].square().sum(-1).sqrt().amax((0, 1)) for x in side])
                for side in zip(*pairs, strict=True)
            ]
            total += norms[0].amax(0) * norms[1].amax(0)
        return scale * total
    largest = torch.full((config.num_heads,), -torch.inf, dtype=torch.float64)
    for (q_BTNH, k_BTNH), (_, docs) in zip(pairs, inputs, strict=True):
        for b, positions in enumerate(docs.positions_BT.tolist()):
            for t, position in enumerate(positions):
                seen_SN = (k_BTNH[b, t - position : t + 1] * q_BTNH[b, t]).sum(-1)
                largest = torch.maximum(largest, scale * seen_SN.amax(0))
    return largest


def clipped_by_hand(mixer: Attention, gamma_N: Tensor) -> dict[str, Tensor]:
    """Return the weights that change, head by head, after the paper."""
    config = mixer.config.attention
    new = {n: p.detach().clone() for n, p in mixer.named_parameters()}
    gammas = gamma_N.tolist()
    if config.kind == "gqa":
        H, group = config.head_dim, config.num_heads // config.num_kv_heads
        for h, gamma in enumerate(gammas):
            new["wq.weight"][h * H : (h + 1) * H] *= gamma**0.5
        for g in range(config.num_kv_heads):
            worst = min(gammas[g * group : (g + 1) * group])
            new["wk.weight"][g * H : (g + 1) * H] *= worst**0.5
        return new
    n, r, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    w_q = new["wq_b.weight" if config.q_lora_rank else "wq.weight"]
    for h, gamma in enumerate(gammas):
        w_q[h * (n + r) : h * (n + r) + n] *= gamma**0.5
        w_q[h * (n + r) + n : (h + 1) * (n + r)] *= gamma
        new["wkv_b.weight"][h * (n + v) : h * (n + v) + n] *= gamma**0.5
    return new


def two_microbatches(model: HybridLM) -> Callable[[], None]:
    def step() -> None:
        for rows in (range(0, 3), range(3, 6)):
            batch = ragged_batch(rows, T, 48)
            model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()

    return step


@pytest.mark.parametrize("statistic", ["bound", "max"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_clips_as_written_out(attention: str, statistic: Statistic) -> None:
    """Compare maxima and weights; afterwards no clipped head is above tau."""
    model = model_of(attention)
    inputs = seen_by(model, two_microbatches(model))
    before = {name: true_logits(m, inputs[name], statistic) for name, m in mixers_of(model).items()}
    sizes = torch.cat(list(before.values())).sort().values
    tau = sizes[len(sizes) // 2 - 1 : len(sizes) // 2 + 1].mean().item()  # half are above

    clip = QKClip(model, tau, alone, statistic)
    two_microbatches(model)()
    expected = {
        f"{name}.{leaf}": w
        for name, m in mixers_of(model).items()
        for leaf, w in clipped_by_hand(m, (tau / before[name]).clamp(max=1.0)).items()
    }
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = clip.clip().figures()

    clipped = int((sizes > tau).sum())
    assert 0 < clipped < len(sizes)
    assert abs(report["max_logit"] / sizes[-1].item() - 1) < 1e-12
    assert (report["n_clipped"], report["n_total"]) == (clipped, len(sizes))
    for name, p in model.named_parameters():
        want = expected.get(name, start[name])
        assert (p - want).abs().max() <= 1e-12 * want.abs().max(), name
        same = want == start[name]
        assert torch.equal(p[same], start[name][same]), name
    for name, mixer in mixers_of(model).items():
        after_N, above_N = true_logits(mixer, inputs[name], statistic), before[name] > tau
        assert (after_N[above_N] <= tau * (1 + 1e-6)).all(), (after_N, tau)
        # The worst of the query heads that share a key head gets exactly tau.
        config = mixer.config.attention
        groups = config.num_kv_heads if config.kind == "gqa" else config.num_heads
        worst_K, before_K = (x.view(groups, -1).amax(1) for x in (after_N, before[name]))
        assert ((worst_K / before_K.clamp(max=tau) - 1).abs() < 1e-12).all()


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_bound_is_no_smaller(attention: str) -> None:
    model = model_of(attention)
    found = []
    for statistic in ("bound", "max"):
        clip = QKClip(model, 1.0, alone, statistic)
        two_microbatches(model)()
        found.append(clip._logits())
    bound_LN, max_LN = found
    assert (bound_LN >= max_LN).all() and (bound_LN > max_LN).any()


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_nothing_above_tau_changes_no_bit(attention: str) -> None:
    model = model_of(attention)
    clip = QKClip(model, 1e9, alone)
    two_microbatches(model)()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert clip.clip().figures()["n_clipped"] == 0
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


def test_forgets_after_a_clip_and_after_a_reset() -> None:
    model = model_of("gqa")
    clip = QKClip(model, 1e-3, alone)
    two_microbatches(model)()
    assert clip.clip().figures()["n_clipped"] == 8
    assert clip.clip().figures() == {"max_logit": 0.0, "n_clipped": 0.0, "n_total": 8.0}
    two_microbatches(model)()
    clip.reset()
    assert clip.clip().figures()["max_logit"] == 0.0


def test_measured_before_the_step_is_the_same_clip() -> None:
    """Figures are on their way before the optimizer's step; a step left out leaves no factors."""
    found = []
    for measures in (False, True):
        model = model_of("gqa")
        clip = QKClip(model, 1e-3, alone)
        two_microbatches(model)()
        if measures:
            clip.measure()
            assert clip.after_step(taken=False) == {}
            two_microbatches(model)()
            clip.measure()
        found.append((clip.after_step(taken=True), [p.clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0] and found[0][0]["n_clipped"] == 8
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_logits_that_are_not_finite_scale_nothing() -> None:
    """Else one overflow would set a head to zero for good, or a NaN would spread."""
    model = model_of("gqa")
    clip = QKClip(model, 1e-3, alone)
    two_microbatches(model)()
    for layer, bad in zip(clip.layers, (torch.inf, torch.nan), strict=True):
        assert layer.recorder.max_q_PN is not None
        layer.recorder.max_q_PN[0, 0] = bad
    start = [layer.w_q.detach().clone() for layer in clip.layers]
    clip.clip()
    for layer, before in zip(clip.layers, start, strict=True):
        assert torch.equal(layer.w_q[:6], before[:6])
        assert (layer.w_q[6:] != before[6:]).all()


def test_half_weights_are_scaled_in_single_precision() -> None:
    weight = noise(12, 5).bfloat16()
    gamma_N = torch.tensor([0.3, 1.0])
    factor, _ = row_factors(gamma_N, dataclasses.replace(GQA, num_heads=2))
    scaled = weight.clone()
    scale_rows(scaled, factor)
    assert torch.equal(scaled, (weight.float() * factor[:, None]).bfloat16())
    assert torch.equal(scaled[6:], weight[6:])


# ---- recording -----------------------------------------------------------------------------------
class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_costs_nothing_unless_it_is_on() -> None:
    mixer = mixers_of(model_of("gqa"))["blocks.0.mixer"]
    q, k, docs = noise(2, 23, 4, 6), noise(2, 23, 2, 6, seed=1), packed()

    def operators(attend: Callable[[], object]) -> list[str]:
        with Operators() as seen:
            attend()
        return seen.names

    def core() -> Tensor:
        return mixer.inner(q, k, k, docs)

    core()  # the mask is made once a batch
    plain = operators(lambda: causal_attention(q, k, k, docs, mixer.inner.scale, None))
    assert operators(core) == plain
    mixer.inner.recorder = LogitRecorder(1.0, (6,))
    assert len(operators(core)) > len(plain)
    mixer.eval()
    assert operators(core) == plain


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_a_clip_reads_no_value(attention: str) -> None:
    """So a GPU is never waited for, but once by who writes the log."""
    model = model_of(attention)
    clip = QKClip(model, 1.0, alone)
    two_microbatches(model)()
    with Operators() as seen:
        report = clip.clip()
    reads = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}
    assert seen.names and not reads & set(seen.names)
    with Operators() as seen:
        report.numbers[0].item()
    assert reads & set(seen.names)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    model = model_of("mla")
    clip = QKClip(model, 1.0, alone)
    mixer, x_BTD, docs = mixers_of(model)["blocks.0.mixer"], noise(2, 23, 16), packed()
    forwards, records = [], []
    core, recorder = mixer.inner, clip.layers[0].recorder
    core.register_forward_hook(lambda *_: forwards.append(1))
    record = recorder.record
    recorder.record = lambda *args: (records.append(1), record(*args))[1]  # type: ignore[method-assign]
    x_BTD.requires_grad_()
    checkpoint(mixer, x_BTD, docs, use_reentrant=reentrant).sum().backward()
    assert (len(forwards), len(records)) == (2, 1)
    assert x_BTD.grad is not None


def test_evaluation_is_not_recorded() -> None:
    model = model_of("gqa")
    clip = QKClip(model, 1.0, alone)
    batch = ragged_batch(range(3), T, 48)
    with torch.no_grad():
        model.eval()(batch.ids_BT, batch.labels_BT, batch.docs)
    assert all(layer.recorder.maxima == () for layer in clip.layers)


def test_the_true_maximum_never_holds_all_logits() -> None:
    tokens, heads = 1024, 2
    q, k = noise(1, tokens, heads, 4), noise(1, tokens, 1, 4, seed=1)
    docs = Documents.rows(1, tokens)
    with LiveBytes() as live:
        found_N = largest_logits(q, k, docs, docs, 0.5)
    all_bytes = heads * tokens * tokens * 8
    assert live.peak < all_bytes / 2 and live.largest <= all_bytes / 8
    logits_NTT = 0.5 * torch.einsum("tnh,sh->nts", q[0], k[0, :, 0])
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    assert torch.allclose(found_N, logits_NTT.masked_fill(future, -torch.inf).amax((1, 2)), 1e-12)
