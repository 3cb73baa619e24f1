"""Golden data in bf16 by every backend of every operation: a table of cases.

    TRITON_INTERPRET=1 python -m tests.golden.narrow [ID...]      cases that the interpreter runs

What a model has in bf16 is rounded to bf16 before a case begins; gates, states, biases and routers
stay fp32. Results are compared with the stored fp64 values, which know of no rounding: 1e-2 of the
largest value for outputs, 3e-2 for gradients.

On a GPU the kernels themselves run. On a CPU Triton's run in its interpreter, which wants a process
of its own (tests/model/triton_interpreter.py); for torch's attention kernels and TileLang's there
are stand-ins in bf16, which show what our side of the call does. Sizes below a kernel's least get
zeros, which change no result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.blocks.attention.gqa import CoreAttention
from megacpp.kernels.gated_delta_rule import library as delta_library
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.mamba3 import library as mamba3_library
from megacpp.kernels.mamba3.chunks import mamba3_scan
from megacpp.kernels.selection import OPERATIONS
from tests.golden import (
    check_gated_delta,
    check_linear_ce,
    check_m2rnn,
    check_mamba3,
    check_mla,
    check_moe,
)
from tests.golden.harness import GoldenFile
from tests.model.attention_cases import flex_on_a_cpu, segments_on_a_cpu, varlen_on_a_cpu
from tests.model.attention_merged import MergedAttention
from tests.model.gated_delta_library import chunk_gated_delta_rule
from tests.model.mamba3_interpreted import CHUNK, in_wider_heads, on_a_cpu
from tests.model.mamba3_upstream import mamba3_mimo

DATA = Path(__file__).parent / "data"
FILES = {
    "attention": "mla_*",
    "mamba3": "mamba3_*",
    "m2rnn": "m2rnn_*",
    "gated_delta_rule": "gdn_[rs]*",
    "short_conv": "m2rnn_layer",
    "gates": "m2rnn_layer",
    "experts": "moe_layer",
    "cross_entropy": "linear_ce*",
}
ONLY = {
    ("mamba3", "mamba_ssm"): "siso",
    ("mamba3", "tilelang"): "mimo",
    ("mamba3", "triton"): "siso",
}
NEEDS = {"fla": "fla", "triton": "triton", "mamba_ssm": "mamba_ssm", "tilelang": "tilelang"}
# Inputs that a model has in bf16; a parameter is rounded where its module stores it.
NARROW = {"q", "k", "v", "d_y", "x", "weight", "u", "Q", "K", "V", "Z", "Trap", "Angles"}
OUTPUTS, GRADIENTS = 1e-2, 3e-2
# What enters the scan of a layer is rounded three times (activations, a weight, their product),
# what enters a scan alone once.
LAYER = 3


@dataclass(frozen=True)
class Case:
    """One file by one backend."""

    operation: str
    backend: str
    file: str

    @property
    def id(self) -> str:
        return f"{self.operation}-{self.backend}-{self.file}"

    @property
    def interpreted(self) -> bool:
        """On a CPU."""
        return self.backend in ("triton", "mamba_ssm")

    def missing(self, device: torch.device) -> str | None:
        """A package that it needs there and that isn't installed."""
        if device.type == "cpu" and not self.interpreted:
            return None
        package = NEEDS.get(self.backend)
        return package if package and find_spec(package) is None else None

    def run(self, device: torch.device) -> dict[str, float]:
        """How far each result is off, in parts of what it may be."""
        golden = NarrowFile(self, device)
        with torch.device(device), kernels(self.backend, device):
            CHECKS[self.operation](golden, self.backend)
        if "_cp" not in self.file:  # whose other tensors are about parts of rows
            golden.finish()
        return golden.off


