"""Cases of the Triton form of M2RNN, for Triton's interpreter (a child process) and for a GPU.

    TRITON_INTERPRET=1 python -m pytest tests/model/m2rnn_triton_cases.py

The interpreter does each operation of a kernel in numpy, hence few tokens. The reference is
`m2rnn_sequential` in fp64. In fp32 a number collects at most a few dozen roundings of 2^-24, along
the tokens of a document and over K or V terms of a sum: 1e-5 of the largest bounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.m2rnn import triton_launch
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.m2rnn.reference import m2rnn_sequential
from megacpp.kernels.m2rnn.triton_kernels import tanh
from megacpp.model.documents import Documents
from tests.golden import check_m2rnn
from tests.golden.conftest import golden_files
from tests.golden.harness import GoldenFile
from tests.model.triton_interpreter import mend

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP32 = 1e-5
# One rounding to 8 or 11 bits, on top, is at most half a unit in the last place of the result.
ROUNDED = {
    torch.float32: FP32,
    torch.bfloat16: FP32 + 2.0**-8,
    torch.float16: FP32 + 2.0**-11,
}
CLIPS = {"free": None, "total": StateClip(0.3, "total", 2.0), "carried": StateClip(0.05, "carried")}
# In chunks of 4 restarts inside, at first and last tokens, and one after another.
IDS_BT = torch.tensor([[0, 0, 0, 1, 2, 3, 3, 3, 4], [0, 1, 1, 1, 1, 1, 1, 1, 2]])
HEADS = [(1, 2, 4, 4, 4), (4, 1, 2, 1, 2)]
FEW = [(1, 1, 2, 2, 2), (2, 1, 1, 2, 1)]  # where every program takes its time
Leaves = list[Tensor]

gpu_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes its time")

if INTERPRETED:
    mend()


@triton.jit
def tanh_kernel(x_ptr, SIZE: tl.constexpr):
    place = x_ptr + tl.arange(0, SIZE)
    tl.store(place, tanh(tl.load(place)))


def test_tanh_to_four_units_in_the_last_place() -> None:
    """Over all magnitudes, where both formulas meet, and outside of their range."""
    x = torch.cat([torch.logspace(-30, 3, 4000), torch.linspace(0.5, 0.7, 4092)])
    x = torch.cat([x, torch.tensor([0.0, 0.6, torch.inf, torch.nan])])
    x = torch.cat([x[:-1], -x]).to(DEVICE)
    found = torch.cat([x, x.new_zeros(16384 - len(x))])
    tanh_kernel[(1,)](found, SIZE=16384)
    found, want = found[: len(x)].double(), x.double().tanh()
    assert torch.equal(found.isnan(), x.isnan())
    off = (found - want).abs() / want.abs().clamp(min=1e-38)
    assert off.nan_to_num().max() <= 4 * 2.0**-23


def leaves_of(
    heads: tuple[int, ...],
    docs: Documents | None,
    dims: tuple[int, int, int] = (9, 6, 3),
    dtype: torch.dtype = torch.float32,
) -> Leaves:
    """q, k, v, f, W and initial states, of two rows; q, k and v in `dtype`."""
    (T, K, V), (q, k, v, f, w) = dims, heads
    torch.manual_seed(1)
    states = 2 if docs is None else int(docs.starts_BT.sum())
    made = [
        torch.randn(2, T, q, K).to(dtype),
        torch.randn(2, T, k, K).to(dtype),
        torch.randn(2, T, v, V).to(dtype),
        torch.rand(2, T, f),
        torch.randn(w, V, V),
        torch.randn(states, max(heads), K, V),
    ]
    return [x.to(DEVICE).requires_grad_() for x in made]


def gradients(outputs: Leaves, leaves: Leaves) -> Leaves:
    """Of a fixed random functional of the outputs."""
    torch.manual_seed(2)
    weights = [torch.randn(y.shape).to(y.device, y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights))


def compare(got: Leaves, want: Leaves, relative: float | None = None) -> None:
    for a, b in zip(got, want, strict=True):
        limit = relative or ROUNDED[a.dtype]
        error = (a.double() - b).abs().max().item()
        assert error <= limit * b.abs().max().item(), f"{tuple(a.shape)} {error:.1e}"


def against_the_definition(
    leaves: Leaves, docs: Documents | None, clip: StateClip | None, **how: Any
) -> None:
    """Outputs, final states and every gradient; initial states if there is a sixth leaf."""
    initial = leaves[5] if len(leaves) == 6 else None
    got = m2rnn_chunked(*leaves[:5], docs, initial, clip, backend="triton", **how)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = m2rnn_sequential(*wide[:5], docs, wide[5] if initial is not None else None, clip)
    assert got[0].dtype == leaves[2].dtype and got[1] is not None
    found = gradients([got[0], got[1]], leaves)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    torch.manual_seed(2)
    weights = [torch.randn(y.shape).to(a.device, a.dtype) for y, a in zip(want, got, strict=True)]
    expected = torch.autograd.grad(want, wide, [w.double() for w in weights])
    compare([got[0], got[1], *found], [*want, *expected])


def documents(packed: bool) -> Documents | None:
    return Documents.from_ids(IDS_BT.to(DEVICE)) if packed else None


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_is_the_definition(packed: bool, clip: str) -> None:
    for heads, initial in zip(FEW if INTERPRETED else HEADS, (packed, not packed), strict=True):
        docs = documents(packed)
        leaves = leaves_of(heads, docs)[: 6 if initial else 5]
        against_the_definition(leaves, docs, CLIPS[clip], chunk_size=4)


@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_blocks_of_rows_and_several_launches_change_nothing(
    packed: bool, keep_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K of two programs, a launch for each chunk: documents go on over the cut."""
    monkeypatch.setattr(triton_launch, "SPAN_BYTES", 1)
    docs = documents(packed)
    leaves = leaves_of(FEW[1], docs, (9, 20, 3))
    against_the_definition(leaves, docs, CLIPS["total"], chunk_size=4, keep_states=keep_states)


