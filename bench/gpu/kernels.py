"""Backends of every hot operation, in the block that does it, beside the reference.

What can run is what megacpp/kernels/selection.py doesn't refuse on this device. Errors are those of
megacpp/run/kernel_check.py, which a run on a GPU asks for before its first step. Seconds are of the
whole block (for `cross_entropy` of the head), forward and backward, in the compute dtype of a run;
definitions are timed on short rows.

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bench.gpu.clock import fresh, median_s
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import hybrid, ready
from bench.gpu.steps import packed_documents
from megacpp.config.schema import Config
from megacpp.kernels.backend import PLAIN_KERNELS, set_kernels
from megacpp.kernels.chosen import host_of
from megacpp.kernels.selection import OPERATIONS, Backend
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead
from megacpp.model.init import initialise
from megacpp.model.norm import RMSNorm
from megacpp.model.precision import compute_dtype
from megacpp.run.kernel_check import agreement

LETTERS = {"attention": "A", "mamba3": "M", "m2rnn": "R", "gated_delta_rule": "G", "experts": "E"}
SHORT, LONG = (1, 256), (2, 4096)  # rows and tokens
TINY = (1, 24), (1, 32)


@dataclass(frozen=True)
class Bench:
    """Module that performs one operation, and the function that runs it."""

    module: nn.Module
    run: Callable[[Tensor, Documents], Tensor]


def kernels(record: GpuRecord, wanted: list[str]) -> None:
    """Measure all backends of all operations."""
    config = ready(hybrid(12), record.tiny)
    host = host_of(config, record.device)
    for name, operation in OPERATIONS.items():
        if wanted and name not in wanted:
            continue
        if name not in (*LETTERS, "cross_entropy", "rms_norm"):
            record.skip("kernels", name, "", "no block is known that does it")
            continue
        for backend in operation.backends:
            why = backend.unsupported_reason(config, host)
            if why is not None:
                record.skip("kernels", name, backend.name, why)
                continue
            record.attempt(
                "kernels",
                name,
                backend.name,
                lambda n=name, b=backend: rows_of(n, b, config, record),
            )
            fresh(record.device)


def rows_of(name: str, backend: Backend, config: Config, record: GpuRecord) -> Iterator[Row]:
    """Yield errors and seconds of one backend.

    Args:
        name: operation.
        backend: backend to measure.
        config: configuration of the model.
        record: record of the run.
    """
    device = record.device
    short, long = TINY if record.tiny else (SHORT, LONG)
    dtype = compute_dtype(config.precision, device)
    bench = bench_of(name, config, device)
    one = agreement(name, backend, config, device, short)
    off = {"output_error": one.output_error, "gradient_error": one.gradient_error}
    for shape in (short, long) if backend.by_itself else (short,):
        yield off | seconds(bench, name, backend.name, shape, dtype, device, record.tiny)
        off = {}


def bench_of(name: str, config: Config, device: torch.device) -> Bench:
    """Return the block (or head) of an operation with the weights of a fresh run."""
    model = config.model
    if name == "cross_entropy":
        with torch.device("meta"):
            head = LanguageModelHead(model)
        head.to_empty(device=device)
        initialise(head, head.init_rules(), seed=0)

        def loss(x_BTD: Tensor, docs: Documents) -> Tensor:
            labels_BT = (docs.positions_BT * 31 + docs.ids_BT) % model.vocab_size
            return head(x_BTD, labels_BT).loss_sum / labels_BT.numel()

        return Bench(head, loss)
    if name == "rms_norm":
        norm = RMSNorm(model.dim, model.norm_eps).to(device)
        initialise(norm, norm.init_rules(), seed=0)
        return Bench(norm, lambda x_BTD, docs: norm(x_BTD))
    with torch.device("meta"):
        block = Block(LETTERS[name], model)
    block.to_empty(device=device)
    initialise(block, block.init_rules(), seed=0)
    return Bench(block, lambda x_BTD, docs: block(x_BTD, docs))


def given(
    bench: Bench, shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, Documents, Tensor]:
    """Return input, documents, and the gradient of a block's output."""
    dim = max(bench.module.parameters(), key=lambda p: p.ndim >= 2).shape[-1]
    if isinstance(bench.module, Block):
        dim = bench.module.norm.weight.shape[-1]
    g = torch.Generator().manual_seed(0)
    x_BTD, grad_BTD = (torch.randn(*shape, dim, generator=g).to(device) for _ in range(2))
    return x_BTD.requires_grad_(), packed_documents(*shape).to(device), grad_BTD


def seconds(
    bench: Bench,
    name: str,
    backend: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    is_tiny: bool,
) -> Row:
    """Return median milliseconds of a forward, and of forward and backward.

    Args:
        bench: module to run.
        name: operation.
        backend: name of the backend.
        shape: rows and tokens.
        dtype: compute dtype.
        device: device of the module.
        is_tiny: few repeats, for tests.
    """
    choose(bench, name, backend)
    x_BTD, docs, grad_BTD = given(bench, shape, device)
    precision = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def forward() -> Tensor:
        with precision:
            return bench.run(x_BTD, docs)

    def both() -> None:
        y = forward()
        y.backward(grad_BTD.to(y.dtype) if y.ndim else None)
        bench.module.zero_grad()
        x_BTD.grad = None

    warm, repeats = (1, 2) if is_tiny else (2, 7)
    return {
        "shape": f"{shape[0]} x {shape[1]}",
        "dtype": str(dtype).removeprefix("torch."),
        "forward_ms": 1e3 * median_s(forward, device, warm, repeats, most_s=3),
        "both_ms": 1e3 * median_s(both, device, warm, repeats, most_s=6),
    }


def choose(bench: Bench, name: str, backend: str) -> None:
    """Select a backend in a module."""
    set_kernels(bench.module, replace(PLAIN_KERNELS, **{name: backend}))
