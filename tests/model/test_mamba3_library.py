"""Mamba-3 by mamba-ssm's kernels: what our side of the call does, with stand-ins for the kernels.

The real kernels run in tests/model/test_mamba3_interpreted.py and test_mamba3_mimo_interpreted.py,
and on a GPU below.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch import Tensor

from megacpp.cli import doctor
from megacpp.kernels import chosen as run_kernels
from megacpp.kernels.host import Host
from megacpp.kernels.mamba3 import library
from megacpp.kernels.mamba3.carried import final_state
from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.library import (
    PackedLayout,
    mamba3_library,
    mimo_kernel,
    mimo_scan,
    siso_kernel,
    siso_scan,
    siso_tuners,
)
from megacpp.kernels.mamba3.reference import mamba3_sequential
from megacpp.kernels.mamba3.segments import fold, summarize
from megacpp.model.documents import Documents
from tests.model import mamba3_upstream
from tests.model.mamba3_cases import VARIANTS, packed, random_layer, random_scan, scan_leaves

TOKENS, CHUNK = 21, 8
SHAPES = {
    "siso": {"rank": 1, "groups": 2, "state": 8, "angles": 4, "shared_angles": True},
    "siso_half": {"rank": 1, "state": 8, "angles": 2},
    "mimo": {"rank": 2, "groups": 4, "state": 8, "angles": 2},
    "mimo_groups": {"rank": 2, "groups": 2, "state": 8, "angles": 2},
    "mimo_all_rotate": {"rank": 3, "state": 8, "angles": 4, "shared_angles": True},
}
DOCS = {"whole": Documents.rows(2, TOKENS), "packed": packed(2, TOKENS)}
FP64 = 1e-12  # of max |reference|: rounding

installed = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is None, reason="mamba-ssm is not installed"
)


def pairing_of(shape: str) -> Pairing:
    return "interleaved" if shape.startswith("siso") else "half"


def scan_by(
    shape: str,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    initial: Mamba3State | None = None,
) -> Tensor:
    if shape.startswith("siso"):
        kernel = mamba3_upstream.mamba3_siso_combined
        return siso_scan(kernel, inputs, weights, docs, CHUNK, initial)
    return mimo_scan(mamba3_upstream.mamba3_mimo, inputs, weights, docs, CHUNK, initial)


def assert_same(got: list[Tensor], want: list[Tensor], leaves: list[Tensor]) -> None:
    """Tensors, and the gradients of their weighted sum."""
    grads = []
    for tensors in (got, want):
        loss = torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(tensors):
            weight = torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).view(x.shape)
            loss = loss + (x * weight).sum()
        grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for a, b in zip([*got, *grads[0]], [*want, *grads[1]], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a - b).abs().max() <= FP64 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("gate", ["gate", "norm", "no gate"])
@pytest.mark.parametrize("continued", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("docs", DOCS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_call_is_the_scan(shape: str, docs: str, continued: bool, gate: str) -> None:
    """Output and every gradient, of initial states too, are those of the chunked form."""
    torch.manual_seed(0)
    inputs, weights, before = random_scan(TOKENS, **SHAPES[shape])
    P = inputs.V.shape[-1]
    norm = torch.randn(4, P, dtype=torch.float64).requires_grad_() if gate == "norm" else None
    weights = replace(weights, norm=norm)
    inputs = replace(inputs, Z=None) if gate == "no gate" else inputs
    initial = before if continued else None
    leaves = scan_leaves(inputs, weights, initial)
    got = scan_by(shape, inputs, weights, DOCS[docs], initial)
    want, _ = mamba3_chunked(inputs, weights, DOCS[docs], pairing_of(shape), CHUNK, initial)
    assert_same([got], [want], leaves)


@pytest.mark.parametrize("continued", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("docs", DOCS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_state_that_a_caller_asks_for(shape: str, docs: str, continued: bool) -> None:
    torch.manual_seed(1)
    inputs, weights, before = random_scan(TOKENS, **SHAPES[shape])
    initial = before if continued else None
    got = final_state(inputs, weights, DOCS[docs], pairing_of(shape), initial)
    _, want = mamba3_sequential(inputs, weights, DOCS[docs], pairing_of(shape), initial)
    leaves = scan_leaves(inputs, weights, initial)
    assert_same([*vars(got).values()], [*vars(want).values()], leaves)


@pytest.mark.parametrize("shape", ["siso", "mimo"])
@pytest.mark.parametrize("docs", DOCS)
def test_a_row_cut_for_context_ranks(shape: str, docs: str) -> None:
    """Each part entered by the state that the parts before it leave: the whole row's numbers."""
    torch.manual_seed(2)
    pairing, parts = pairing_of(shape), 3
    inputs, weights, _ = random_scan(TOKENS, **SHAPES[shape])
    row, cuts = DOCS[docs], [slice(i * 7, (i + 1) * 7) for i in range(parts)]
    of_parts = [row.take(torch.arange(TOKENS)[cut]) for cut in cuts]
    cut_inputs = [inputs.part(slice(None), cut) for cut in cuts]
    summaries = [
        summarize(i, weights, d, pairing) for i, d in zip(cut_inputs, of_parts, strict=True)
    ]
    carries_LS = torch.stack([~d.starts_BT.any(1) for d in of_parts])
    states = fold(summaries, carries_LS, weights, pairing)
    outputs = []
    for part, docs_of, state in zip(cut_inputs, of_parts, states[:-1], strict=True):
        entering = state.kept(docs_of.positions_BT[:, 0] > 0)
        outputs.append(scan_by(shape, part, weights, docs_of, entering))
    want, _ = mamba3_chunked(inputs, weights, row, pairing, CHUNK)
    assert_same([torch.cat(outputs, 1)], [want], scan_leaves(inputs, weights))


