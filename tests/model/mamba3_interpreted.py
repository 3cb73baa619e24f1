"""Child process: mamba-ssm's SISO kernels under Triton's interpreter, forward and backward.

    TRITON_INTERPRET=1 python -m tests.model.mamba3_interpreted FILE...

Prints one JSON object: the largest errors, relative to the largest reference value, of outputs,
states and gradients of each golden file and of random scans, and what a layer keeps for backward.

What a CPU lacks is put in its place here: PTX approximations by the functions that they stand for,
tensors that say they are on a GPU, the autotuner by its first configuration, and, but for what a
layer keeps, bf16 by fp32: errors are those of formulas. In bf16 the same kernels meet the golden
data in tests/golden/narrow.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.kernels.mamba3 import library as mamba3_library
from megacpp.kernels.mamba3.chunks import mamba3_chunked, mamba3_scan
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.library import _imported, siso_kernel
from megacpp.model.documents import Documents
from parallel.simulate.library_stand_ins import mimo, siso
from tests.golden.check_mamba3 import run_scan
from tests.golden.harness import GoldenFile
from tests.model.mamba3_cases import random_scan, scan_leaves

CHUNK = 16
TOKENS = 19
DIM, LAYER = 16, Mamba3Config(d_state=16, headdim=16, ngroups=2, chunk_size=CHUNK)
DOCS = Documents.from_ids(torch.tensor([[0] * 17 + [1] * 2, [2] + [3] * 18]))


class Errors(GoldenFile):
    """Writes down how far each tensor is off."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, torch.float32)
        self.errors: dict[str, float] = {}

    def expect(self, name: str, got: Tensor | None, kind: str = "", rounding: float = 0.0) -> None:
        self.errors[name] = relative(got, self._tensors[name])


def on_a_cpu(tf32: bool = False) -> None:
    """For the rest of the process; to be called before the kernels are imported."""
    from tests.model import triton_interpreter as instead  # tests without Triton import this file

    instead.mend(tf32)
    approximations = _imported("mamba_ssm.ops.triton.mamba3.utils")
    approximations.cos_approx, approximations.sin_approx = instead.cos, instead.sin
    approximations.tanh_approx, approximations.sech2_approx = instead.tanh, instead.sech2
    kernels = _imported("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")
    for name in ("compute_dzdo", "compute_dqkv"):
        setattr(kernels, name, as_on_a_gpu(getattr(kernels, name)))