def test_is_the_definition_in_bf16() -> None:
    docs = documents(True)
    leaves = leaves_of(FEW[1], docs, dtype=torch.bfloat16)
    against_the_definition(leaves, docs, CLIPS["total"], chunk_size=4)


def test_kept_states_give_the_same_numbers() -> None:
    docs, found = documents(True), []
    leaves = leaves_of(FEW[0], docs)
    for keep_states in (False, True):
        out = m2rnn_chunked(
            *leaves[:5],
            docs,
            leaves[5],
            CLIPS["total"],
            4,
            keep_states=keep_states,
            backend="triton",
        )
        assert out[1] is not None
        found.append([*out, *gradients([out[0], out[1]], leaves)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("clip", CLIPS)
def test_a_part_of_a_row_takes_a_state_and_hands_one_on(clip: str) -> None:
    """Two parts add up to rows whose documents go on over the cut."""
    docs = Documents.from_ids(IDS_BT.to(DEVICE))
    *leaves, _ = leaves_of(FEW[0], docs)
    shape = 2, 2, 6, 3
    h_BNKV, ys = leaves[0].new_zeros(shape), []
    for part in (slice(0, 6), slice(6, 9)):
        some = Documents(docs.ids_BT[:, part], docs.positions_BT[:, part])
        y, h_BNKV = m2rnn_chunked(
            *(x[:, part] for x in leaves[:4]),
            *(leaves[4], some, h_BNKV, CLIPS[clip], 4),
            by_row=True,
            backend="triton",
        )
        ys.append(y)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = m2rnn_sequential(*wide, docs, None, CLIPS[clip])
    last_B = docs.starts_BT.sum(1).cumsum(0) - 1
    got, want = [torch.cat(ys, 1), h_BNKV], [want[0], want[1][last_B]]
    torch.manual_seed(2)
    weights = [torch.randn(y.shape).to(DEVICE) for y in got]
    found = torch.autograd.grad(got, leaves, weights)
    expected = torch.autograd.grad(want, wide, [w.double() for w in weights])
    compare([*got, *found], [*want, *expected])


def test_only_final_states_are_used() -> None:
    leaves = leaves_of(FEW[0], None)
    _, final = m2rnn_chunked(*leaves[:5], None, leaves[5], None, 4, backend="triton")
    assert final is not None
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = m2rnn_sequential(*wide[:5], None, wide[5])[1]
    compare(gradients([final], leaves[1:]), gradients([want], wide[1:]))


def test_documents_are_isolated_exactly() -> None:
    """Of NaN, which a product with zero would let through."""
    docs, found = documents(True), []
    inside = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    inside[0, 5:8] = True
    for value in (1.0, float("nan")):
        q, k, v, f, w = leaves_of(FEW[0], docs)[:5]
        k = torch.where(inside[..., None, None], k * value, k)
        y, _ = m2rnn_chunked(q, k, v, f, w, docs, None, CLIPS["total"], 4, False, backend="triton")
        found.append([y, *torch.autograd.grad(y.sum(), [q, v, f])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a[~inside], b[~inside])
        assert not torch.equal(a[inside], b[inside])


def test_views_and_autocast_change_nothing() -> None:
    """q and k as a layer has them, parts of one tensor; an autocast narrows nothing."""
    q, k, v, f, w, initial = leaves_of(FEW[0], None, (5, 6, 3))
    want = m2rnn_chunked(q, k, v, f, w, None, initial, None, 4, backend="triton")
    qk = torch.cat([q, k], -1).detach().requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        parts = qk[..., :6], qk[..., 6:]
        got = m2rnn_chunked(*parts, v, f, w, None, initial, None, 4, backend="triton")
        dqk = torch.autograd.grad(got[0].sum(), qk)[0]
    assert all(map(torch.equal, got, want))
    assert torch.equal(dqk, torch.cat(torch.autograd.grad(want[0].sum(), (q, k)), -1))


def test_a_compiler_takes_it_as_it_is() -> None:
    """Its operators in a graph of their own shapes, forward and backward."""
    leaves = leaves_of(FEW[0], None, (5, 6, 3))

    def run(*given: Tensor) -> Tensor:
        return m2rnn_chunked(*given, None, CLIPS["total"], 4, False, backend="triton")[0]

    want, got = run(*leaves[:5], None), torch.compile(run, backend="aot_eager")(*leaves[:5], None)  # type: ignore[arg-type]
    assert torch.equal(got, want)
    assert all(map(torch.equal, gradients([got], leaves[:5]), gradients([want], leaves[:5])))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_path" in metafunc.fixturenames:
        files = [
            f for f in golden_files(metafunc.config) if f.match("m2rnn_*") and "_cp" not in f.stem
        ]
        metafunc.parametrize("golden_path", files, ids=[f.stem for f in files])


def test_golden(golden_path: Path) -> None:
    golden = GoldenFile(golden_path, torch.float32)
    if "x" in golden:
        if not INTERPRETED:
            pytest.skip("the layer's check runs on a CPU")
        kernels = dict.fromkeys(("m2rnn", "short_conv", "gates"), "triton")
        check_m2rnn.check_layer(golden, chunk_sizes=(5,), **kernels)
    else:
        check_m2rnn.check_clips(golden, on_device(partial(m2rnn_chunked, chunk_size=5)))
    golden.finish()


def on_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation by triton, with inputs and results of a check on the CPU."""

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        moved = []
        for x in given:
            if isinstance(x, Documents):
                x = Documents(x.ids_BT.to(DEVICE), x.positions_BT.to(DEVICE))
            moved.append(x.to(DEVICE) if isinstance(x, Tensor) else x)
        y, final = operation(*moved, backend="triton")
        return y.cpu(), final.cpu()

    return run


@gpu_only
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(9, 6, 3), (200, 64, 16), (130, 48, 24), (70, 256, 16)], ids=str)
def test_is_the_definition_in_every_dtype(
    dims: tuple[int, int, int], dtype: torch.dtype, clip: str
) -> None:
    """Also the paper's state, and the largest; documents of about 20 tokens. Twice: bit by bit."""
    torch.manual_seed(0)
    ids_BT = (torch.rand(2, dims[0]) < 0.05).cumsum(1).to(DEVICE)
    for docs, heads in ((None, HEADS[0]), (Documents.from_ids(ids_BT), HEADS[1])):
        q, k, v, f, w, initial = leaves_of(heads, docs, dims, dtype)
        w = (w.detach() * dims[2] ** -0.5).requires_grad_()
        leaves = [q, k, v, f, w, initial]
        against_the_definition(leaves, docs, CLIPS[clip], chunk_size=64)
        runs = []
        for _ in range(2):
            y, final = m2rnn_chunked(
                *leaves[:5], docs, initial, CLIPS[clip], chunk_size=64, backend="triton"
            )
            assert final is not None
            runs.append(gradients([y, final], leaves))
        assert all(map(torch.equal, *runs))
