"""The gated delta rule: chunks against the definition, segments, dtypes, saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential
from megacpp.kernels.gated_delta_rule.segments import fold, summarize
from megacpp.model.documents import Documents

FP64 = 1e-12  # two formulas of the same thing in fp64
B, T, H, N, K, V = 2, 23, 2, 6, 5, 7
# Lengths 1, several documents in a chunk, and starts that differ between the rows.
IDS_BT = torch.stack(
    [
        torch.repeat_interleave(torch.arange(5), torch.tensor([6, 1, 1, 10, 5])),
        torch.repeat_interleave(torch.arange(3), torch.tensor([1, 18, 4])),
    ]
)


def leaves(dtype: torch.dtype = torch.double, tokens: int = T, rate: float = 3.0) -> list[Tensor]:
    """q, k, v, g, beta and an initial state; some tokens keep all, write nothing or write twice."""
    torch.manual_seed(3)
    g, beta = -rate * torch.rand(B, tokens, N), 2 * torch.rand(B, tokens, N)
    g[:, 3], beta[:, 4], beta[:, 5] = 0.0, 0.0, 2.0
    made = [
        torch.randn(B, tokens, H, K),
        torch.randn(B, tokens, H, K),
        torch.randn(B, tokens, N, V),
        g,
        beta,
        torch.randn(B, N, K, V),
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random functional of the outputs."""
    torch.manual_seed(4)
    cotangents = [torch.randn(y.shape, dtype=torch.double).to(y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, inputs, cotangents))


def assert_close(got: Tensor, want: Tensor, relative: float = FP64) -> None:
    error = (got - want).abs().max().item()
    assert error <= relative * max(1.0, want.abs().max().item()), f"{error:.1e}"


def assert_all_close(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_chunks_are_the_definition(chunk_size: int, packed: bool) -> None:
    docs, inputs = Documents.from_ids(IDS_BT) if packed else None, leaves()
    want = gated_delta_sequential(*inputs[:5], docs, inputs[5])
    got = gated_delta_rule(*inputs[:5], docs, inputs[5], chunk_size)
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs), gradients(want, inputs))


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "state"])
def test_one_result_alone_is_used(used: int) -> None:
    inputs = leaves()
    want = gated_delta_sequential(*inputs[:5], None, inputs[5])[used]
    got = gated_delta_rule(*inputs[:5], None, inputs[5], 5)[used]
    wanted = inputs[1:]
    assert_all_close(gradients((got,), wanted), gradients((want,), wanted))


def test_a_row_cut_in_two_passes_its_state_on() -> None:
    inputs = leaves()
    want = gated_delta_rule(*inputs[:5], chunk_size=5)
    left, state = gated_delta_rule(*(x[:, :9] for x in inputs[:5]), chunk_size=5)
    right, state = gated_delta_rule(*(x[:, 9:] for x in inputs[:5]), None, state, 5)
    got = torch.cat([left, right], 1), state
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs[:5]), gradients(want, inputs[:5]))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_folded_segments_are_the_row(packed: bool) -> None:
    """Every segment is scanned from the state that the summaries on its left fold into."""
    inputs, docs = leaves(tokens=24), Documents.rows(B, 24)
    if packed:
        docs = Documents.from_ids(torch.cat([IDS_BT, IDS_BT[:, -1:]], 1))
    want = gated_delta_rule(*inputs[:5], docs, chunk_size=5)
    spans = [slice(s, s + 8) for s in (0, 8, 16)]
    parts = [[x[:, span] for x in inputs[:5]] for span in spans]
    of_parts = [docs.take(torch.arange(24)[span]) for span in spans]
    summaries = [summarize(*x[1:], d, 5) for x, d in zip(parts, of_parts, strict=True)]
    carries = torch.stack([~d.starts_BT.any(1) for d in of_parts])
    states = [s.S_BNKV for s in fold(summaries, carries)]
    outputs = []
    for part, d, state in zip(parts, of_parts, states[:-1], strict=True):
        state = torch.where((d.positions_BT[:, 0] > 0)[:, None, None, None], state, 0.0)
        outputs.append(gated_delta_rule(*part, d, state, 5)[0])
    got = torch.cat(outputs, 1), states[-1]
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs[:5]), gradients(want, inputs[:5]))


def test_summaries_compose_and_do_not_commute() -> None:
    _, k, v, g, beta, _ = leaves()
    whole = summarize(k, v, g, beta, None, 5)
    left, right = (
        summarize(*(x[:, s] for x in (k, v, g, beta)), None, 5) for s in (slice(9), slice(9, T))
    )
    assert_close(right.through_SNKK @ left.through_SNKK, whole.through_SNKK)
    assert_close(right.through_SNKK @ left.added_SNKV + right.added_SNKV, whole.added_SNKV)
    other = left.through_SNKK @ right.through_SNKK
    assert (other - whole.through_SNKK).abs().max() > 1e-3 * whole.through_SNKK.abs().max()


@pytest.mark.parametrize("rate", [0.01, 3.0, 40.0])
def test_fp32_chunks_are_as_good_as_tokens_at_every_decay(rate: float) -> None:
    """With 40 a chunk decays by 1,200 nats: exp of a sum over it overflows on its own."""
    inputs = leaves(torch.double, 96, rate)
    narrow = [x.detach().float() for x in inputs]
    want = gated_delta_sequential(*inputs[:5], None, inputs[5])
    got = gated_delta_rule(*narrow[:5], None, narrow[5])
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_narrow_inputs_are_computed_wide() -> None:
    """bf16 inputs give what their fp32 copies give, rounded once at the end."""
    narrow = leaves(torch.bfloat16)[:5]
    same = [x.detach().float().requires_grad_() for x in narrow]
    y, y_wide = (gated_delta_rule(*x, chunk_size=5)[0] for x in (narrow, same))
    assert y.dtype == torch.bfloat16 and torch.equal(y, y_wide.bfloat16())
    dy = torch.randn_like(y)
    got, want = torch.autograd.grad(y, narrow, dy), torch.autograd.grad(y_wide, same, dy.float())
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(got, want, strict=True))


def test_autocast_leaves_the_rule_alone() -> None:
    inputs = leaves(torch.float32)
    want, want_step = gated_delta_rule(*inputs[:5])[0], gated_delta_sequential(*inputs[:5])[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_delta_rule(*inputs[:5])[0]
        dgot = gradients((got,), inputs[:5])
        assert torch.equal(gated_delta_sequential(*inputs[:5])[0], want_step)
    assert torch.equal(got, want)
    assert all(map(torch.equal, dgot, gradients((want,), inputs[:5])))


def saved_bytes(run: Any) -> int:
    """Bytes of all storages that autograd keeps for backward."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_keeps_its_inputs_alone(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)[:5]
    own = sum(x.numel() * x.element_size() for x in inputs)
    assert saved_bytes(lambda: gated_delta_rule(*inputs, chunk_size=5)) == own
    assert saved_bytes(lambda: summarize(*inputs[1:], None, 5)) < own + 4 * B * N * K * (K + V) + 1