def as_on_a_gpu(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function that asserts that its tensors are there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return launch(*args, **kwargs)

    return run


def in_wider_heads(kernel: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
    """A library kernel on V with zeros up to `width` numbers a head, for files with heads of 8.

    `tl.dot` takes 16 at least, TileLang's tiles 32. Zeros in V, Z and states stay zeros, and add
    nothing to what is summed over a head.
    """

    def run(V: Tensor, Z: Tensor | None, **given: Any) -> Tensor:
        missing = width - V.shape[-1]
        for name in ("MIMO_V", "MIMO_Z", "MIMO_Out"):
            if given.get(name) is not None:
                given[name] = F.pad(given[name], (0, missing))
        if given.get("Input_States") is not None:
            angle, ssm, k, v = given["Input_States"]
            ssm = F.pad(ssm, (0, 0, 0, missing))
            given["Input_States"] = angle, ssm, k, F.pad(v, (0, missing))
        wide_Z = None if Z is None else F.pad(Z, (0, missing))
        return kernel(V=F.pad(V, (0, missing)), Z=wide_Z, **given)[..., : V.shape[-1]]

    return run


def by_kernels(
    pairing: Pairing,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    """The way that a model goes, with its name of the backend."""
    backend = {"backend": "mamba_ssm", "with_state": True}
    return mamba3_scan(inputs, weights, docs, pairing, CHUNK, initial, **backend)  # type: ignore


def golden_errors(path: Path) -> dict[str, float]:
    """What the file says: per document where it has a state for each."""
    golden = Errors(path)
    alone = "cu_seqlens" in golden and bool(golden.names("final_"))
    wider = in_wider_heads(siso_kernel(), 16)
    with mock.patch.object(mamba3_library, "siso_kernel", lambda: wider):
        run_scan(golden, by_kernels, alone=alone, states=True)
    return golden.errors


def random_errors(docs: Documents, continued: bool, gate: bool) -> dict[str, float]:
    """Output and every gradient against `mamba3_chunked` in fp64."""
    torch.manual_seed(0)
    inputs, weights, before = random_scan(
        TOKENS, groups=2, heads=2, state=16, head_dim=16, shared_angles=True, dtype=torch.float32
    )
    inputs = inputs if gate else replace(inputs, Z=None)
    parts = [inputs, weights, before if continued else None]
    doubles = [doubled(part) for part in parts]
    out, _ = by_kernels("interleaved", inputs, weights, docs, parts[2])  # type: ignore[arg-type]
    exact, _ = mamba3_chunked(doubles[0], doubles[1], docs, "interleaved", CHUNK, doubles[2])
    weight = torch.cos(torch.arange(exact.numel(), dtype=torch.float64)).view(exact.shape)
    want = torch.autograd.grad((exact * weight).sum(), scan_leaves(*doubles))
    got = torch.autograd.grad((out * weight.float()).sum(), scan_leaves(*parts))  # type: ignore
    tensors = [n for p in parts if p for n, x in vars(p).items() if isinstance(x, Tensor)]
    found = {n: relative(g, w) for n, g, w in zip(tensors, got, want, strict=True)}
    return {"out": relative(out, exact)} | found


def layer_of(
    docs: Documents, mamba: Mamba3Config, dtype: torch.dtype = torch.float32
) -> tuple[Mamba3, Tensor]:
    """A layer whose scan is the kernels', and an input."""
    layer = Mamba3(ModelConfig(dim=DIM, mamba3=mamba))
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    set_kernels(layer, Kernels(mamba3="mamba_ssm" if mamba.mimo_rank == 1 else "tilelang"))
    x_BTD = torch.randn(*docs.ids_BT.shape, DIM).to(dtype).requires_grad_()
    return layer.to(dtype), x_BTD


def kept(docs: Documents, mamba: Mamba3Config, dtype: torch.dtype) -> int:
    """Bytes that a layer keeps for backward, beside its input and parameters."""
    layer, x_BTD = layer_of(docs, mamba, dtype)
    others = {t.untyped_storage().data_ptr() for t in (x_BTD, docs.cu_seqlens, *layer.parameters())}
    storages: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in others and t.ndim:
            storages[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x_BTD, docs)
    return sum(storages.values())


def peaks(docs: Documents, mamba: Mamba3Config) -> dict[str, int]:
    """Most bytes alive at once while the layer runs, in either direction, whatever it keeps."""
    layer, x_BTD = layer_of(docs, mamba)
    with LiveBytes() as live:
        y_BTD = layer(x_BTD, docs)
        forward = live.peak
        live.peak = live.now
        y_BTD.backward(torch.ones_like(x_BTD))
    return {"forward": forward, "backward": live.peak}


def memory_of(layers: dict[str, tuple[Documents, Mamba3Config]]) -> dict[str, Any]:
    """What each layer keeps in fp32, and its peaks."""
    return {
        "fp32": {name: kept(*of, torch.float32) for name, of in layers.items()},
        "alive": {name: peaks(docs, mamba) for name, (docs, mamba) in layers.items()},
    }


@contextmanager
def stand_in() -> Iterator[None]:
    """The kernels' places are taken by what traces run without the package."""
    with (
        mock.patch.object(mamba3_library, "siso_kernel", lambda: siso),
        mock.patch.object(mamba3_library, "mimo_kernel", lambda: mimo),
    ):
        yield


def doubled(part: Any) -> Any:
    if part is None:
        return None
    wide = {
        n: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x
        for n, x in vars(part).items()
    }
    return type(part)(**wide)


def relative(got: Tensor | None, want: Tensor) -> float:
    if got is None:
        return float("inf")
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def main(files: list[str]) -> None:
    on_a_cpu()
    normed = replace(LAYER, out_norm=True, a_activation="softplus")
    layers = {
        "rows": (Documents.rows(2, TOKENS), LAYER),
        "packed": (DOCS, LAYER),
        "norm": (Documents.rows(2, TOKENS), normed),
    }
    in_bf16 = {name: kept(*of, torch.bfloat16) for name, of in layers.items()}
    with stand_in():
        without = {name: kept(*of, torch.bfloat16) for name, of in layers.items()}
    torch.bfloat16 = torch.float32
    errors = {Path(file).name: golden_errors(Path(file)) for file in files}
    errors["packed, continued"] = random_errors(DOCS, continued=True, gate=True)
    errors["rows, no gate"] = random_errors(Documents.rows(2, TOKENS), continued=False, gate=False)
    memory = {"kernel": memory_of(layers), "stand-in": {}}
    with stand_in():
        memory["stand-in"] = memory_of(layers)
    memory["kernel"]["bf16"], memory["stand-in"]["bf16"] = in_bf16, without
    print(json.dumps({"errors": errors, "memory": memory}))


if __name__ == "__main__":
    main(sys.argv[1:])
