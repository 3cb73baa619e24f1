"""The Mamba-3 scan as matrix products over chunks: what it takes to get there.

The look-ahead form of the recurrence in megacpp/kernels/mamba3.py: token s enters the state once,
with weight scale[s] = dt[s] lambda[s] + dt[s+1] (1 - lambda[s+1]), and meets itself with
gamma = dt lambda alone. Only later tokens of its document see the second term, so the last one may
look into the next document, and at the end of a row, where it is 0, the state is the recurrence's.

Legend: as megacpp/kernels/mamba3_inputs.py, and J chunks of a row, C tokens of a chunk. Inside,
the N axis is ordered so that pair i is rows i and i + N/2, whatever the pairing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3_inputs import (
    HeadWeights,
    Mamba3State,
    Pairing,
    ScanInputs,
    check_contract,
    from_halves,
    to_halves,
)
from megacpp.kernels.mamba3_ops import (
    Chunks,
    bias_and_rotate,
    carried_sum,
    segmented_cumsum,
)
from megacpp.kernels.mamba3_product import chunk_scan
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide

NOTHING = 1e-35  # a weight below it counts as this much, and its logarithm stays finite


def mamba3_chunked(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk_size: int,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    """Output `[B, T, H, P]` and the state after each row, by matrix products over chunks.

    Neither T nor documents have to be aligned to chunks. `initial` is what the first document of
    each row continues from (None: each row starts afresh).
    """
    check_contract(inputs, weights)
    with torch.autocast(inputs.V.device.type, enabled=False):
        return _chunked(inputs, weights, docs, pairing, min(chunk_size, inputs.V.shape[1]), initial)


def _chunked(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    chunk: int,
    initial: Mamba3State | None,
) -> tuple[Tensor, Mamba3State]:
    T, dtype = inputs.V.shape[1], inputs.V.dtype
    chunks = Chunks.of(docs, chunk, inputs.DT.dtype)
    ADT_BHJC, DT_BHJC = _cut(inputs.ADT, chunk, -1), _cut(inputs.DT, chunk, -1)
    Trap_BHJC = wide(_cut(inputs.Trap, chunk, -1))
    gamma_BHJC = DT_BHJC * torch.sigmoid(Trap_BHJC)
    beta_BHJC = DT_BHJC * torch.sigmoid(-Trap_BHJC)
    ahead_BHJC = F.pad(beta_BHJC.flatten(2)[..., 1:], (0, 1)).view_as(beta_BHJC)

    angle_BHJAC = _angles(inputs.Angles, DT_BHJC, chunks, initial)
    G = inputs.Q.shape[3]
    q_BHJNRC, k_BHJNRC = bias_and_rotate(
        _time_last(inputs.Q, pairing, chunk),
        _time_last(inputs.K, pairing, chunk),
        to_halves(weights.Q_bias, pairing).mT.unflatten(0, (G, -1)),
        to_halves(weights.K_bias, pairing).mT.unflatten(0, (G, -1)),
        angle_BHJAC,
        dtype,
    )
    v_BHJCP = _cut(inputs.V, chunk, 1).permute(0, 3, 1, 2, 4).contiguous()
    y_BHJRCP, last_BHNP = chunk_scan(
        q_BHJNRC,
        k_BHJNRC,
        weights.ranks(v_BHJCP).to(dtype),
        segmented_cumsum(ADT_BHJC[:, :, :, None], chunks).squeeze(3),
        (gamma_BHJC + ahead_BHJC).clamp(min=NOTHING).log(),
        gamma_BHJC,
        weights.D,
        _first(inputs, weights, initial, pairing, beta_BHJC[:, :, 0, 0]),
        chunks,
    )
    y_BTHRP = y_BHJRCP.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, :T]
    j, c = divmod(T - 1, chunk)  # padding behind the last token changes no state
    final = Mamba3State(
        torch.remainder(angle_BHJAC[:, :, j, :, c], 2 * math.pi),
        from_halves(last_BHNP.mT, pairing),
        from_halves(k_BHJNRC[:, :, j, :, :, c].mT, pairing),
        inputs.V[:, -1],
    )
    return weights.merged(y_BTHRP, inputs), final


def _angles(Angles: Tensor, DT_BHJC: Tensor, chunks: Chunks, initial: Mamba3State | None) -> Tensor:
    """Running sum of pi tanh(angles) dt within each document, `[B, H, J, A, C]`."""
    rate_BJCHA = _cut(math.pi * torch.tanh(wide(Angles)), DT_BHJC.shape[-1], 1)
    rate_BHJAC = rate_BJCHA.permute(0, 3, 1, 4, 2).contiguous()
    within_BHJAC = segmented_cumsum(rate_BHJAC * DT_BHJC[:, :, :, None], chunks)
    entering_BHJA = carried_sum(
        within_BHJAC[..., -1],
        chunks.enters_BJC[..., -1],
        None if initial is None else initial.angle,
    )
    entering_BHJA = torch.remainder(entering_BHJA, 2 * math.pi).to(within_BHJAC.dtype)
    enters = chunks.enters_BJC[:, None, :, None]
    return within_BHJAC + torch.where(enters, entering_BHJA[..., None], 0.0)


def _first(
    inputs: ScanInputs,
    weights: HeadWeights,
    initial: Mamba3State | None,
    pairing: Pairing,
    beta_BH: Tensor,
) -> Tensor:
    """The look-ahead state in front of each row, `[B, H, N, P]`: zeros, or from `initial`."""
    B, _, H, P = inputs.V.shape
    if initial is None:
        return beta_BH.new_zeros(B, H, inputs.Q.shape[-1], P)
    v_BHRP = weights.ranks_of_token(initial.v)
    ahead_BHPN = v_BHRP.mT @ wide(initial.k) * beta_BH[..., None, None]
    return to_halves(initial.ssm + ahead_BHPN, pairing).mT


def _cut(x: Tensor, chunk: int, dim: int) -> Tensor:
    """`x` with its time `dim` (1 or the last) padded by zeros and cut into (J, C)."""
    missing = -x.shape[dim] % chunk
    if missing:
        behind = 0 if dim == -1 else x.ndim - 1 - dim
        x = F.pad(x, (0, 0) * behind + (0, missing))
    return x.unflatten(dim, (-1, chunk))


def _time_last(x_BTRGN: Tensor, pairing: Pairing, chunk: int) -> Tensor:
    """Q or K as `[B, G, J, N, R, C]`, pairs as halves of N, at least fp32."""
    x_BJCRGN = _cut(to_halves(wide(x_BTRGN), pairing), chunk, 1)
    return x_BJCRGN.permute(0, 4, 1, 5, 3, 2).contiguous()
