"""Allocations of a GPU step on a CPU's fake tensors: our Triton kernels without launches.

The Python around a kernel allocates its results and its scratch. Run as it is, but for the
launches, on tensors without values it allocates the same bytes as on a GPU. Besides, code that
asks `is_cuda` takes the GPU's branch, and groups of experts are padded as there.

Kernels of mamba-ssm and compiled FlexAttention have stand-ins (library_stand_ins.py). torch's flash
kernels for packed rows are operators whose results and scratch torch itself tells. Of what has
neither, torch's form is traced, and who traces says so (parallel/simulate/traced_kernels.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from megacpp.kernels.attention import flex as attention_flex
from megacpp.kernels.experts import grouped_mm
from megacpp.kernels.mamba3 import library
from megacpp.memory.block_trace import DOCUMENT
from megacpp.model.documents import Documents
from parallel.simulate.library_stand_ins import flex, mimo, siso

document_tokens = DOCUMENT


@contextmanager
def on_gpu() -> Iterator[None]:
    """Let tensors without values report a GPU as their device; kernels aren't launched."""
    changed: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, instead: Any) -> None:
        changed.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, instead)

    for kind in (FakeTensor, nn.Parameter, DTensor):
        put(kind, "is_cuda", property(lambda _: True))
    put(Tensor, "is_cuda", property(lambda t: t.is_meta))  # a plain one has values, or no memory
    put(grouped_mm, "CPU_ROWS", grouped_mm.GPU_ROWS)
    put(Documents, "_cu_seqlens", _boundaries)
    put(attention_flex, "fused", lambda: flex)
    put(library, "siso_kernel", lambda: siso)
    put(library, "mimo_kernel", lambda: mimo)
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.jit import KernelInterface

        put(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
        put(torch.library.CustomOpDef, "__call__", _inside)
    try:
        yield
    finally:
        for owner, name, before in reversed(changed):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _inside(operator: torch.library.CustomOpDef, *given: Any, **named: Any) -> Any:
    """Run a custom operator; of ours in Triton the inside, which allocates, but for in a graph."""
    inside = operator._init_fn
    seen = ".triton" in inside.__module__ and not torch.compiler.is_compiling()
    run = inside if seen else operator._opoverload
    return run(*given, **named)


def _boundaries(docs: Documents) -> Tensor:
    """In place of the boundaries of documents, whose number is a value."""
    rows, tokens = docs.ids_BT.shape
    return docs.ids_BT.new_zeros(rows * -(-tokens // document_tokens) + 1, dtype=torch.int32)
