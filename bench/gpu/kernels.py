"""Backends of every hot operation, in the block that does it, beside the reference.

What can run is what megacpp/kernels/selection.py doesn't refuse on this device. Errors are those of
megacpp/run/kernel_check.py, which a run on a GPU asks for before its first step. Seconds are of the
whole block (for `cross_entropy` of the head), forward and backward, in the compute dtype of a run;
definitions are timed on short rows.

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.clock import fresh, median_s
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import hybrid, ready
from bench.gpu.steps import DOCUMENTS
from megacpp.config.schema import Config
from megacpp.kernels.backend import PLAIN_KERNELS, set_kernels
from megacpp.kernels.chosen import host_of
from megacpp.kernels.operation import Backend
from megacpp.kernels.selection import OPERATIONS
from megacpp.model.precision import compute_dtype
from megacpp.run.kernel_check import agreement, case_of, packed_documents

SHORT, LONG = (1, 256), (2, 4096)  # rows and tokens
TINY = (1, 24), (1, 32)


def kernels(record: GpuRecord, wanted: list[str], only: str = "") -> None:
    """Measure all backends of all operations, or of those that are named.

    Args:
        record: record of the run.
        wanted: names of operations; empty: all.
        only: name of a backend; empty: all.
    """
    config = ready(hybrid(12), record.tiny)
    host = host_of(config, record.device)
    for name, operation in OPERATIONS.items():
        if wanted and name not in wanted:
            continue
        for backend in operation.backends:
            if only not in ("", backend.name):
                continue
            why = backend.unsupported_reason(config, host)
            if why is not None:
                record.skip("kernels", name, backend.name, why)
                continue
            record.attempt(
                "kernels",
                name,
                backend.name,
                lambda n=name, b=backend: _rows_of(n, b, config, record),
            )
            fresh(record.device)


def _rows_of(name: str, backend: Backend, config: Config, record: GpuRecord) -> Iterator[Row]:
    """Yield errors and seconds of one backend."""
    short, long = TINY if record.tiny else (SHORT, LONG)
    one = agreement(name, backend, config, record.device, short)
    off = {"output_error": one.output_error, "gradient_error": one.gradient_error}
    for shape in (short, long) if backend.by_itself else (short,):
        yield off | seconds(name, backend.name, config, record, shape)
        off = {}


def seconds(
    name: str, backend: str, config: Config, record: GpuRecord, shape: tuple[int, int]
) -> Row:
    """Return median milliseconds of a block's forward, and of its forward and backward.

    Args:
        name: operation.
        backend: name of the backend.
        config: configuration of the model.
        record: record of the run.
        shape: rows and tokens.
    """
    device, dtype = record.device, compute_dtype(config.precision, record.device)
    case = case_of(name, config.model, device, whole=True)
    set_kernels(case.module, replace(PLAIN_KERNELS, **{name: backend}))
    g = torch.Generator().manual_seed(0)
    x_BTD, grad_BTD = (torch.randn(*shape, case.dim, generator=g).to(device) for _ in range(2))
    x_BTD.requires_grad_()
    docs = packed_documents(*shape, DOCUMENTS).to(device)
    precision = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def forward() -> Tensor:
        with precision:
            return case.run(x_BTD, docs)

    def both() -> None:
        y = forward()
        y.backward(grad_BTD.to(y.dtype) if y.ndim else None)
        case.module.zero_grad()
        x_BTD.grad = None

    warm, repeats = (1, 2) if record.tiny else (2, 7)
    return {
        "shape": f"{shape[0]} x {shape[1]}",
        "dtype": str(dtype).removeprefix("torch."),
        "forward_ms": 1e3 * median_s(forward, device, warm, repeats, most_s=3),
        "both_ms": 1e3 * median_s(both, device, warm, repeats, most_s=6),
    }
