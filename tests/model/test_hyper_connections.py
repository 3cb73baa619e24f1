"""Several residual streams: kernels against their formulas, and a model against one without.

Legend: S tokens, n streams, D model, B rows, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.hyper_connections.module import HyperConnection, Spread
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.kernels.hyper_connections import reference as kernel
from megacpp.kernels.hyper_connections.reference import (
    Coefficients,
    mix,
    mix_reference,
    read,
    read_reference,
)
from megacpp.kernels.hyper_connections.sinkhorn import Ordering, sinkhorn, sinkhorn_reference
from megacpp.model.decoding import decode, init_state
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import small
from tests.synthetic import ragged_batch

ORDERINGS: tuple[Ordering, ...] = ("paper", "deepseek_v4", "megatron")
EVERY = pytest.mark.parametrize("ordering", ORDERINGS)
ONE = World(0, 1, torch.device("cpu"))


def noise(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs(n: int, S: int = 5, D: int = 6) -> list[Tensor]:
    """Streams, phi, scale and bias."""
    K, C = n * n + 2 * n, n * D
    found = noise(S, n, D), noise(K, C, seed=1, size=0.3), noise(3, seed=2), noise(K, seed=3)
    return [t.requires_grad_() for t in found]


# ---- kernels ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("n", [2, 4])
def test_what_sums_to_one(ordering: Ordering, n: int) -> None:
    m_Snn = sinkhorn(noise(50, n, n, size=2.0), ordering, 20)
    rows, columns = (m_Snn.sum(dim) - 1.0 for dim in (-1, -2))
    exact, near = (rows, columns) if ordering == "paper" else (columns, rows)
    assert exact.abs().max() < (2e-6 if ordering == "deepseek_v4" else 1e-15)
    assert near.abs().max() < 0.03 and (m_Snn > 0).all()


@EVERY
def test_gradient_is_that_of_the_iterations(ordering: Ordering) -> None:
    """Of few as of many: far from doubly stochastic it is not that of the limit."""
    for iterations in (1, 2, 20):
        logits = noise(3, 3, 3, size=2.0).requires_grad_()
        assert torch.autograd.gradcheck(lambda z, k=iterations: sinkhorn(z, ordering, k), logits)
        want, got = (
            torch.autograd.grad(form(logits, ordering, iterations), logits, noise(3, 3, 3, seed=1))
            for form in (sinkhorn_reference, sinkhorn)
        )
        assert (got[0] - want[0]).abs().max() <= 1e-13


@EVERY
def test_large_logits_stay_finite(ordering: Ordering) -> None:
    logits = noise(20, 4, 4, size=15.0).float().requires_grad_()
    m_Snn = sinkhorn(logits, ordering, 20)
    m_Snn.backward(torch.ones_like(m_Snn))
    assert logits.grad is not None and m_Snn.isfinite().all() and logits.grad.isfinite().all()


@EVERY
def test_read_and_mix_have_the_gradients_of_their_formulas(
    ordering: Ordering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also two tokens at a time."""
    how = Coefficients(3, ordering, 4, 1e-5)
    given, y_SD = inputs(3), noise(5, 6, seed=4).requires_grad_()
    weights = noise(5, 3, 6, seed=5)

    def run(read_form: object, mix_form: object) -> tuple[Tensor, ...]:
        u_SD, *coefficients = read_form(*given, how)  # type: ignore[operator]
        out_SnD = mix_form(given[0], y_SD * u_SD, *coefficients)  # type: ignore[operator]
        return out_SnD, *torch.autograd.grad(out_SnD, [*given, y_SD], weights)

    want = run(read_reference, mix_reference)
    for chunk in (1 << 24, 2 * 18):
        monkeypatch.setattr(kernel, "CHUNK", chunk)
        for a, b in zip(run(read, mix), want, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
    assert torch.autograd.gradcheck(lambda x, p, s, b: read(x, p, s, b, how), given)


def test_streams_of_zeros_have_gradients() -> None:
    _, phi, scale, bias = (t.detach() for t in inputs(2))
    x_SnD = torch.zeros(5, 2, 6).double().requires_grad_()
    for ordering in ORDERINGS:
        u_SD, post_Sn, res_Snn = read(x_SnD, phi, scale, bias, Coefficients(2, ordering, 3, 1e-5))
        (grad,) = torch.autograd.grad(u_SD.sum() + post_Sn.sum() + res_Snn.sum(), x_SnD)
        assert grad.isfinite().all()


def test_nothing_wide_and_no_iteration_is_kept() -> None:
    """Streams in bf16 are kept as they came; beside them a few numbers of each token."""
    n, S, D = 4, 64, 128
    x_SnD, phi, scale, bias = (t.detach().float().requires_grad_() for t in inputs(n, S, D))
    x_SnD = x_SnD.detach().bfloat16().requires_grad_()
    with LiveBytes() as live:
        outs = read(x_SnD, phi, scale, bias, Coefficients(n, "paper", 20, 1e-5))
    K = n * n + 2 * n
    returned = S * D * 2 + S * (n + n * n) * 4
    assert live.now == returned + S * (K + 1) * 4, (live.now, returned)
    assert outs[0].dtype == torch.bfloat16 and outs[1].dtype == outs[2].dtype == torch.float32


# ---- the model ----------------------------------------------------------------------------------


def with_streams(streams: int = 4, pattern: str = "AMERF", **changes: object) -> ModelConfig:
    mhc = HyperConnectionConfig(streams=streams, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(small(pattern), mhc=mhc, init_std=0.3)


def build(model: ModelConfig) -> HybridLM:
    return build_model(Config(model=model, precision=PrecisionConfig("fp64")), ONE)


def loss_and_gradients(model: HybridLM) -> tuple[Tensor, dict[str, Tensor]]:
    batch = ragged_batch([0, 1], 12, model.config.vocab_size)
    loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@EVERY
@pytest.mark.parametrize("streams", [2, 4])
def test_the_first_step_is_that_of_one_stream(ordering: Ordering, streams: int) -> None:
    """To rounding; DeepSeek-V4's order adds 1e-6 to every sum, in each layer."""
    plain = build(with_streams(1))
    several = build(with_streams(streams, ordering=ordering))
    assert not [n for n, _ in plain.named_parameters() if "connection" in n]
    (want, gradients), (got, others) = loss_and_gradients(plain), loss_and_gradients(several)
    limit = 1e-4 if ordering == "deepseek_v4" else 1e-12
    assert abs(got / want - 1) <= limit
    for name, gradient in gradients.items():
        assert (others[name] - gradient).abs().max() <= limit * gradient.abs().max(), name


def test_streams_part_in_training() -> None:
    """Equal at first, they are not after a few steps; what is read of each tells them apart."""
    model = build(with_streams(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[float] = []

    def spread(_: object, args: tuple[Tensor, ...]) -> None:
        x_BTnD = args[0].detach()
        seen.append(((x_BTnD - x_BTnD.mean(2, keepdim=True)).norm() / x_BTnD.norm()).item())

    model.collapse.register_forward_pre_hook(spread)
    for _ in range(5):
        optimizer.zero_grad()
        loss_and_gradients(model)
        optimizer.step()
    assert seen[0] < 1e-15 and seen[-1] > 1e-3, seen
    for name, parameter in model.named_parameters():
        if name.endswith("connection.scale"):
            assert (parameter - 0.01).abs().max() > 0, name


@EVERY
def test_one_token_at_a_time(ordering: Ordering) -> None:
    model = build(with_streams(3, ordering=ordering, init="published")).eval()
    ids_BT = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    state, logits = init_state(model, 2, torch.device("cpu"), torch.float64), []
    for t in range(9):
        logit_BV, state = decode(model, ids_BT[:, t], state)
        logits.append(logit_BV)
    want = model.head.logits(model.hidden(ids_BT))
    assert (torch.stack(logits, 1) - want).abs().max() < 1e-11


def test_documents_do_not_meet() -> None:
    """Other tokens in one document change no bit of what comes out for the other."""
    model = build(with_streams(init="published"))
    ids = torch.tensor([[0] * 5 + [1] * 7])
    docs, tokens = Documents.from_ids(ids), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, :5] = 40 + changed[0, :5]
    assert torch.equal(model.hidden(tokens, docs)[0, 5:], model.hidden(changed, docs)[0, 5:])
    assert not torch.equal(model.hidden(tokens, docs)[0, :5], model.hidden(changed, docs)[0, :5])


def test_published_starts() -> None:
    """Xavier's uniform values and 0.01; of transformers' DeepSeek-V4 normal ones of 0.02 and 1."""
    model = with_streams(4, init="published")
    for ordering, scale in (("megatron", 0.01), ("paper", 0.01), ("deepseek_v4", 1.0)):
        mhc = dataclasses.replace(model.mhc, ordering=ordering)
        connection = build(dataclasses.replace(model, mhc=mhc)).blocks["1"].connection
        assert isinstance(connection, HyperConnection)
        std = 0.02 if ordering == "deepseek_v4" else math.sqrt(2 / (24 + 64))
        assert abs(connection.phi.std().item() / std - 1) < 0.05
        assert (connection.scale == scale).all() and not connection.bias.any()


def test_spread_copies() -> None:
    x_BTD = noise(2, 3, 4)
    x_BTnD = Spread(with_streams(3))(x_BTD)
    assert x_BTnD.is_contiguous() and torch.equal(x_BTnD, x_BTD[:, :, None].expand(2, 3, 3, 4))
