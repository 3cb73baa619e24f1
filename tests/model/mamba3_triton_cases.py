"""The Mamba-3 scan's Triton kernels against `mamba3_chunked` in fp64: run by test_mamba3_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/mamba3_triton_cases.py   (without it on a GPU)
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.kernels.mamba3 import triton_launch
from megacpp.kernels.mamba3.chunks import mamba3_chunked, mamba3_scan
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, ScanInputs
from megacpp.model.documents import Documents
from tests.model.mamba3_cases import packed, random_scan, scan_leaves
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
    "short": packed(2, TOKENS),
}
NARROW = ("Q", "K", "V", "Z", "Trap", "Angles")


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that have a part of a state, and fewer heads than there are."""
    monkeypatch.setattr(triton_launch, "ELEMENTS", 16)
    monkeypatch.setattr(triton_launch, "HEADS", 3)


def as_given(part: Any, dtype: torch.dtype) -> Any:
    """Inputs, weights or a state in the dtypes that a model has, as leaves on the device."""

    def leaf(name: str, x: Tensor) -> Tensor:
        narrow = name in NARROW or (isinstance(part, Mamba3State) and name == "v")
        return x.detach().to(DEVICE, dtype if narrow else torch.float32).requires_grad_()

    found = {f.name: getattr(part, f.name) for f in fields(part)}
    made = {n: leaf(n, x) for n, x in found.items() if isinstance(x, Tensor)}
    return replace(part, **made)


def wide(part: Any) -> Any:
    found = {f.name: getattr(part, f.name) for f in fields(part)}
    made = {
        n: x.detach().double().cpu().requires_grad_()
        for n, x in found.items()
        if isinstance(x, Tensor)
    }
    return replace(part, **made)


