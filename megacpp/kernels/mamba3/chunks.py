"""Mamba-3 scan as matrix products over chunks: operands, gates and output.

The look-ahead form of the recurrence in megacpp/kernels/mamba3/reference.py: token s enters the
state once, with weight scale[s] = dt[s] lambda[s] + dt[s+1] (1 - lambda[s+1]), and meets itself
with gamma = dt lambda alone. Only later tokens of its document see the second term, so the last one
may look into the next document, and at the end of a row, where it is 0, the state is the
recurrence's.

Legend: as megacpp/kernels/mamba3/inputs.py, and J chunks of a row, C tokens of a chunk. Inside,
the N axis is ordered so that pair i is rows i and i + N/2, whatever the pairing.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.mimo import MimoValues
from megacpp.kernels.mamba3.ops import (
    Chunks,
    bias_and_rotate,
    carried_sum,
    check_contract,
    from_halves,
    segmented_cumsum,
    to_halves,
)
from megacpp.kernels.mamba3.product import Operands, chunk_scan
from megacpp.kernels.recurrent_gates import gated_ranks
from megacpp.model.documents import Documents
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.torch_extras import wide

NOTHING = 1e-35  # a weight below it counts as this much, and its logarithm stays finite


def mamba3_scan(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
    *,
    recompute: Recompute = PLAIN,
    backend: str = "torch",
    with_state: bool = False,
) -> tuple[Tensor, Mamba3State | None]:
    """Return `mamba3_chunked`, or the same by another backend of `mamba3`.

    The state after each row is None where finding it is work of its own, unless `with_state`.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        pairing: of the rotated dims.
        chunk_size: tokens of a chunk.
        initial: state in front of each row; None: zeros.
        recompute: runs the recompute regions of `torch`.
        backend: of `mamba3` (megacpp/kernels/selection.py).
        with_state: return the state after each row.
    """
    if backend == "reference":
        from megacpp.kernels.mamba3.reference import mamba3_sequential

        return mamba3_sequential(inputs, weights, docs, pairing, initial)
    if backend in ("mamba_ssm", "tilelang"):
        from megacpp.kernels.mamba3.library import mamba3_library

        return mamba3_library(
            inputs, weights, docs, pairing, chunk_size, initial, with_state=with_state
        )
    if backend == "triton":
        from megacpp.kernels.mamba3.triton import mamba3_triton

        return mamba3_triton(
            inputs, weights, docs, pairing, chunk_size, initial, with_state=with_state
        )
    assert backend == "torch", backend
    return mamba3_chunked(inputs, weights, docs, pairing, chunk_size, initial, recompute=recompute)


def mamba3_chunked(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
    *,
    recompute: Recompute = PLAIN,
) -> tuple[Tensor, Mamba3State]:
    """Return the output `[B, T, H, P]` and the state after each row, by products over chunks.

    Operations before and after the scan proper are recompute regions; the scan itself, its states
    and its outputs never are.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents; neither these nor T have to be aligned to chunks.
        pairing: of the rotated dims.
        chunk_size: tokens of a chunk.
        initial: state that the first document of each row continues from; None: zeros.
        recompute: runs the regions.
    """
    check_contract(inputs, weights)
    with torch.autocast(inputs.V.device.type, enabled=False):
        chunks = Chunks.for_documents(docs, min(chunk_size, inputs.V.shape[1]), inputs.DT.dtype)
        *operands, angle_BHA = recompute(
            "conv_bc",
            partial(_operands, chunks, pairing),
            inputs.Q,
            inputs.K,
            inputs.V,
            inputs.ADT,
            inputs.DT,
            inputs.Trap,
            inputs.Angles,
            weights.Q_bias,
            weights.K_bias,
            weights.mimo_x,
            None if initial is None else initial.angle,
        )
        operands = Operands(*operands)
        y_BHJRCP, last_BHNP = chunk_scan(
            operands, weights.D, first_state(inputs, weights, initial, pairing), chunks
        )
        T, chunk = inputs.V.shape[1], chunks.size
        y_BTHRP = y_BHJRCP.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        y_BTHP = recompute(
            "conv_bc",
            partial(gated_ranks, norm_eps=weights.norm_eps, dtype=inputs.V.dtype),
            y_BTHRP[:, :T] if T % chunk else y_BTHRP,
            inputs.Z,
            weights.norm,
            weights.mimo_z,
            weights.mimo_o,
        )
        j, c = divmod(T - 1, chunk)  # padding behind the last token changes no state
        final = Mamba3State(
            angle_BHA,
            from_halves(last_BHNP.mT, pairing),
            from_halves(operands.k_BHJNRC[:, :, j, :, :, c].mT, pairing),
            inputs.V[:, -1],
        )
        return y_BTHP, final


def _operands(
    chunks: Chunks,
    pairing: Pairing,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Angles: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    mimo_x: Tensor | None,
    initial_BHA: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the `Operands` of `chunk_scan`, and the last angle.

    `initial_BHA` is the angle that the first document of each row continues from.
    """
    T, chunk, G = V.shape[1], chunks.size, Q.shape[3]
    DT_BHJC, Trap_BHJC = _cut(DT, chunk, -1), wide(_cut(Trap, chunk, -1))
    gamma_BHJC = DT_BHJC * torch.sigmoid(Trap_BHJC)
    beta_BHJC = DT_BHJC * torch.sigmoid(-Trap_BHJC)
    ahead_BHJC = F.pad(beta_BHJC.flatten(2)[..., 1:], (0, 1)).view_as(beta_BHJC)
    angle_BHJAC = _angles(Angles, DT_BHJC, chunks, initial_BHA)
    q_BHJNRC, k_BHJNRC = bias_and_rotate(
        _time_last(Q, pairing, chunk),
        _time_last(K, pairing, chunk),
        to_halves(Q_bias, pairing).mT.unflatten(0, (G, -1)),
        to_halves(K_bias, pairing).mT.unflatten(0, (G, -1)),
        angle_BHJAC,
        V.dtype,
    )
    j, c = divmod(T - 1, chunk)
    return (
        q_BHJNRC,
        k_BHJNRC,
        ranks(_cut(V, chunk, 1).permute(0, 3, 1, 2, 4).contiguous(), mimo_x),
        segmented_cumsum(_cut(ADT, chunk, -1)[:, :, :, None], chunks).squeeze(3),
        (gamma_BHJC + ahead_BHJC).clamp(min=NOTHING).log(),
        gamma_BHJC,
        torch.remainder(angle_BHJAC[:, :, j, :, c], 2 * math.pi),
    )


