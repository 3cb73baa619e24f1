"""All Triton launches of a preset's step, compiled for an H200 with the arguments that they have.

A step runs without values, as an estimate's trace does; each launch compiles its kernel instead of
running it. Constants of launches, alignment and sizes are those of the run, not a test's copy. No
kernel spills registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.budget import as_run
from parallel.simulate.gpu_stand_ins import on_gpu
from tests.model.machine_code import stack_bytes

SHARED = 227 * 1024  # bytes that a block can have on compute capability 9.0
MOST_Y = 65_535  # blocks along the second and third axis of a grid
RECURRENT = {"_outputs_kernel", "_keys_kernel", "run_kernel", "_steps_kernel", "_sum_kernel"}
DENSE = {"_units_kernel", "_units_backward_kernel", "_rows_kernel"}
DELTA_RULE = {"_solve_kernel", "_dstates_kernel", "_queries_kernel"}
CASES = [
    ("nam56r_quarter", RECURRENT),
    ("nam56r_quarter --model.pattern GE --model.depth 2 --optim.qk-clip 0", DELTA_RULE),
    ("dense_110m --model.depth 4", DENSE),
]


class Pointer:
    """Tensor as a launch reads it: dtype and alignment."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.place = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self.place


@pytest.mark.parametrize(("flags", "some"), CASES)
def test_launches_compile(
    flags: str, some: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", target)
    launched: set[str] = set()
    seen: set[str] = set()

    def compiled(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        assert max(grid[1:], default=0) <= MOST_Y, (name, grid)
        numbers = [x for x in given if type(x) is int]
        assert max(numbers, default=0) < 2**31, (name, "computes places in 32 bits")
        pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in given]
        made = kernel.run(*pointers, grid=grid, warmup=True, **constants)
        assert made.asm["cubin"] and made.metadata.shared <= SHARED, name
        launched.add(name)
        if made.hash not in seen:
            seen.add(made.hash)
            assert stack_bytes(made.asm["cubin"], tmp_path) == 0, (name, "spills")

    @contextmanager
    def compiling() -> Iterator[None]:
        with on_gpu(), monkeypatch.context() as patched:
            instead = lambda kernel, grid: lambda *a, **c: compiled(kernel, grid, *a, **c)  # noqa: E731
            patched.setattr(KernelInterface, "__getitem__", instead)
            yield

    for module in ("parallel.simulate.fake", "megacpp.cli.trace"):
        monkeypatch.setattr(f"{module}.on_gpu", compiling)
    trace_step(as_run(parse_run(flags.split(), 1).config, "cuda", narrow=True), 1)
    assert some <= launched, some - launched
