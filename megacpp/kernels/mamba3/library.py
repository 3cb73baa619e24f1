"""Mamba-3 scan by the kernels of mamba-ssm: Triton for SISO, TileLang for MIMO.

    mamba3_siso_combined   mamba_ssm/ops/triton/mamba3/mamba3_siso_combined.py
    mamba3_mimo            mamba_ssm/ops/tilelang/mamba3/mamba3_mimo.py        (2.3.2.post1)

Both compute in bf16 with fp32 sums, as `mamba3_chunked` does for bf16 inputs. The SISO kernel also
keeps angles in bf16 (upstream casts them): a turn is off by up to 2^-6 rad. Unsupported
configurations are refused before a run starts (megacpp/kernels/support.py).

Legend: as megacpp/kernels/mamba3/inputs.py, and L tokens of a packed row, S sequences.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.mamba3.carried import carried_outputs, final_state
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.ops import check_contract
from megacpp.kernels.recurrent_gates import gated_ranks
from megacpp.model.documents import Documents
from megacpp.torch_extras import wide

Kernel = Callable[..., Any]

TRITON = "mamba_ssm.ops.triton.mamba3"
MOST_SEQUENCES = 65_535  # of a batch: the last dim of a CUDA grid


def mamba3_library(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
    *,
    with_state: bool = False,
) -> tuple[Tensor, Mamba3State | None]:
    """Return `mamba3_chunked` by the kernel for this pairing; a state only `with_state`.

    The state is not the kernel's: that of SISO has bf16 angles, that of MIMO no gradient, and of
    packed rows the wrong V. It is one more sum over the tokens, in fp32.

    Args:
        inputs: of every token, bf16.
        weights: of the heads.
        docs: documents.
        pairing: `interleaved`: SISO; `half`: MIMO.
        chunk_size: tokens of a chunk.
        initial: state in front of each row; None: zeros.
        with_state: return the state after each row.
    """
    assert inputs.V.dtype == torch.bfloat16, f"Mamba-3 kernel: V is {inputs.V.dtype}"
    assert docs.whole or len(docs.cu_seqlens) <= MOST_SEQUENCES, f"{len(docs.cu_seqlens)} documents"
    with torch.autocast(inputs.V.device.type, enabled=False):
        if pairing == "interleaved":
            y_BTHP = siso_scan(siso_kernel(), inputs, weights, docs, chunk_size, initial)
        else:
            y_BTHP = mimo_scan(mimo_kernel(), inputs, weights, docs, chunk_size, initial)
    if not with_state:
        return y_BTHP, None
    return y_BTHP, final_state(inputs, weights, docs, pairing, initial)


def siso_kernel() -> Kernel:
    """Return `mamba3_siso_combined`."""
    return _imported(f"{TRITON}.mamba3_siso_combined").mamba3_siso_combined


def siso_tuners() -> list[Any]:
    """Return Triton's autotuners of the SISO kernels; the first call of each tries its configs."""
    from triton.runtime.autotuner import Autotuner

    siso_kernel()
    modules = [sys.modules[f"{TRITON}.{name}"] for name in ("mamba3_siso_fwd", "mamba3_siso_bwd")]
    modules.append(sys.modules[f"{TRITON}.angle_dt"])
    return [x for module in modules for x in vars(module).values() if isinstance(x, Autotuner)]


def mimo_kernel() -> Kernel:
    """Return `mamba3_mimo`."""
    return _imported("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo").mamba3_mimo


