"""The gated delta rule's Triton kernels against its fp64 definition: run by
test_gated_delta_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/gated_delta_triton_cases.py  (without it on a GPU)

Legend: as megacpp/kernels/gated_delta_rule/chunks.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.kernels.gated_delta_rule import triton_launch
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule, widened
from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential
from megacpp.kernels.gated_delta_rule.segments import fold, summarize
from megacpp.model.documents import Documents
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()
CHUNK, TOKENS = 16, 37  # the last chunk has 5 tokens
LENGTHS = ((1, 2, 30, 4), (16, 1, 20, 0))  # of length 1, over two chunks' ends, at a chunk's end
DOCS = {
    "whole": Documents.rows(2, TOKENS),
    "packed": Documents.from_ids(
        torch.stack([torch.arange(4).repeat_interleave(torch.tensor(n)) for n in LENGTHS])
    ),
}
NAMES = "q", "k", "v", "g", "beta", "initial"
GATES = "g", "beta", "initial"  # fp32 in a model


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that have a part of a state."""
    monkeypatch.setattr(triton_launch, "COLUMNS", 16)
    monkeypatch.setattr(triton_launch, "CARRIED", 16)


def leaves(
    tokens: int = TOKENS,
    heads: int = 1,
    shared: int = 2,
    key: int = 8,
    value: int = 5,
    rate: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """q, k, v, g, beta and a first state; some tokens keep all, write nothing or write twice."""
    torch.manual_seed(3)
    N = heads * shared
    g, beta = -rate * torch.rand(2, tokens, N), 2 * torch.rand(2, tokens, N)
    if tokens > 5:
        g[:, 3], beta[:, 4], beta[:, 5] = 0.0, 0.0, 2.0
    made = [
        torch.randn(2, tokens, heads, key),
        torch.randn(2, tokens, heads, key),
        torch.randn(2, tokens, N, value),
        g,
        beta,
        torch.randn(2, N, key, value),
    ]
    kinds = [torch.float32 if name in GATES else dtype for name in NAMES]
    return [x.to(DEVICE, kind).requires_grad_() for x, kind in zip(made, kinds, strict=True)]


def by_triton(
    inputs: Sequence[Any], docs: Documents, initial: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Output and state."""
    how = {"docs": docs.to(DEVICE), "initial_BNKV": initial, "chunk_size": chunk}
    return gated_delta_rule(*inputs, **how, backend="triton")  # type: ignore[arg-type]


def doubles(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach().double().cpu().requires_grad_() for x in inputs]


def off(got: Tensor, want: Tensor) -> float:
    """Largest difference, in parts of the largest number."""
    return ((got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def check(
    docs: Documents,
    inputs: Sequence[Tensor | None],
    limit: float = 1e-5,
    results: tuple[int, ...] = (0, 1),
    chunk: int = CHUNK,
) -> None:
    """Output, state and every gradient are those in fp64, to `limit` of the largest."""
    exact = doubles(inputs)
    q, k, v, g, beta, initial = exact
    assert k is not None and v is not None and g is not None and beta is not None
    value = widened(v, initial)
    want = gated_delta_sequential(k if q is None else q, k, value, g, beta, docs, initial)
    got = by_triton(inputs[:5], docs, inputs[5], chunk)
    assert got[0].dtype == v_dtype(inputs) and got[1].dtype == torch.float32
    found = {("out", "state")[i]: off(got[i], want[i]) for i in results}
    torch.manual_seed(4)
    cotangents = [torch.randn(want[i].shape, dtype=torch.double) for i in results]
    cotangents = [d.to(got[i].dtype).double() for d, i in zip(cotangents, results, strict=True)]
    given = [d.to(DEVICE, got[i].dtype) for d, i in zip(cotangents, results, strict=True)]
    names = [n for n, x in zip(NAMES, inputs, strict=True) if x is not None]
    of, exact_of = ([x for x in xs if x is not None] for xs in (inputs, exact))
    how = {"allow_unused": True, "materialize_grads": True}
    dwant = torch.autograd.grad([want[i] for i in results], exact_of, cotangents, **how)
    dgot = torch.autograd.grad([got[i] for i in results], of, given, **how)
    for name, x, a, b in zip(names, of, dgot, dwant, strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape, name
        found[f"d{name}"] = off(a, b)
    bad = {n: x for n, x in found.items() if not x <= limit}
    assert not bad, f"{bad} of {found}"


def v_dtype(inputs: Sequence[Tensor | None]) -> torch.dtype:
    assert inputs[2] is not None
    return inputs[2].dtype


@pytest.mark.parametrize("docs", DOCS.values(), ids=DOCS)
@pytest.mark.parametrize(("heads", "shared"), [(2, 1), (1, 3)])
def test_it_is_the_fp64_definition(docs: Documents, heads: int, shared: int) -> None:
    inputs = leaves(heads=heads, shared=shared)
    check(docs, [*inputs[:5], None])


@pytest.mark.parametrize("docs", DOCS.values(), ids=DOCS)
def test_it_goes_on_from_a_state(docs: Documents) -> None:
    check(docs, leaves())


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "state"])
def test_one_result_alone_is_used(used: int) -> None:
    check(DOCS["packed"], leaves(), results=(used,))


@pytest.mark.parametrize("docs", DOCS.values(), ids=DOCS)
def test_a_state_alone_that_is_wider_than_values(docs: Documents) -> None:
    """Check a run without queries, which the summary of a segment asks for."""
    inputs = leaves(shared=1)
    wider = torch.cat([inputs[5].detach(), torch.eye(8).expand(2, 1, 8, 8).to(DEVICE)], -1)
    check(docs, [None, *inputs[1:5], wider.requires_grad_()], results=(1,))


@pytest.mark.parametrize(("key", "value", "chunk"), [(32, 16, 32), (3, 40, 64), (20, 17, 7)])
def test_dims_and_chunks(key: int, value: int, chunk: int) -> None:
    """Whole blocks and parts of one; chunks of 16, 32 and, of one block, 32 tokens."""
    inputs = leaves(key=key, value=value)
    check(DOCS["packed"], inputs, chunk=chunk)


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_rows_of_few_tokens(tokens: int) -> None:
    check(Documents.rows(2, tokens), leaves(tokens=tokens))


@pytest.mark.parametrize("rate", [0.01, 40.0])
def test_every_decay(rate: float) -> None:
    """With 40 a chunk decays by 600 nats: exp of a sum over it overflows on its own."""
    check(DOCS["packed"], leaves(rate=rate), limit=3e-5)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_keys_that_repeat(beta: float) -> None:
    """Powers of the triangle would cancel: entries of its inverse are 0 where keys are one.

    With beta 2 a token multiplies the state by 1 - 2|k|^2: four roundings of |k|^2 move that by
    8 eps, and a gradient depends on the 64 tokens before it and the 64 after.
    """
    limit = 2e-5 if beta < 2 else 2 * 64 * 8 * torch.finfo(torch.float32).eps
    q, k, v, g, b, initial = (x.detach() for x in leaves(shared=1, tokens=64))
    k = k[:, :1].expand_as(k).contiguous()
    inputs = [q, k, v, torch.zeros_like(g), torch.full_like(b, beta), initial]
    inputs = [x.requires_grad_() for x in inputs]
    check(Documents.rows(2, 64), inputs, chunk=64, limit=limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [16, 64])
def test_narrow_numbers(dtype: torch.dtype, chunk: int) -> None:
    """Operands of products are rounded, results too; chunks of 64 tokens have four blocks."""
    inputs = leaves(tokens=70, key=32, value=16, dtype=dtype)
    ids = torch.arange(3).repeat_interleave(torch.tensor([20, 45, 5]))
    docs = Documents.from_ids(ids.expand(2, -1))
    check(docs, inputs, limit=8 * torch.finfo(dtype).eps, chunk=chunk)


def run(inputs: Sequence[Tensor], docs: Documents, dout: Tensor | None = None) -> list[Tensor]:
    """Output, state and every gradient of an output's functional."""
    out, state = by_triton(inputs[:5], docs, inputs[5])
    dout = torch.ones_like(out) if dout is None else dout
    return [out, state, *torch.autograd.grad(out, inputs, dout)]


def test_tensors_that_lie_apart() -> None:
    """Parts of a wider projection, heads in front of tokens, and a gradient likewise."""
    inputs = [x.detach() for x in leaves(heads=2)]

    def apart(x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]

    def behind(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v, g, beta, initial = inputs
    lies = [apart(q), apart(k), behind(v), behind(g), behind(beta), behind(initial)]
    dout = torch.cos(torch.arange(v.numel(), device=DEVICE)).view(v.shape)
    found = []
    for given, d in ((inputs, dout), (lies, apart(dout))):
        found.append(run([x.requires_grad_() for x in given], DOCS["packed"], d))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_documents_see_nothing_of_each_other() -> None:
    """Numbers of a document are the same bits whatever is in front of it or behind it."""
    middle, found = slice(3, 33), []  # of the first row
    for seed in range(2):
        torch.manual_seed(seed)
        given = [x.detach().clone() for x in leaves()]
        for x in given[:5]:
            for other in (slice(0, 3), slice(33, TOKENS)):
                x[0, other] *= 0.5 + torch.rand(x[0, other].shape, device=DEVICE)
        given = [x.requires_grad_() for x in given]
        out, _ = by_triton(given[:5], DOCS["packed"], given[5])
        grads = torch.autograd.grad(out[0, middle].sum(), given)
        assert not grads[5].any()
        found.append([out[0, middle], *(x[0, middle] for x in grads[:5])])
        for x in grads[:5]:
            assert not x[0, :3].any() and not x[0, 33:].any()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_folded_segments_are_the_row() -> None:
    """Every segment is scanned from the state that the summaries on its left fold into."""
    ids = torch.arange(2).repeat_interleave(torch.tensor([30, 18])).expand(2, -1)
    inputs, docs = leaves(tokens=48, key=5)[:5], Documents.from_ids(ids).to(DEVICE)
    want = by_triton(inputs, docs, None)
    spans = [torch.arange(s, s + 24, device=DEVICE) for s in (0, 24)]
    parts, of_parts = [[x[:, s] for x in inputs] for s in spans], [docs.take(s) for s in spans]
    each = zip(parts, of_parts, strict=True)
    summaries = [summarize(*x[1:], docs=d, chunk_size=CHUNK, backend="triton") for x, d in each]
    states = fold(summaries, torch.stack([~d.starts_BT.any(1) for d in of_parts]))
    outputs = []
    for part, d, state in zip(parts, of_parts, states[:-1], strict=True):
        continues = (d.positions_BT[:, 0] > 0)[:, None, None, None]
        entering = torch.where(continues, state.S_BNKV, 0.0)
        outputs.append(by_triton(part, d, entering)[0])
    got = torch.cat(outputs, 1), states[-1].S_BNKV
    torch.manual_seed(4)
    douts = [torch.randn_like(y) for y in want]
    gradients = [torch.autograd.grad(ys, inputs, douts) for ys in (got, want)]
    pairs = zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True)
    for a, b in pairs:
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_results_repeat() -> None:
    found = [run(leaves(), DOCS["packed"]) for _ in range(2)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
