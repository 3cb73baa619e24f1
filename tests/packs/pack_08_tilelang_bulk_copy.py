"""TileLang: bulk copies of shared memory with three or more dimensions, lowered for sm_90.

Upstream: tile-ai/tilelang#746 (bulk copy became a path of copy that may fall back), then #761 and
#2005 for one dimension, #788, #2401. A check that a swizzled shared layout has two input
dimensions ended the compile of Mamba-3 MIMO backward kernels: their q and k are `[F, N]` buffers,
swizzled for the product and filled through a view `[C, R, N]`, next to a `[C, R, R]` buffer of
products. TileLang 0.1.8 still ends so, here and on `mamba_mimo_bwd_fwd` of mamba-ssm 2.3.2.post1
with TMA lowering on. Where such a copy compiles, it may be a bulk copy or a plain one; so the
copies that are left in the lowered source are counted, and a compile that fell back is no pass.
Nothing runs: no GPU.

    python pack_08_tilelang_bulk_copy.py
    exit 0: fix holds, 1: bug fires, 3: compiles without bulk loads, 77: skipped

Legend: B rows, C tokens of a chunk, R ranks, F = C * R, N width, L chunks.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
from typing import Any

import torch

SHOWN = ("torch", "triton", "tilelang", "apache-tvm-ffi", "z3-solver")
B, C, R, N, L = 2, 16, 4, 64, 4
# Since 0.1.9 a load is made a bulk copy on request alone (#2401); 0.1.8 knows no such request.
REQUEST = {"prefer_instruction": "tma"}


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


def three_dimensions(hint: dict[str, str] | None) -> Any:
    """A bf16 tile `[C, R, N]` loaded, doubled and stored."""
    import tilelang.language as T

    @T.prim_func
    def main(x: T.Tensor((L * C, R, N), "bfloat16"), y: T.Tensor((L * C, R, N), "bfloat16")):
        with T.Kernel(L, threads=128) as i:
            s = T.alloc_shared((C, R, N), "bfloat16")
            T.copy(x[i * C : (i + 1) * C, :, :], s, annotations=hint)
            for c, r, n in T.Parallel(C, R, N):
                s[c, r, n] = s[c, r, n] * 2
            T.copy(s, y[i * C : (i + 1) * C, :, :])

    return main


def four_dimensions(hint: dict[str, str] | None) -> Any:
    """The same with a tile `[B, C, R, N]`."""
    import tilelang.language as T

    @T.prim_func
    def main(x: T.Tensor((B, L * C, R, N), "bfloat16"), y: T.Tensor((B, L * C, R, N), "bfloat16")):
        with T.Kernel(L, threads=128) as i:
            s = T.alloc_shared((B, C, R, N), "bfloat16")
            T.copy(x[:, i * C : (i + 1) * C, :, :], s, annotations=hint)
            for b, c, r, n in T.Parallel(B, C, R, N):
                s[b, c, r, n] = s[b, c, r, n] * 2
            T.copy(s, y[:, i * C : (i + 1) * C, :, :])

    return main


def mimo(hint: dict[str, str] | None) -> Any:
    """Loads into swizzled views `[C, R, N]`, their product, and its `[C, R, R]` diagonal blocks.

    A row of a block has R * 2 = 8 bytes, and a bulk copy moves multiples of 16: two loads can be
    bulk copies here, that of the blocks can't.
    """
    import tilelang
    import tilelang.language as T

    F = C * R

    @T.prim_func
    def main(
        q: T.Tensor((B, L * C, R, N), "bfloat16"),
        k: T.Tensor((B, L * C, R, N), "bfloat16"),
        qk_dot: T.Tensor((B, L * C, R, R), "bfloat16"),
        out: T.Tensor((B, L * C, R, R), "bfloat16"),
    ):
        with T.Kernel(B, threads=128) as b:
            q_s = T.alloc_shared((F, N), "bfloat16")
            k_s = T.alloc_shared((F, N), "bfloat16")
            dot_s = T.alloc_shared((C, R, R), "bfloat16")
            full_s = T.alloc_shared((F, F), "bfloat16")
            full = T.alloc_fragment((F, F), "float32")
            swizzled = tilelang.layout.make_swizzled_layout
            T.annotate_layout({q_s: swizzled(q_s), k_s: swizzled(k_s)})
            q_view = T.view(q_s, shape=[C, R, N])
            k_view = T.view(k_s, shape=[C, R, N])
            for i in T.Pipelined(L, num_stages=0):
                T.copy(q[b, i * C : (i + 1) * C, :, :], q_view, annotations=hint)
                T.copy(k[b, i * C : (i + 1) * C, :, :], k_view, annotations=hint)
                T.copy(qk_dot[b, i * C : (i + 1) * C, :, :], dot_s)
                T.gemm(q_s, k_s, full, transpose_B=True, clear_accum=True)
                T.copy(full, full_s)
                for c, r, s in T.Parallel(C, R, R):
                    dot_s[c, r, s] += full_s[c * R + r, c * R + s]
                T.copy(dot_s, out[b, i * C : (i + 1) * C, :, :])

    return main


CASES = {
    "[C, R, N]": (three_dimensions, 1),
    "[B, C, R, N]": (four_dimensions, 1),
    "MIMO, views [C, R, N] and [C, R, R]": (mimo, 2),
}


def build(make: Any) -> tuple[Any, str]:
    """The function, with its bulk loads asked for where this version has a way to ask."""
    try:
        return make(REQUEST), "asked for"
    except TypeError:
        return make(None), "left to the compiler"


def lower(function: Any) -> str:
    """CUDA source for sm_90 with TMA lowering on."""
    import tilelang

    tvm = tilelang.tvm
    arch = {"kind": "cuda", "arch": "sm_90"}
    flags = {"tl.disable_tma_lower": False, "tl.disable_warp_specialized": False}
    with tvm.target.Target(arch), tvm.transform.PassContext(opt_level=3, config=flags):
        return tilelang.lower(function, target=arch).kernel_source


def calls(source: str, name: str) -> int:
    return len(re.findall(rf"\btl::{name}(?:<[^;]*?>)?\(", source))


def main() -> int:
    print(host())
    if version("tilelang") is None:
        print("SKIPPED: tilelang isn't installed")
        return 77
    failures, fell_back = [], []
    for name, (make, wanted) in CASES.items():
        function, how = build(make)
        try:
            source = lower(function)
        except Exception as error:  # a check inside TVM arrives as whatever its binding raises
            failures.append(f"{name}: {(str(error) or type(error).__name__).splitlines()[0][:120]}")
            print(f"fails: {failures[-1]}")
            continue
        loads, stores = calls(source, "tma_load"), calls(source, "tma_store")
        print(f"compiles: {name}: {loads} of {wanted} bulk loads ({how}), {stores} bulk stores")
        if loads < wanted:
            fell_back.append(f"{name} has {loads} of {wanted} bulk loads")
    if failures:
        print("PACK 08 BUG FIRES: " + "; ".join(failures))
        return 1
    if fell_back:
        print("PACK 08 FELL BACK: compiles, but " + "; ".join(fell_back))
        return 3
    print(f"PACK 08 FIX HOLDS: {len(CASES)} of {len(CASES)} compile with their bulk loads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
