"""The Mamba-3 scan: chunks equal the recurrence, documents are isolated, extremes stay finite."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_sequential, mamba3_step
from megacpp.model.documents import Documents
from tests.golden.check_mamba3 import scan_documents
from tests.model.mamba3_cases import packed, random_scan, scan_leaves

SHAPES = {
    "siso": {"rank": 1, "groups": 2},
    "siso_all_rotate": {"rank": 1, "angles": 4, "shared_angles": True},
    "mimo": {"rank": 2, "groups": 4},
    "mimo_all_rotate": {"rank": 3, "angles": 4, "shared_angles": True},
}
TOKENS = 21


def results(
    out: Tensor, state: Mamba3State, leaves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and states, and the gradients of their weighted sum."""
    outputs = [out, *vars(state).values()]
    loss = torch.zeros((), dtype=out.dtype)
    for i, o in enumerate(outputs):
        weight = torch.cos(torch.arange(o.numel(), dtype=o.dtype) + i).view(o.shape)
        loss = loss + (o * weight).sum()
    return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def assert_equal_to_rounding(got: list[Tensor], want: list[Tensor], limit: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= limit * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("continued", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("docs", ["whole", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_equal_the_recurrence(shape: str, docs: str, continued: bool, chunk: int) -> None:
    torch.manual_seed(0)
    inputs, weights, before = random_scan(TOKENS, **SHAPES[shape])
    initial = before if continued else None
    documents = packed(2, TOKENS) if docs == "packed" else Documents.rows(2, TOKENS)
    pairing: Pairing = "interleaved" if shape.startswith("siso") else "half"
    leaves = scan_leaves(inputs, weights, initial)
    fast = mamba3_chunked(inputs, weights, documents, pairing, chunk, initial)
    reference = mamba3_sequential(inputs, weights, documents, pairing, initial)
    for got, want in zip(results(*fast, leaves), results(*reference, leaves), strict=True):
        assert_equal_to_rounding(got, want)


def test_a_document_that_ends_with_its_chunk() -> None:
    inputs, weights, _ = random_scan(16)
    docs = Documents.from_ids(torch.arange(16).expand(2, 16) // 4)
    fast = mamba3_chunked(inputs, weights, docs, "interleaved", 4)
    reference = mamba3_sequential(inputs, weights, docs, "interleaved")
    leaves = scan_leaves(inputs, weights)
    for got, want in zip(results(*fast, leaves), results(*reference, leaves), strict=True):
        assert_equal_to_rounding(got, want)


def test_a_document_id_may_come_back() -> None:
    inputs, weights, _ = random_scan(6)
    again = Documents(torch.tensor([[0, 0, 1, 0, 0, 1]] * 2), torch.zeros(2, 6, dtype=torch.int64))
    apart = Documents.from_ids(again.ids_BT)
    y_again, _ = mamba3_chunked(inputs, weights, again, "interleaved", 6)
    y_apart, _ = mamba3_chunked(inputs, weights, apart, "interleaved", 6)
    assert torch.equal(y_again, y_apart)


@pytest.mark.parametrize("chunk", [4, 7, 32])
def test_documents_are_isolated_bit_for_bit(chunk: int) -> None:
    docs = Documents.from_ids(
        torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3]).expand(2, 14)
    )
    changed = slice(4, 12)
    others = torch.ones(14, dtype=torch.bool)
    others[changed] = False
    runs = []
    for factor in (1.0, -1.7):
        torch.manual_seed(3)
        inputs, weights, _ = random_scan(14, dtype=torch.float32)
        with torch.no_grad():
            for name, x in vars(inputs).items():
                time_last = name in ("ADT", "DT", "Trap")
                part = x[..., changed] if time_last else x[:, changed]
                part.mul_(abs(factor) if name in ("ADT", "DT") else factor)
        y, _ = mamba3_chunked(inputs, weights, docs, "interleaved", chunk)
        grads = torch.autograd.grad(y.square().sum(), scan_leaves(inputs))
        runs.append([y.detach(), *(g if g.shape[1] == 14 else g.transpose(1, 2) for g in grads)])
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[:, others], after[:, others])
        assert not torch.equal(before[:, changed], after[:, changed])


def test_two_halves_of_a_row_equal_the_row() -> None:
    inputs, weights, _ = random_scan(TOKENS)
    docs = packed(2, TOKENS, seed=5)
    cut = next(t for t in range(8, 16) if docs.positions_BT[0, t] > 0 < docs.positions_BT[1, t])
    whole, last = mamba3_chunked(inputs, weights, docs, "interleaved", 8)
    state, ys = None, []
    for tokens in (slice(0, cut), slice(cut, TOKENS)):
        part = Documents.from_ids(docs.ids_BT[:, tokens])
        y, state = mamba3_chunked(
            inputs.part(slice(None), tokens), weights, part, "interleaved", 8, state
        )
        ys.append(y)
    assert state is not None
    assert_equal_to_rounding([torch.cat(ys, 1)], [whole])
    assert_equal_to_rounding(list(vars(state).values()), list(vars(last).values()))


def test_one_document_at_a_time_equals_the_packed_row() -> None:
    inputs, weights, _ = random_scan(TOKENS)
    docs = packed(2, TOKENS)

    def scan(i: ScanInputs, d: Documents, s: Mamba3State | None) -> tuple[Tensor, Mamba3State]:
        return mamba3_chunked(i, weights, d, "interleaved", 8, s)

    alone, states = scan_documents(scan, inputs, docs)
    together, last = scan(inputs, docs, None)
    assert_equal_to_rounding([alone], [together])
    assert states.ssm.shape[0] == len(docs.cu_seqlens) - 1
    row_ends = torch.searchsorted(docs.cu_seqlens, torch.tensor([TOKENS, 2 * TOKENS])) - 1
    assert_equal_to_rounding([states.ssm[row_ends]], [last.ssm])


def test_heads_are_independent() -> None:
    """What lets tensor and context parallelism share out heads."""
    inputs, weights, _ = random_scan(TOKENS, rank=2)
    docs, some = packed(2, TOKENS), slice(1, 3)
    part = replace(
        inputs,
        **{n: getattr(inputs, n)[:, :, some] for n in ("V", "Z", "Angles")},
        **{n: getattr(inputs, n)[:, some] for n in ("ADT", "DT", "Trap")},
    )
    all_heads, _ = mamba3_chunked(inputs, weights, docs, "half", 8)
    some_heads, _ = mamba3_chunked(part, weights.heads(some), docs, "half", 8)
    assert_equal_to_rounding([some_heads], [all_heads[:, :, some]])


@pytest.mark.parametrize("extreme", ["decay", "no step", "no decay", "trap"])
def test_extremes_stay_finite_and_right(extreme: str) -> None:
    inputs, weights, _ = random_scan(TOKENS)
    limit = 1e-12
    with torch.no_grad():
        if extreme == "decay":
            inputs.ADT[..., ::3] = -1e4
            limit = 8 * 3e4 * 2.0**-53  # decays are differences of sums as large as 3e4
        elif extreme == "no step":
            inputs.DT[..., ::3] = 0.0
        elif extreme == "no decay":
            inputs.ADT.zero_()
        else:
            inputs.Trap[..., ::2], inputs.Trap[..., 1::2] = 200.0, -200.0
    docs, leaves = Documents.rows(2, TOKENS), scan_leaves(inputs, weights)
    fast = mamba3_chunked(inputs, weights, docs, "interleaved", 8)
    reference = mamba3_sequential(inputs, weights, docs, "interleaved")
    for got, want in zip(results(*fast, leaves), results(*reference, leaves), strict=True):
        assert all(g.isfinite().all() for g in got)
        assert_equal_to_rounding(got, want, limit)


def test_fp32_keeps_the_angle_of_a_long_document() -> None:
    """Thousands of radians: their running sum alone, in fp32, would be off by 1e-4 and more."""
    torch.manual_seed(1)
    inputs, weights, _ = random_scan(2048, rows=1, heads=1, dtype=torch.float32)
    with torch.no_grad():
        inputs.DT.clamp_(min=0.5)
        inputs.Angles.abs_()
        inputs.ADT.clamp_(min=-0.5)
    docs = Documents.rows(1, 2048)
    turned = (math.pi * torch.tanh(inputs.Angles[..., 0, 0]) * inputs.DT[:, 0]).sum()
    assert turned > 3000.0

    def doubled(x: Tensor | None) -> Tensor | None:
        return x.double() if isinstance(x, Tensor) else x

    inputs64 = ScanInputs(**{n: doubled(x) for n, x in vars(inputs).items()})  # type: ignore[arg-type]
    weights64 = HeadWeights(**{n: doubled(x) for n, x in vars(weights).items()})  # type: ignore[arg-type]
    exact, _ = mamba3_chunked(inputs64, weights64, docs, "interleaved", 64)
    got, _ = mamba3_chunked(inputs, weights, docs, "interleaved", 64)
    assert (got - exact).abs().max() < 1e-5 * exact.abs().max()


def test_backward_keeps_no_matrix_of_token_pairs() -> None:
    inputs, weights, _ = random_scan(64, rows=1, heads=2, state=4)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        mamba3_chunked(inputs, weights, Documents.rows(1, 64), "interleaved", 64)
    per_token_of_a_head = max(t.numel() for t in kept) / (64 * 2)
    assert per_token_of_a_head <= 4  # N = 4; a row of pairs would have 64


def test_autocast_reaches_nothing_inside() -> None:
    """A step, and forward and backward of chunks, keep every bit in an autocast region."""
    runs = []
    for enabled in (False, True):
        torch.manual_seed(0)
        inputs, weights, state = random_scan(TOKENS, rank=2, dtype=torch.float32)
        token, leaves = inputs.part(slice(None), slice(0, 1)), scan_leaves(inputs, weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, after = mamba3_step(token, weights, state, "half")
            chunks = mamba3_chunked(inputs, weights, packed(2, TOKENS), "half", 8)
            outputs, grads = results(*chunks, leaves)
        runs.append([y, *vars(after).values(), *outputs, *grads])
    for plain, autocast in zip(*runs, strict=True):
        assert torch.equal(plain, autocast)


@pytest.mark.parametrize("name", ["ADT", "DT", "Q_bias", "K_bias", "D"])
@pytest.mark.parametrize("form", ["chunked", "step"])
def test_nothing_of_the_contract_comes_in_below_fp32(name: str, form: str) -> None:
    inputs, weights, state = random_scan(1, dtype=torch.float32)
    if hasattr(inputs, name):
        inputs = replace(inputs, **{name: getattr(inputs, name).bfloat16()})
    else:
        weights = replace(weights, **{name: getattr(weights, name).bfloat16()})
    run = {
        "chunked": partial(mamba3_chunked, inputs, weights, Documents.rows(2, 1), "interleaved", 8),
        "step": partial(mamba3_step, inputs, weights, state, "interleaved"),
    }[form]
    with pytest.raises(AssertionError, match=f"{name} is torch.bfloat16"):
        run()