def siso_scan(
    kernel: Kernel,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    chunk_size: int,
    initial: Mamba3State | None = None,
) -> Tensor:
    """Return the output `[B, T, H, P]` by a kernel with `mamba3_siso_combined`'s signature.

    It gates as well, unless a norm comes in between.

    Args:
        kernel: `mamba3_siso_combined` or a stand-in.
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        chunk_size: tokens of a chunk.
        initial: state in front of each row; None: zeros.
    """
    _check(inputs, weights)
    layout, H = PackedLayout.for_documents(docs), inputs.V.shape[2]
    fused = weights.norm is None
    y_1LHP = kernel(
        Q=layout.tokens(inputs.Q.squeeze(2)),  # one rank: a view in backward too
        K=layout.tokens(inputs.K.squeeze(2)),
        V=layout.tokens(inputs.V),
        ADT=layout.heads(inputs.ADT),
        DT=layout.heads(inputs.DT),
        Trap=layout.heads(inputs.Trap),
        Q_bias=weights.Q_bias.squeeze(1),
        K_bias=weights.K_bias.squeeze(1),
        Angles=layout.tokens(inputs.Angles).expand(-1, -1, H, -1),
        D=weights.D,
        Z=layout.tokens(inputs.Z) if fused and inputs.Z is not None else None,
        Input_States=None if initial is None else layout.entering(initial),
        chunk_size=chunk_size,
        cu_seqlens=layout.cu_seqlens,
    )
    y_BTHP = y_1LHP.view(inputs.V.shape)
    return y_BTHP if fused else _gated(y_BTHP[:, :, :, None], inputs, weights)


def mimo_scan(
    kernel: Kernel,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    chunk_size: int,
    initial: Mamba3State | None = None,
) -> Tensor:
    """Return the output `[B, T, H, P]` by a kernel with the signature of `mamba3_mimo`.

    It gates and sums over ranks as well, unless a norm or an initial state comes in between: the
    kernel takes no state, so the outputs from a given state are added to those of all ranks.

    Args:
        kernel: `mamba3_mimo` or a stand-in.
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        chunk_size: tokens of a chunk.
        initial: state in front of each row; None: zeros.
    """
    _check(inputs, weights)
    assert weights.mimo_x is not None and weights.mimo_z is not None
    (B, T, H, P), fused = inputs.V.shape, weights.norm is None and initial is None
    layout = PackedLayout.for_documents(docs, chunk_size)
    N, A = inputs.Q.shape[-1], inputs.Angles.shape[-1]
    y_1LRHP = kernel(
        Q=layout.tokens(_of_heads(inputs.Q, H)),
        K=layout.tokens(_of_heads(inputs.K, H)),
        V=layout.tokens(inputs.V),
        ADT=layout.heads(inputs.ADT),
        DT=layout.heads(inputs.DT),
        Trap=layout.heads(inputs.Trap),
        Q_bias=weights.Q_bias,
        K_bias=weights.K_bias,
        MIMO_V=weights.mimo_x,
        MIMO_Z=weights.mimo_z,
        MIMO_Out=weights.mimo_o if fused else None,
        Angles=layout.tokens(wide(inputs.Angles)).expand(-1, -1, H, -1),
        D=weights.D,
        Z=layout.tokens(inputs.Z) if fused and inputs.Z is not None else None,
        chunk_size=chunk_size,
        rotary_dim_divisor=N // A,
        dtype=inputs.V.dtype,
        cu_seqlens=layout.cu_seqlens,
    )
    if fused:
        return y_1LRHP.view(B, T, H, P)
    y_BTHRP = y_1LRHP.view(B, T, -1, H, P).transpose(2, 3)
    if initial is not None:
        y_BTHRP = y_BTHRP + carried_outputs(inputs, weights, docs, "half", initial)
    return _gated(y_BTHRP, inputs, weights)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Rows as a kernel reads them: as they are, or one after another in one packed row.

    Attributes:
        cu_seqlens: int32, boundaries of the sequences of the packed row; None: rows as they are.
        first_B: number of the first sequence of each row.
    """

    cu_seqlens: Tensor | None
    first_B: Tensor | None

    @staticmethod
    def for_documents(docs: Documents, chunk_size: int = 1) -> PackedLayout:
        """Return the layout of a batch, made once. A row's first token starts a sequence.

        Whole rows are packed where chunks don't divide them: the kernels for MIMO that take rows
        as they are have no backward for the rest of one.
        """
        as_they_are = docs.whole and docs.ids_BT.shape[1] % chunk_size == 0
        return docs.memo(
            ("mamba3 layout", as_they_are), lambda: PackedLayout._make(docs, as_they_are)
        )

    @staticmethod
    def _make(docs: Documents, as_they_are: bool) -> PackedLayout:
        if as_they_are:
            return PackedLayout(None, None)
        (B, T), cu_seqlens = docs.ids_BT.shape, docs.cu_seqlens
        row_starts_B = torch.arange(B, device=cu_seqlens.device, dtype=torch.int32) * T
        return PackedLayout(cu_seqlens, torch.searchsorted(cu_seqlens, row_starts_B))

    def tokens(self, x_BT: Tensor) -> Tensor:
        """Return `x_BT` `[B, T, ...]` as the kernel reads it."""
        return x_BT if self.cu_seqlens is None else x_BT.flatten(0, 1)[None]

    def heads(self, x_BHT: Tensor) -> Tensor:
        """Return `x_BHT` `[B, H, T]` as the kernel reads it, a view: the model has heads last."""
        return x_BHT if self.cu_seqlens is None else x_BHT.mT.flatten(0, 1)[None].mT

    def entering(self, state: Mamba3State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the state that enters each sequence; a row's first continues from `state`."""
        of_rows = state.angle, state.ssm, state.k[:, :, 0], state.v
        if self.cu_seqlens is None or self.first_B is None:
            return of_rows
        S = len(self.cu_seqlens) - 1
        angle, ssm, k, v = (
            x.new_zeros(S, *x.shape[1:]).index_copy(0, self.first_B, x) for x in of_rows
        )
        return angle, ssm, k, v