class NarrowFile(GoldenFile):
    """Gives what a model has, writes down how far each result is off."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(DATA / f"{case.file}.safetensors", torch.bfloat16, device)
        mixer = case.operation not in ("attention", "experts", "cross_entropy")
        self.times = LAYER if mixer and "_layer" in case.file else 1
        # Grouped products of a GPU take rows of 16 bytes: the file's model dim is 12.
        self.dim = self._tensors["x"].shape[-1] if case.operation == "experts" else None
        self.off: dict[str, float] = {}

    def input(self, name: str, grad: bool = False) -> Tensor:
        self._touched.add(name)
        t = self._tensors[name].to(self.device, copy=True)
        if t.is_floating_point():
            t = t.to(torch.bfloat16 if name in NARROW else torch.float32)
        for axis, size in enumerate(t.shape):
            if size == self.dim:
                t = F.pad(t, (0, 0) * (t.ndim - 1 - axis) + (0, -size % 8))
        return t.requires_grad_() if grad else t

    def expect(self, name: str, got: Tensor | None, kind: str = "", rounding: float = 0.0) -> None:
        assert got is not None, f"{name}: nothing was computed"
        self._touched.add(name)
        self.compared.append(name)
        want = self._tensors[name]
        got = got.detach().cpu()[tuple(slice(n) for n in want.shape)]
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)}"
        if not want.is_floating_point():
            off = 0.0 if torch.equal(got.to(want.dtype), want) else float("inf")
        else:
            gradient = (kind or name).startswith("grad")
            error = (got.double() - want.double()).abs().max() / want.double().abs().max()
            off = (
                error.nan_to_num(nan=torch.inf).item()
                / self.times
                / (GRADIENTS if gradient else OUTPUTS)
            )
        self.off[name] = max(self.off.get(name, 0.0), off)


def attention(golden: GoldenFile, backend: str) -> None:
    check_mla.check_backend(golden, backend)


def mamba3(golden: GoldenFile, backend: str) -> None:
    if "u" in golden:
        check_mamba3.check_layer(golden, (backend,), CHUNK)
    else:
        check_mamba3.check_scan(golden, (partial(mamba3_by, backend),))


def mamba3_by(
    backend: str, pairing: Any, inputs: Any, weights: Any, docs: Any, *initial: Any
) -> Any:
    given = inputs, weights, docs, pairing, CHUNK, *initial
    return mamba3_scan(*given, backend=backend, with_state=True)


def m2rnn(golden: GoldenFile, backend: str) -> None:
    if "x" in golden:
        check_m2rnn.check_layer(golden, (5,), m2rnn=backend)
    else:
        check_m2rnn.check_clips(golden, partial(m2rnn_chunked, chunk_size=5, backend=backend))


def short_conv(golden: GoldenFile, backend: str) -> None:
    check_m2rnn.check_layer(golden, (5,), short_conv=backend)


def gates(golden: GoldenFile, backend: str) -> None:
    check_m2rnn.check_layer(golden, (5,), gates=backend)


def gated_delta(golden: GoldenFile, backend: str) -> None:
    check_gated_delta.check_rule(golden, partial(gated_delta_rule, chunk_size=16, backend=backend))


CHECKS: dict[str, Callable[[GoldenFile, str], None]] = {
    "attention": attention,
    "mamba3": mamba3,
    "m2rnn": m2rnn,
    "gated_delta_rule": gated_delta,
    "short_conv": short_conv,
    "gates": gates,
    "experts": check_moe.check_layer,
    "cross_entropy": check_linear_ce.check,
}


def cases() -> list[Case]:
    """All of the table: a backend that is new is in it."""
    return [
        Case(name, backend.name, path.stem)
        for name in FILES
        for backend in OPERATIONS[name].backends
        for path in sorted(DATA.glob(f"{FILES[name]}.safetensors"))
        if ONLY.get((name, backend.name), "") in path.stem
    ]


def kernels(backend: str, device: torch.device) -> AbstractContextManager[Any]:
    """The kernels of a backend on files with small heads; on a CPU what stands for them."""
    cpu = device.type == "cpu"
    if backend == "mamba_ssm":
        return siso_untuned()
    if backend == "tilelang":
        wider = in_wider_heads(mamba3_mimo if cpu else mamba3_library.mimo_kernel(), 64)
        return mock.patch.object(mamba3_library, "mimo_kernel", lambda: wider)
    if backend == "fla" and cpu:
        return mock.patch.object(delta_library, "kernel", lambda: chunk_gated_delta_rule)
    if backend == "flex":
        return attention_in_wider_heads(flex_on_a_cpu() if cpu else nullcontext())
    if backend in ("varlen", "varlen_padded"):
        return attention_in_wider_heads(varlen_on_a_cpu() if cpu else nullcontext())
    if backend == "merged":
        return merged_attention(segments_on_a_cpu() if cpu else nullcontext())
    return nullcontext()


@contextmanager
def siso_untuned() -> Iterator[None]:
    """The SISO kernels in their first configurations: each file would try 234 for minutes."""
    wider = in_wider_heads(mamba3_library.siso_kernel(), 16)
    with ExitStack() as stack:
        for tuner in mamba3_library.siso_tuners():  # none where they are interpreted
            stack.enter_context(mock.patch.object(tuner, "configs", tuner.configs[:1]))
        stack.enter_context(mock.patch.object(mamba3_library, "siso_kernel", lambda: wider))
        yield


@contextmanager
def merged_attention(instead: AbstractContextManager[Any]) -> Iterator[None]:
    """Rows in chunks, as ranks of a ring would merge them."""

    def attend(self: CoreAttention, *qkv_docs: Any) -> Tensor:
        return MergedAttention.apply(*qkv_docs, self.scale)  # type: ignore[return-value]

    with mock.patch.object(CoreAttention, "attend", attend), attention_in_wider_heads(instead):
        yield


@contextmanager
def attention_in_wider_heads(instead: AbstractContextManager[Any]) -> Iterator[None]:
    """Queries, keys and values with zeros up to 16 numbers a head, which flex takes at least."""
    attend = CoreAttention.attend

    def wider(self: CoreAttention, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        qkv = (F.pad(x, (0, 16 - x.shape[-1])) for x in (q, k, v))
        return attend(self, *qkv, *others)[..., : v.shape[-1]]

    with instead, mock.patch.object(CoreAttention, "attend", wider):
        yield


if __name__ == "__main__":
    from tests.model.triton_interpreter import mend  # tests without Triton import this file

    (mend if find_spec("mamba_ssm") is None else on_a_cpu)(tf32=True)
    there = [c for c in cases() if c.interpreted and not c.missing(torch.device("cpu"))]
    chosen = [case for case in there if case.id in sys.argv[1:] or not sys.argv[1:]]
    print(json.dumps({case.id: case.run(torch.device("cpu")) for case in chosen}))