def test_rows_are_laid_one_after_another_without_a_copy() -> None:
    inputs, _, _ = random_scan(TOKENS)
    layout = PackedLayout.for_documents(DOCS["packed"])
    assert layout is PackedLayout.for_documents(DOCS["packed"])
    assert layout.cu_seqlens is not None and layout.first_B is not None
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens[layout.first_B].tolist() == [0, TOKENS]
    by_token = inputs.ADT.detach().mT.contiguous().mT  # as the model makes it
    assert layout.heads(by_token).data_ptr() == by_token.data_ptr()
    assert layout.tokens(inputs.V).data_ptr() == inputs.V.data_ptr()
    assert torch.equal(layout.heads(by_token)[0, :, TOKENS:], by_token[1])


def test_rows_that_chunks_do_not_divide_are_packed() -> None:
    """The kernels for MIMO have no backward for the rest of a row."""
    assert PackedLayout.for_documents(DOCS["whole"], 7).cu_seqlens is None
    layout = PackedLayout.for_documents(DOCS["whole"], CHUNK)
    assert layout.cu_seqlens is not None and layout.first_B is not None
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.tolist() == [0, TOKENS, 2 * TOKENS]
    assert layout.first_B.tolist() == [0, 1]


def test_only_bf16_is_given_to_a_kernel() -> None:
    inputs, weights, _ = random_scan(TOKENS, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"V is torch\.float32"):
        mamba3_library(inputs, weights, DOCS["whole"], "interleaved", CHUNK)
    narrow = replace(inputs, Trap=inputs.Trap.bfloat16())
    with pytest.raises(AssertionError, match=r"Trap is torch\.bfloat16"):
        siso_scan(mamba3_upstream.mamba3_siso_combined, narrow, weights, DOCS["whole"], CHUNK)