def ranks(v_BHJCP: Tensor, mimo_x_HRP: Tensor | None) -> Tensor:
    """Return V of every rank, `[B, H, J, R, C, P]` in the dtype of v."""
    if mimo_x_HRP is None:
        return v_BHJCP[:, :, :, None]
    return MimoValues.apply(v_BHJCP, mimo_x_HRP)  # type: ignore[return-value]


def _angles(Angles: Tensor, DT_BHJC: Tensor, chunks: Chunks, initial_BHA: Tensor | None) -> Tensor:
    """Return the running sum of pi tanh(angles) dt within each document, `[B, H, J, A, C]`."""
    rate_BJCHA = _cut(math.pi * torch.tanh(wide(Angles)), DT_BHJC.shape[-1], 1)
    rate_BHJAC = rate_BJCHA.permute(0, 3, 1, 4, 2).contiguous()
    within_BHJAC = segmented_cumsum(rate_BHJAC * DT_BHJC[:, :, :, None], chunks)
    entering_BHJA = carried_sum(within_BHJAC[..., -1], chunks.enters_BJC[..., -1], initial_BHA)
    entering_BHJA = torch.remainder(entering_BHJA, 2 * math.pi).to(within_BHJAC.dtype)
    enters = chunks.enters_BJC[:, None, :, None]
    return within_BHJAC + torch.where(enters, entering_BHJA[..., None], 0.0)


def first_state(
    inputs: ScanInputs, weights: HeadWeights, initial: Mamba3State | None, pairing: Pairing
) -> Tensor:
    """Return the look-ahead state in front of each row, `[B, H, N, P]`.

    Args:
        inputs: of every token.
        weights: of the heads.
        initial: state in front of each row; None: zeros.
        pairing: of the rotated dims.
    """
    B, _, H, P = inputs.V.shape
    if initial is None:
        return inputs.DT.new_zeros(B, H, inputs.Q.shape[-1], P)
    beta_BH = inputs.DT[..., 0] * torch.sigmoid(-wide(inputs.Trap[..., 0]))
    ahead_BHPN = weights.ranks_of_token(initial.v).mT @ wide(initial.k) * beta_BH[..., None, None]
    return to_halves(initial.ssm + ahead_BHPN, pairing).mT


def _cut(x: Tensor, chunk: int, dim: int) -> Tensor:
    """Return `x` with its time `dim` (1 or the last) padded by zeros and split into (J, C)."""
    missing = -x.shape[dim] % chunk
    if missing:
        behind = 0 if dim == -1 else x.ndim - 1 - dim
        x = F.pad(x, (0, 0) * behind + (0, missing))
    return x.unflatten(dim, (-1, chunk))


def _time_last(x_BTRGN: Tensor, pairing: Pairing, chunk: int) -> Tensor:
    """Return Q or K as `[B, G, J, N, R, C]`, pairs as halves of N, at least fp32."""
    x_BJCRGN = _cut(to_halves(wide(x_BTRGN), pairing), chunk, 1)
    return x_BJCRGN.permute(0, 4, 1, 5, 3, 2).contiguous()
