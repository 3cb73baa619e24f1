"""Triton kernels compiled to machine code of GPUs that aren't here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def compiled(
    kernel: Any,
    kinds: Mapping[str, str],
    fixed: Mapping[str, Any],
    capability: int,
    options: Mapping[str, Any],
    other: str = "",
) -> Any:
    """Return a kernel that Triton compiled; skip the test without Triton.

    Args:
        kernel: with `triton.jit`.
        kinds: type of each argument, by name.
        fixed: values of constants, by name; the kernel may lack some.
        capability: of the GPU, 90 for 9.0.
        options: as of a launch.
        other: type of arguments in neither.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {name: fixed[name] for name in kernel.arg_names if name in fixed}
    of = {n: "constexpr" if n in fixed else kinds.get(n, other) for n in kernel.arg_names}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, of, fixed), target=target, options=dict(options))
