"""Child process: mamba-ssm's MIMO kernels on a CPU, forward and backward.

    TRITON_INTERPRET=1 python -m tests.model.mamba3_mimo_interpreted FILE...

Prints one JSON object: for bf16 and for fp32 in its place, the largest errors, relative to the
largest reference value, of the output and every gradient of each golden file and of random scans.

The TileLang kernels are computed from their traced program (tests/model/tilelang_interpreter.py),
the small Triton kernels around them by Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.library import _imported, mamba3_library
from megacpp.model.documents import Documents
from tests.golden.check_mamba3 import run_scan
from tests.model.mamba3_cases import random_scan, scan_leaves
from tests.model.mamba3_interpreted import (
    Errors,
    doubled,
    memory_of,
    on_a_cpu,
    relative,
    stand_in,
)
from tests.model.tilelang_interpreter import Interpreted

CHUNK = 8
TOKENS = 24
DIM = 16
LAYER = Mamba3Config(d_state=16, headdim=16, ngroups=1, mimo_rank=2, chunk_size=CHUNK)
DTYPE = "bfloat16"  # that kernels are traced in
NARROW = ("Q", "K", "V", "Z", "Trap", "Angles")  # of the inputs, as a model makes them
PACKED = Documents.from_ids(torch.tensor([[0] * 17 + [1] * 2 + [2] * 5, [3] + [4] * 8 + [5] * 15]))


class OnCpu:
    """`torch` of a module that allocates on a GPU: here, and full of what nobody wrote."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs).fill_(math.nan)

    def empty_like(self, x: Tensor) -> Tensor:
        return torch.full_like(x, math.nan)


def tilelang_on_a_cpu() -> None:
    for name in ("fwd", "fwd_varlen", "bwd", "bwd_varlen"):
        module = _imported(f"mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_{name}")
        module.torch = OnCpu()
        for name, value in list(vars(module).items()):
            if hasattr(value, "get_tir"):
                setattr(module, name, traced(value))


def traced(kernel: Any) -> Callable[..., Interpreted]:
    """In place of compiling it; traced once, whatever the precision."""
    programs: dict[str, Any] = {}

    def make(*args: Any, **kwargs: Any) -> Interpreted:
        given = [DTYPE if a in ("bfloat16", "float32") else a for a in args]
        given_by_name = {n: DTYPE if n == "dtype" else a for n, a in kwargs.items()}
        key = repr((given, given_by_name))
        if key not in programs:
            programs[key] = kernel.get_tir(*given, **given_by_name)
        return Interpreted(programs[key], {DTYPE: torch.bfloat16})

    return make


def by_kernels(
    pairing: Pairing,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    """As a model calls them: projections in the narrow dtype, everything else in fp32."""
    narrowed = {
        n: x if x is None else x.to(torch.bfloat16) for n, x in vars(inputs).items() if n in NARROW
    }
    given = replace(inputs, **narrowed)
    out, state = mamba3_library(given, weights, docs, pairing, CHUNK, initial, with_state=True)
    assert state is not None
    return out.float(), state


def golden_errors(path: Path) -> dict[str, float]:
    golden = Errors(path)
    run_scan(golden, by_kernels, alone=False, states=False)
    return golden.errors


def random_errors(
    docs: Documents,
    tokens: int = TOKENS,
    gate: bool = True,
    continued: bool = False,
    **sizes: Any,
) -> dict[str, float]:
    """Output and every gradient against `mamba3_chunked` in fp64 on the same numbers."""
    torch.manual_seed(0)
    inputs, weights, before = random_scan(
        tokens, heads=2, state=16, head_dim=32, dtype=torch.float32, **sizes
    )
    rounded = {
        n: x.detach().to(torch.bfloat16).float() for n, x in vars(inputs).items() if n in NARROW
    }
    inputs = replace(inputs, **{n: x.requires_grad_() for n, x in rounded.items()})
    inputs = inputs if gate else replace(inputs, Z=None)
    parts = [inputs, replace(weights, norm=None), before if continued else None]
    doubles = [doubled(part) for part in parts]
    out, _ = by_kernels("half", inputs, parts[1], docs, parts[2])  # type: ignore[arg-type]
    exact, _ = mamba3_chunked(doubles[0], doubles[1], docs, "half", CHUNK, doubles[2])
    weight = torch.cos(torch.arange(exact.numel(), dtype=torch.float64)).view(exact.shape)
    weight = weight.to(torch.bfloat16).double()
    of: dict[str, Any] = {"allow_unused": True}  # mimo_z, without a gate
    want = torch.autograd.grad((exact * weight).sum(), scan_leaves(*doubles), **of)
    got = torch.autograd.grad((out * weight.float()).sum(), scan_leaves(*parts), **of)  # type: ignore
    tensors = [n for p in parts if p for n, x in vars(p).items() if isinstance(x, Tensor)]
    pairs = zip(tensors, got, want, strict=True)
    found = {n: relative(g, w) for n, g, w in pairs if w is not None}
    return {"out": relative(out, exact)} | found


ROWS = Documents.rows(2, TOKENS)
CASES: dict[str, dict[str, Any]] = {
    "rows": {"docs": ROWS, "rank": 2, "angles": 4},
    "rows, no gate, groups": {"docs": ROWS, "rank": 2, "angles": 8, "groups": 2, "gate": False},
    "packed": {"docs": PACKED, "rank": 2, "angles": 4},
    "packed, continued": {"docs": PACKED, "rank": 2, "angles": 8, "continued": True},
}


def main(files: list[str]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("TRITON_INTERPRET=1 python -m tests.model.mamba3_mimo_interpreted FILE...")
    torch.set_num_threads(1)
    on_a_cpu()
    tilelang_on_a_cpu()
    narrow, found = torch.bfloat16, {}
    for name, dtype in {"bf16": narrow, "fp32": torch.float32}.items():
        torch.bfloat16 = dtype
        errors = {Path(file).name: golden_errors(Path(file)) for file in files}
        errors |= {name: random_errors(**case) for name, case in CASES.items()}
        found[name] = errors
    normed = replace(LAYER, out_norm=True)
    layers = {"rows": (ROWS, LAYER), "packed": (PACKED, LAYER), "norm": (ROWS, normed)}
    memory = {"kernel": memory_of(layers)}
    with stand_in():
        memory["stand-in"] = memory_of(layers)
    print(json.dumps({"errors": found, "memory": memory}))


if __name__ == "__main__":
    main(sys.argv[1:])
