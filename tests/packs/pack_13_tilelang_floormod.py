"""TileLang: `csr % R` in T.Parallel divides by zero in LayoutInference, on the host.

Upstream: tile-ai/tilelang#2394, fixed for this crash by tile-ai/tilelang#2469. A fragment with a
row for each of R ranks is read at row `csr % R` while `csr` runs over all C * R rows of a chunk,
as a Mamba-3 MIMO kernel does whose shared buffers are flattened to two dimensions. Where the width
of a row is no power of two, LayoutInference covers more of the loop than there is, makes a
leftover of extent 0 and divides by it. The kernel is lowered for sm_90 and never run: no GPU.

The crash was met in a whole backward kernel with N = 64, and there with TMA lowering on alone.
This loop by itself compiles at N = 64; at N = 48 it fires the same check, TMA lowering on or off.

    python pack_13_tilelang_floormod.py     exit 0: fix holds, 1: bug fires, 77: skipped

Legend: C tokens of a chunk, R ranks, F = C * R rows, N width.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from typing import Any

import torch

SHOWN = ("torch", "triton", "tilelang", "apache-tvm-ffi", "z3-solver")
C, R, THREADS = 16, 4, 128
FORMS = {
    "remainder": "bias[csr % R]",
    "rewritten": "bias[csr - csr // R * R]",  # the simplifier makes the remainder of it again
    "quotient": "scale[csr // R]",
    "three loops": "bias[r] in a loop over (cs, r, n)",
}
CASES = [("remainder", 64, True), ("remainder", 48, False), *((form, 48, True) for form in FORMS)]


def host() -> str:
    """GPU capability and versions: what decides the outcome."""
    gpu = torch.cuda.is_available()
    found = "capability {}.{}".format(*torch.cuda.get_device_capability()) if gpu else "no GPU"
    versions = [f"{name} {v}" for name in SHOWN if (v := version(name))]
    return "host: " + ", ".join([found, *versions])


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def kernel(form: str, N: int) -> Any:
    """Adds to (or multiplies) each row of q what belongs to its rank (or its token)."""
    import tilelang.language as T

    F = C * R

    @T.prim_func
    def main(
        q_FN: T.Tensor((F, N), "bfloat16"),
        bias_RN: T.Tensor((R, N), "float32"),
        scale_C: T.Tensor((C,), "float32"),
        out_FN: T.Tensor((F, N), "bfloat16"),
    ):
        with T.Kernel(1, threads=THREADS):
            shared = T.alloc_shared((F, N), "bfloat16")
            scale = T.alloc_shared((C,), "float32")
            q = T.alloc_fragment((F, N), "bfloat16")
            bias = T.alloc_fragment((R, N), "float32")
            T.copy(q_FN, shared)
            T.copy(shared, q)
            if form == "quotient":
                T.copy(scale_C, scale)
                for csr, n in T.Parallel(F, N):
                    q[csr, n] *= scale[csr // R]
            else:
                T.copy(bias_RN, bias)
            if form == "remainder":
                for csr, n in T.Parallel(F, N):
                    q[csr, n] += bias[csr % R, n]
            elif form == "rewritten":
                for csr, n in T.Parallel(F, N):
                    q[csr, n] += bias[csr - csr // R * R, n]
            elif form == "three loops":
                for cs, r, n in T.Parallel(C, R, N):
                    q[cs * R + r, n] += bias[r, n]
            T.copy(q, shared)
            T.copy(shared, out_FN)

    return main


def lower(function: Any, tma: bool) -> str:
    """CUDA source for sm_90; with TMA lowering and warp specialisation, or with neither."""
    import tilelang

    tvm = tilelang.tvm
    arch = {"kind": "cuda", "arch": "sm_90"}
    flags = {"tl.disable_tma_lower": not tma, "tl.disable_warp_specialized": not tma}
    with tvm.target.Target(arch), tvm.transform.PassContext(opt_level=3, config=flags):
        return tilelang.lower(function, target=arch).kernel_source


def outcome(form: str, N: int, tma: bool) -> str:
    """ "compiles", "divides by zero" or the check that failed."""
    function = kernel(form, N)
    try:
        lower(function, tma)
    except Exception as error:  # a check inside TVM arrives as whatever its binding raises
        text = str(error)
        if "Divide by zero" in text:
            return "divides by zero"
        return f"fails: {text.splitlines()[0][:120] if text else type(error).__name__}"
    return "compiles"


def main() -> int:
    print(host())
    if version("tilelang") is None:
        print("SKIPPED: tilelang isn't installed")
        return 77
    failures: list[str] = []
    for form, N, tma in CASES:
        got = outcome(form, N, tma)
        print(f"N={N} R={R}, TMA lowering {'on' if tma else 'off'}: {FORMS[form]}: {got}")
        if got != "compiles" and tma:
            failures.append(f"{FORMS[form]} at N={N} {got}")
    if failures:
        print("PACK 13 BUG FIRES: " + "; ".join(failures))
        return 1
    print("PACK 13 FIX HOLDS: every form compiles with TMA lowering on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
