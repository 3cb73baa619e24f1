"""Inputs of the Mamba-3 scan: tensors with a token axis, parameters of heads, a state.

Legend: B rows, T tokens of a row, H heads, G groups of heads that share B and C, R MIMO rank
(1: SISO), N state size, P head dim, A rotated pairs. Q is the model's C, K its B, V its x, as
upstream's kernels name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megacpp.model.scan import HeadTensors, RowTensors, ScanDims, TokenTensors
from megacpp.torch_extras import wide

# Which elements of the N axis rotate together: (2i, 2i + 1), or (i, i + N/2).
Pairing = Literal["interleaved", "half"]


@dataclass(frozen=True, eq=False)
class ScanInputs(TokenTensors):
    """Tensors with a token axis.

    Attributes:
        Q, K: C and B of the model after their norms, `[B, T, R, G, N]`.
        V: `[B, T, H, P]`; its dtype is that of the matrix products and of the output.
        Z: gate of the shape of V, or None.
        ADT, DT: log decay (<= 0) and step (> 0), `[B, H, T]`, at least fp32.
        Trap: logits of lambda, `[B, H, T]`.
        Angles: before tanh, `[B, T, H, A]`, or `[B, T, 1, A]` when all heads share them.
    """

    DIMS: ClassVar[Mapping[str, ScanDims]] = {
        **dict.fromkeys(("Q", "K"), ScanDims(tokens=1, heads=3)),
        **dict.fromkeys(("ADT", "DT", "Trap"), ScanDims(tokens=2, heads=1)),
    }

    Q: Tensor
    K: Tensor
    V: Tensor
    Z: Tensor | None
    ADT: Tensor
    DT: Tensor
    Trap: Tensor
    Angles: Tensor

    def part(self, rows: slice, tokens: slice) -> ScanInputs:
        """Return some rows and tokens of them (views)."""

        def chosen(x: Tensor, dims: ScanDims) -> Tensor:
            return x[(rows, *[slice(None)] * (dims.tokens - 1), tokens)]

        return self.map_dims(chosen)


@dataclass(frozen=True, eq=False)
class HeadWeights(HeadTensors):
    """Parameters of the scan, at least fp32; the three mimo_* are given together or not at all.

    Attributes:
        Q_bias, K_bias: added before the rotation, `[H, R, N]`.
        D: skip connection, `[H]`.
        mimo_x, mimo_z, mimo_o: what V, Z and the output of each rank are multiplied by before the
            outputs of all ranks are added, `[H, R, P]`.
        norm: weight of an RMSNorm over P before the gate, `[H, P]`.
    """

    Q_bias: Tensor
    K_bias: Tensor
    D: Tensor
    mimo_x: Tensor | None = None
    mimo_z: Tensor | None = None
    mimo_o: Tensor | None = None
    norm: Tensor | None = None
    norm_eps: float = 1e-5

    def ranks_of_token(self, v_BHP: Tensor) -> Tensor:
        """Return V of every rank of one token, `[B, H, R, P]`, at least fp32."""
        v_BH1P = wide(v_BHP)[:, :, None]
        return v_BH1P if self.mimo_x is None else v_BH1P * self.mimo_x


@dataclass(frozen=True, eq=False)
class Mamba3State(RowTensors):
    """State that one token leaves to the next of its document.

    Attributes:
        angle: running sum of the turns modulo 2 pi, `[B, H, A]`, at least fp32.
        ssm: the state matrix after the token, `[B, H, P, N]`, at least fp32.
        k: the token's K with bias, rotated, `[B, H, R, N]`.
        v: the token's V, before mimo_x, `[B, H, P]`.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def zeros(v: Tensor, num_angles: int, rank: int, d_state: int) -> Mamba3State:
        """Return the state before a document.

        Args:
            v: `[B, H, P]`; its device and dtype.
            num_angles: A.
            rank: R.
            d_state: N.
        """
        (B, H, P), kind = v.shape, wide(v[:0])
        return Mamba3State(
            kind.new_zeros(B, H, num_angles),
            kind.new_zeros(B, H, P, d_state),
            kind.new_zeros(B, H, rank, d_state),
            torch.zeros_like(v),
        )
