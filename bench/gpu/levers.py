"""Measurements of a plan beside whole models: ceilings, tests, single changes, predictions.

Legend: B rows, T tokens, N tokens of all rows, D model, V vocabulary, H heads, K kv heads, P head
dim.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.calibrate import calibrate
from bench.gpu.clock import fresh, median_s
from bench.gpu.kernels import seconds
from bench.gpu.models import config_of
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import hybrid, ready
from bench.gpu.steps import GIB, Steps, in_use
from megacpp.kernels.chosen import host_of
from megacpp.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from megacpp.kernels.selection import OPERATIONS
from megacpp.model.precision import compute_dtype
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.ours import step_work
from megacpp.speed.step import predict
from optim.muon_adamw import MuonAdamW
from optim.newton_schulz import newton_schulz, newton_schulz_flops

ROOT = Path(__file__).parents[2]
NS_BYTES = 1 << 28  # of the matrices of a shape that are orthogonalised together
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def ceilings(record: GpuRecord) -> None:
    """Measure this machine into `machine.json` beside the record, for `predicted`."""

    def run() -> Iterator[Row]:
        found = calibrate(record.device, machine_of(record), record.tiny)
        figures: dict[str, Any] = found["figures"]
        yield {"mode": "memory", "tb_s": figures["hbm_gbs"] / 1e3}
        for m, n, k, layout, tflops in found["products"]:
            yield {"mode": f"{layout} {m} x {n} x {k}", "tflops": tflops}
        yield {"mode": "launch", "ms": figures["launch_us"] / 1e3}

    record.attempt("ceilings", "machine", "", run)


def machine_of(record: GpuRecord) -> Path:
    """File of the machine's ceilings."""
    assert record.path is not None
    return record.path.with_name("machine.json")


def tests(record: GpuRecord, file: str, arguments: Sequence[str]) -> None:
    """Run a file of tests, and count what passed; every failure has a row with its message.

    Args:
        record: record of the run.
        file: below the root of the repository.
        arguments: further arguments of pytest.
    """
    import pytest

    class Seen:
        def __init__(self) -> None:
            self.count: Counter[str] = Counter()
            self.failed: list[tuple[str, str]] = []

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or not report.passed:
                self.count[report.outcome] += 1
            if report.failed:
                words = " ".join(report.longreprtext.split())
                self.failed.append((report.nodeid.rsplit("::", 1)[-1], words[-300:]))

    def run() -> Iterator[Row]:
        seen, began = Seen(), time.monotonic()
        options = ["-q", "-p", "no:cacheprovider", *arguments]
        code = pytest.main([str(ROOT / file), *options], plugins=[seen])
        count = {name: seen.count[name] for name in ("passed", "failed", "skipped")}
        yield count | {"seconds": time.monotonic() - began}
        for name, words in seen.failed:
            record.skip("tests", f"{file}::{name}", "failed", words)
        assert code in (0, 1) and sum(count.values()), f"pytest ended with {code}"

    record.attempt("tests", file, "", run)


def tune_siso(record: GpuRecord) -> None:
    """Run the library's Mamba-3 on the rows of a run, first of all: what it tunes, others read."""
    config = ready(hybrid(13), record.tiny)
    backend = OPERATIONS["mamba3"].backend("mamba_ssm")
    if why := backend.unsupported_reason(config, host_of(config, record.device)):
        return record.skip("levers", "tune SISO", "", why)
    shape = (1, 32) if record.tiny else (2, 4096)

    def run() -> Iterator[Row]:
        began = time.monotonic()
        row = seconds("mamba3", backend.name, config, record, shape)
        yield row | {"seconds": time.monotonic() - began}

    record.attempt("levers", "tune SISO", "", run)
    return None


def loss_chunks(record: GpuRecord) -> None:
    """Time head and loss, forward and backward, by the rows of a chunk."""
    device, config = record.device, ready(hybrid(13), record.tiny)
    N, D, V = (256, 48, 256) if record.tiny else (32_768, 2048, 32_768)
    dtype, host = compute_dtype(config.precision, device), host_of(config, device)
    for backend in OPERATIONS["cross_entropy"].backends:
        why = backend.unsupported_reason(config, host) or (
            None if backend.by_itself else "a definition: it makes all logits"
        )
        for chunk in (16, 64) if record.tiny else (512, 4096):
            mode = f"{backend.name}, {chunk} rows"
            if why is not None:
                record.skip("levers", "loss", mode, why)
                continue

            def run(name: str = backend.name, chunk: int = chunk) -> Iterator[Row]:
                fresh(device)
                x_ND = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
                w_VD = torch.randn(V, D, device=device, requires_grad=True)
                target_N = torch.randint(V, (N,), device=device)

                def both() -> None:
                    x_ND.grad = w_VD.grad = None
                    linear_cross_entropy(
                        x_ND, w_VD, target_N, chunk=chunk, backend=name
                    ).loss_sum.backward()

                yield _rate(6 * N * D * V, median_s(both, device, 1, 5, most_s=10)) | {
                    "shape": f"{N} x {D} x {V}",
                    "peak_gib": in_use(device).get("allocated", 0) / GIB or None,
                }

            record.attempt("levers", "loss", mode, run)