def check(
    docs: Documents,
    inputs: ScanInputs,
    weights: HeadWeights,
    before: Mamba3State | None = None,
    dtype: torch.dtype = torch.float32,
    limit: float = 1e-5,
    pairing: Any = "interleaved",
    with_state: bool = False,
) -> None:
    """Output, state and every gradient are those in fp64, to `limit` of the largest."""
    parts: Any = [
        None if part is None else as_given(part, dtype) for part in (inputs, weights, before)
    ]
    doubles: Any = [None if part is None else wide(part) for part in parts]
    exact, last = mamba3_chunked(doubles[0], doubles[1], docs, pairing, CHUNK, doubles[2])
    there = docs.to(DEVICE)
    given = parts[0], parts[1], there, pairing, CHUNK, parts[2]
    out, state = mamba3_scan(*given, backend="triton", with_state=with_state)
    assert out.dtype == dtype and (state is not None) == with_state
    weight = torch.cos(torch.arange(exact.numel(), dtype=torch.float64)).view(exact.shape)
    weight = weight.to(dtype)
    want_loss, got_loss = (exact * weight).sum(), (out * weight.to(DEVICE)).sum()
    pairs = {"out": (out, exact)}
    if state is not None:
        pairs |= {n: (getattr(state, n), getattr(last, n)) for n in ("ssm", "k", "v")}
        want_loss, got_loss = want_loss + last.ssm.sum(), got_loss + state.ssm.sum()
    names = [n for p in parts if p for n, x in vars(p).items() if isinstance(x, Tensor)]
    want = torch.autograd.grad(want_loss, scan_leaves(*doubles))
    leaves = scan_leaves(*parts)
    got = torch.autograd.grad(got_loss, leaves)
    for name, leaf, g, w in zip(names, leaves, got, want, strict=True):
        assert g.dtype == leaf.dtype and g.shape == leaf.shape, name
        pairs[f"d{name}"] = g, w
    off = {
        n: ((a.double().cpu() - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
        for n, (a, b) in pairs.items()
    }
    bad = {n: x for n, x in off.items() if not x <= limit}
    assert not bad, f"{bad} of {off}"


def scan(**how: Any) -> tuple[ScanInputs, HeadWeights, Mamba3State]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"heads": 4, "state": 8, "head_dim": 3, "angles": 3}
    return random_scan(TOKENS, **(sizes | how))


@pytest.mark.parametrize("docs", DOCS.values(), ids=DOCS)
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_fp64_form(docs: Documents, groups: int) -> None:
    inputs, weights, _ = scan(groups=groups)
    check(docs, inputs, weights)


@pytest.mark.parametrize("docs", DOCS.values(), ids=DOCS)
def test_it_goes_on_from_a_state(docs: Documents) -> None:
    inputs, weights, before = scan(heads=2)
    check(docs, inputs, weights, before, with_state=True)


@pytest.mark.parametrize("docs", [DOCS["whole"], DOCS["short"]], ids=["whole", "short"])
def test_no_gate(docs: Documents) -> None:
    inputs, weights, _ = scan(heads=2, groups=2)
    check(docs, replace(inputs, Z=None), weights)


@pytest.mark.parametrize("gate", [True, False])
def test_a_norm_in_front_of_the_gate(gate: bool) -> None:
    inputs, weights, _ = scan(heads=2)
    norm = torch.randn(2, 3, dtype=torch.float64)
    inputs = inputs if gate else replace(inputs, Z=None)
    check(DOCS["packed"], inputs, replace(weights, norm=norm))


@pytest.mark.parametrize("angles", [1, 4])
def test_angles_of_all_heads(angles: int) -> None:
    inputs, weights, _ = scan(shared_angles=True, angles=angles)
    check(DOCS["packed"], inputs, weights)


def test_pairs_half_of_the_state_apart() -> None:
    inputs, weights, before = scan(heads=2)
    check(DOCS["packed"], inputs, weights, before, pairing="half")


def test_dims_that_blocks_have() -> None:
    inputs, weights, _ = scan(heads=1, state=32, head_dim=16, angles=8)
    check(DOCS["whole"], inputs, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers(dtype: torch.dtype) -> None:
    """Operands of products are rounded, results too."""
    inputs, weights, _ = scan(heads=2, state=32, head_dim=16, shared_angles=True, angles=8)
    check(DOCS["packed"], inputs, weights, dtype=dtype, limit=8 * torch.finfo(dtype).eps)


def test_a_row_of_one_token() -> None:
    torch.manual_seed(0)
    inputs, weights, before = random_scan(1, heads=2)
    check(Documents.rows(2, 1), inputs, weights, before)


def test_tensors_that_lie_apart() -> None:
    """Parts of a wider projection, heads behind tokens, and a gradient of every other token."""
    inputs, weights, _ = scan(heads=2)
    inputs, weights = as_given(inputs, torch.float32), as_given(weights, torch.float32)

    def apart(x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]

    def behind(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    lies = {n: apart(getattr(inputs, n)) for n in ("Q", "K", "V", "Z", "Angles")}
    lies |= {n: behind(getattr(inputs, n)) for n in ("ADT", "DT", "Trap")}
    found = []
    for given in (inputs, replace(inputs, **lies)):
        docs = DOCS["packed"].to(DEVICE)
        out, _ = mamba3_scan(given, weights, docs, "interleaved", CHUNK, backend="triton")
        dout = torch.stack([out.detach(), out.detach() + 1], 2)[:, :, 0]
        found.append([out, *torch.autograd.grad(out, scan_leaves(inputs, weights), dout)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_documents_see_nothing_of_each_other() -> None:
    """Numbers of a document are the same bits whatever is in front of it or behind it."""
    inputs, weights, _ = scan(heads=2)
    inputs, weights = as_given(inputs, torch.float32), as_given(weights, torch.float32)
    middle = slice(3, 33)  # of the first row
    found = []
    for seed in range(2):
        torch.manual_seed(seed)

        def others(x: Tensor, tokens: int) -> Tensor:
            keep = torch.zeros(x.shape[tokens], dtype=torch.bool, device=x.device)
            keep[middle] = True
            keep = keep.view(-1, *[1] * (x.ndim - 1 - tokens))
            other = x.detach() * (0.5 + torch.rand(x.shape).to(x))
            return torch.where(keep, x.detach(), other).requires_grad_()

        given = inputs.map_dims(lambda x, dims: others(x, dims.tokens))
        docs = DOCS["packed"].to(DEVICE)
        out, _ = mamba3_scan(given, weights, docs, "interleaved", CHUNK, backend="triton")
        grads = torch.autograd.grad(out[0, middle].sum(), scan_leaves(given))
        dims = [given.DIMS.get(f.name) for f in fields(given)]
        of_tokens = [d.tokens if d else 1 for d in dims]
        found.append([out[0, middle]])
        for x, tokens in zip(grads, of_tokens, strict=True):
            outside = x[0].transpose(0, tokens - 1)
            found[-1].append(outside[middle])
            assert not outside[:3].any() and not outside[33:].any()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_results_repeat() -> None:
    inputs, weights, _ = scan(heads=2)
    inputs, weights = as_given(inputs, torch.float32), as_given(weights, torch.float32)
    found = []
    for _ in range(2):
        docs = DOCS["packed"].to(DEVICE)
        out, _ = mamba3_scan(inputs, weights, docs, "interleaved", CHUNK, backend="triton")
        found.append([out, *torch.autograd.grad(out.sum(), scan_leaves(inputs, weights))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
