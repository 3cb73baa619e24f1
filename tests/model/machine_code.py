"""Triton kernels compiled to machine code of GPUs that aren't here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def compiled(
    kernel: Any,
    kinds: Mapping[str, str],
    fixed: Mapping[str, Any],
    capability: int,
    options: Mapping[str, Any],
    other: str = "",
    aligned: bool = False,
) -> Any:
    """Return a kernel that Triton compiled; skip the test without Triton.

    Args:
        kernel: with `triton.jit`.
        kinds: type of each argument, by name.
        fixed: values of constants, by name; the kernel may lack some.
        capability: of the GPU, 90 for 9.0.
        options: as of a launch.
        other: type of arguments in neither.
        aligned: pointers, and strides of a row, token or head, are multiples of 16, as a launch
            finds out.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {name: fixed[name] for name in kernel.arg_names if name in fixed}
    of = {n: "constexpr" if n in fixed else kinds.get(n, other) for n in kernel.arg_names}
    target = GPUTarget("cuda", capability, 32)
    strides = "_row", "_token", "_head"
    known = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if aligned and (of[name].startswith("*") or name.endswith(strides))
    }
    source = ASTSource(kernel, of, fixed, known)
    return triton.compile(source, target=target, options=dict(options))


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return bytes of a thread outside of its registers, by `cuobjdump`, which Triton brings.

    Args:
        cubin: machine code of a kernel.
        folder: for a file.
    """
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((stack, local),) = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    return int(stack) + int(local)