def attention_kernels(record: GpuRecord) -> None:
    """Time torch's attention kernels on whole rows, forward alone and with the backward."""
    device = record.device
    B, T, H, K, P = (1, 64, 4, 2, 16) if record.tiny else (8, 4096, 16, 8, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def run(kernel: SDPBackend) -> Iterator[Row]:
        make = lambda heads: torch.randn(  # noqa: E731
            B, heads, T, P, device=device, dtype=dtype, requires_grad=True
        )
        q, k, v = make(H), make(K), make(K)

        def forward() -> Tensor:
            with sdpa_kernel(kernel):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        grad = torch.randn(B, H, T, P, device=device, dtype=dtype)
        flops = 4 * B * H * T * T * P // 2  # half of the pairs are masked
        both = median_s(lambda: forward().backward(grad), device, 2, 7, most_s=10)
        with torch.no_grad():
            alone = median_s(forward, device, 1, 7, most_s=10)
        shape = f"{B} x {T}, {H} and {K} heads of {P}"
        yield _rate(flops * 7 / 2, both) | {"forward_ms": 1e3 * alone, "shape": shape}

    for name, kernel in SDPA.items():
        record.attempt("levers", "attention", name, lambda k=kernel: run(k))


def muon(record: GpuRecord) -> None:
    """Time the update of the hybrid, and Newton-Schulz alone by the shape of a matrix."""
    device = record.device

    def run() -> Iterator[Row]:
        steps = Steps(config_of("hybrid_13", record), device, packed=False)
        steps.one_pass()
        yield _rate(steps.muon_flops(), median_s(steps.update, device, 1, 3, most_s=10))
        assert isinstance(steps.optimizer, MuonAdamW)
        shapes: Counter[tuple[int, int]] = Counter()
        for m in steps.optimizer.plan().matrices:
            cols = m.parameter.shape[-1]
            for rows in m.view.heights(m.parameter.shape):
                shapes[min(rows, cols), max(rows, cols)] += 1
        del steps
        fresh(device)
        for (short, long), number in sorted(shapes.items()):
            together = min(number, max(1, NS_BYTES // (2 * short * long)))
            g_Ksl = torch.randn(together, short, long, device=device)
            s = median_s(lambda g=g_Ksl: newton_schulz(g), device, 1, 3, most_s=5)
            row = _rate(newton_schulz_flops(short, long) * together, s)
            yield row | {"mode": f"{number} of {short} x {long}", "shape": f"{together} together"}

    record.attempt("levers", "muon", "update", run)


def r_rows(record: GpuRecord) -> None:
    """Time an R block by the rows of a microbatch: a recurrence has no other parallelism."""
    config = ready(hybrid(13), record.tiny)
    host = host_of(config, record.device)
    backend = next(
        b for b in OPERATIONS["m2rnn"].backends if b.unsupported_reason(config, host) is None
    )
    for rows in (2, 4, 8):
        shape = (rows, 16 if record.tiny else 4096)

        def run(shape: tuple[int, int] = shape) -> Iterator[Row]:
            found = seconds("m2rnn", backend.name, config, record, shape)
            yield found | {"ms": found["both_ms"]}

        record.attempt("levers", "R", f"{backend.name}, {rows} rows", run)
        fresh(record.device)


def predicted(record: GpuRecord) -> None:
    """Compare the time model on this machine's ceilings with steps that were measured before."""
    file = machine_of(record)
    if not file.exists():
        return record.skip("predicted", "machine", "", f"no {file.name}: ceilings come first")
    machine = gpu(str(file))
    rows = [r for r in record.rows if r["section"] == "models" and "fp8" not in r["mode"]]
    for name in dict.fromkeys(row["name"] for row in rows):

        def run(name: str = name) -> Iterator[Row]:
            config = config_of(name, record)
            time = predict(step_work(config, 1, machine.generation, 1), machine, Rates())
            for row in (r for r in rows if r["name"] == name):
                off = time.step_s / row["step_s"] - 1
                found = {"predicted_s": time.step_s, "step_s": row["step_s"], "step_off": off}
                yield {"mode": row["mode"]} | found

        record.attempt("predicted", name, "", run)
    return None


def _rate(flops: float, seconds: float) -> Row:
    return {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}