def _of_heads(x_BTRGN: Tensor, heads: int) -> Tensor:
    """Return Q or K in groups that the MIMO kernel takes: as it is if there is one, else by head.

    megacpp/kernels/mamba3/support.py says what the copy costs.
    """
    groups = x_BTRGN.shape[3]
    if groups in (1, heads):
        return x_BTRGN
    return x_BTRGN[:, :, :, :, None].expand(-1, -1, -1, -1, heads // groups, -1).flatten(3, 4)


def _gated(y_BTHRP: Tensor, inputs: ScanInputs, weights: HeadWeights) -> Tensor:
    return gated_ranks(
        y_BTHRP,
        inputs.Z,
        weights.norm,
        weights.mimo_z,
        weights.mimo_o,
        norm_eps=weights.norm_eps,
        dtype=inputs.V.dtype,
    )


def _check(inputs: ScanInputs, weights: HeadWeights) -> None:
    """Assert the dtypes with which kernels read the inputs: else it is a bug elsewhere."""
    check_contract(inputs, weights)
    for name in ("Q", "K", "Z", "Trap"):
        x = getattr(inputs, name)
        assert x is None or x.dtype == inputs.V.dtype, f"Mamba-3 kernel: {name} is {x.dtype}"


def _imported(name: str) -> Any:
    """Import a module of mamba-ssm without the package's own imports.

    Its `__init__` asks for Mamba-1's CUDA extension, which these kernels don't use and a build
    without nvcc lacks (state-spaces/mamba#237). tests/model/test_mamba3_library.py fails once it
    can be imported without.
    """
    package = "mamba_ssm"
    if name in sys.modules:
        return sys.modules[name]
    if package in sys.modules:
        with _measured_once():
            return importlib.import_module(name)
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        with _measured_once():
            return importlib.import_module(name)
    finally:
        del sys.modules[package]  # a later import of the package gets all of it


@contextmanager
def _measured_once() -> Iterator[None]:
    """Let autotuners that are made inside keep their measurements, in Triton's cache on disk.

    By itself every process measures again, and another configuration may win. A tuner reads the
    switch when it is made (Triton 3.4 on); TRITON_CACHE_AUTOTUNING has priority if set.
    """
    from triton import knobs

    with knobs.autotuning.scope():
        if "TRITON_CACHE_AUTOTUNING" not in os.environ:
            knobs.autotuning.cache = True
        yield