@pytest.mark.parametrize("how", ["cast", "autocast"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_gives_the_kernels_the_dtypes_that_they_ask_for(variant: str, how: str) -> None:
    """bf16 next to the fp32 contract, and no copy of a parameter, whichever way bf16 comes in.

    Against the chunked form on the same inputs: what two bf16 sums of the same numbers differ by,
    8 units of the last place (2^-8) of the largest output.
    """
    layer = random_layer(variant, CHUNK, torch.float32)
    x_BTD = torch.randn(2, TOKENS, 12, generator=torch.Generator().manual_seed(0))
    if how == "cast":
        layer, x_BTD = layer.to(torch.bfloat16), x_BTD.bfloat16()
    seen: list[HeadWeights] = []

    def scan(inputs: ScanInputs, weights: HeadWeights, docs: Documents) -> Tensor:
        seen.append(weights)
        assert inputs.V.dtype == torch.bfloat16
        assert inputs.ADT.dtype == inputs.DT.dtype == torch.float32
        return scan_by("mimo" if layer.mamba.mimo_rank > 1 else "siso", inputs, weights, docs)

    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        want_BTD = layer(x_BTD, DOCS["packed"])
        layer.scan.forward = scan
        got_BTD = layer(x_BTD, DOCS["packed"])
    assert seen[0].Q_bias is layer.C_bias and seen[0].D is layer.D
    limit = 8 * 2.0**-8 * want_BTD.abs().max()
    assert (got_BTD - want_BTD).abs().max() <= limit


@installed
@pytest.mark.parametrize("kind", ["siso", "mimo"])
def test_stand_ins_have_the_signatures_of_the_installed_package(
    kind: Literal["siso", "mimo"],
) -> None:
    if kind == "mimo" and importlib.util.find_spec("tilelang") is None:
        pytest.skip("tilelang is not installed")
    stand_in, real = {
        "siso": (mamba3_upstream.mamba3_siso_combined, siso_kernel),
        "mimo": (mamba3_upstream.mamba3_mimo, mimo_kernel),
    }[kind]

    def known(function: object) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]

    assert known(real()) == known(stand_in)


@installed
def test_the_package_needs_its_cuda_extension_where_its_kernels_do_not() -> None:
    """Why `_imported` goes past the package: remove it when this fails without the extension."""
    if importlib.util.find_spec("selective_scan_cuda") is not None:
        pytest.skip("mamba-ssm has its CUDA extension here")
    whole = subprocess.run(
        [sys.executable, "-c", "import mamba_ssm"], capture_output=True, text=True
    )
    assert "selective_scan_cuda" in whole.stderr
    siso_kernel()
    assert "mamba_ssm" not in sys.modules


@installed
def test_tuners_read_what_an_earlier_run_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them writes its measurements, some without a number, and doesn't measure again."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tuners = siso_tuners()
    assert len(tuners) == 7 and all(tuner.cache_results for tuner in tuners)
    assert "TRITON_CACHE_AUTOTUNING" not in os.environ and not triton.knobs.autotuning.cache
    for tuner in tuners:
        key, best, measured = (64, 128, False, "torch.bfloat16"), tuner.configs[-1], []

        def measure(tuner=tuner, key=key, best=best, measured=measured) -> None:
            measured.append(key)
            tuner.configs_timings = {c: [float("inf")] * 3 for c in tuner.configs}
            tuner.configs_timings[best] = [1.0, 0.9, 1.1]
            tuner.cache[key] = best

        for run in range(2):
            assert tuner.check_disk_cache(key, tuner.configs, measure) == bool(run)
            assert tuner.cache.pop(key) == best and len(measured) == 1


@installed
def test_the_doctor_says_what_the_first_call_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.7.1", "mamba-ssm": "2.3.2.post1", "einops": "0.8.2"}
    host = Host("cuda", "bf16", (9, 0), "a GPU", versions)
    monkeypatch.setattr(run_kernels, "host_of", lambda *given: host)
    found = {f.name: f for f in doctor._kernels()}["kernels.mamba3"]
    tries = sum(len(tuner.configs) for tuner in siso_tuners())
    assert found.ok and f"the first call tries {tries} configurations" in found.detail
    monkeypatch.setattr(library, "siso_kernel", lambda: importlib.import_module("no_such"))
    found = {f.name: f for f in doctor._kernels()}["kernels.mamba3"]
    assert not found.ok and "can't be imported" in found.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@installed
@pytest.mark.parametrize(
    ("docs", "continued"),
    [("whole", False), ("packed", True)],
    ids=["whole rows", "packed rows continued"],
)
@pytest.mark.parametrize("kind", ["siso", "mimo"])
def test_kernels_on_a_gpu(kind: str, docs: str, continued: bool) -> None:
    """Against the chunked form in fp64 on the same bf16 numbers.

    Upstream tries out 234 configurations of its SISO kernels at the first call of each of the two
    cases (9 to 81 a kernel): minutes, once per machine.

    bf16 rounds operands by 2^-9, of sums of many terms by as much in the mean; SISO rounds angles
    too, by up to 2^-6 rad, which turns q and k by as much: 4 % of the largest output covers both,
    and a wrong layout is off by its whole size. Gradients of angles are sums over a document's
    remaining tokens of such numbers: 10 %.
    """
    torch.manual_seed(0)
    tokens, rank = 192, 1 if kind == "siso" else 4
    inputs, weights, before = random_scan(
        tokens, rank=rank, heads=4, state=64, head_dim=64, angles=16, dtype=torch.float32
    )
    weights = replace(weights, norm=None)
    documents = packed(2, tokens) if docs == "packed" else Documents.rows(2, tokens)
    narrow = ("Q", "K", "V", "Z", "Trap", "Angles")
    rounded = {
        n: (x.detach().bfloat16() if n in narrow else x.detach()).cuda().requires_grad_()
        for n, x in vars(inputs).items()
    }
    on_gpu = ScanInputs(**rounded)
    of_heads = HeadWeights(
        **{
            n: x.detach().cuda().requires_grad_() if isinstance(x, Tensor) else x
            for n, x in vars(weights).items()
        }
    )
    state = Mamba3State(**{n: x.detach().cuda().requires_grad_() for n, x in vars(before).items()})
    pairing: Pairing = "interleaved" if kind == "siso" else "half"
    chunk = 64 if kind == "siso" else 16
    initial = state if continued else None
    there = documents.to("cuda")
    out, _ = mamba3_library(on_gpu, of_heads, there, pairing, chunk, initial)
    doubles = [doubled(part) for part in (on_gpu, of_heads, initial)]
    exact, _ = mamba3_chunked(doubles[0], doubles[1], there, pairing, chunk, doubles[2])
    weight = torch.randn_like(exact)
    got = torch.autograd.grad((out.double() * weight).sum(), scan_leaves(on_gpu, of_heads, initial))
    want = torch.autograd.grad((exact * weight).sum(), scan_leaves(*doubles))
    names = [
        "out",
        *(
            n
            for part in (on_gpu, of_heads, initial)
            if part
            for n, x in vars(part).items()
            if isinstance(x, Tensor)
        ),
    ]
    for name, a, b in zip(names, [out, *got], [exact, *want], strict=True):
        limit = 0.1 if name in ("Angles", "DT", "angle") else 0.04
        assert (a.double() - b).abs().max() <= limit * b.abs().max(), name


def doubled(part: object) -> object:
    if part is None:
        return None
    wide = {
        n: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x
        for n, x in vars(part).items()
    }
    return type(part)(**wide)
