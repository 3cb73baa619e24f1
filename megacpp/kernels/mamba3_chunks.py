"""The Mamba-3 scan as matrix products over chunks: prepare, states across chunks, outputs.

The look-ahead form of the recurrence in megacpp/kernels/mamba3.py: token s enters the state once,
with weight scale[s] = dt[s] lambda[s] + dt[s+1] (1 - lambda[s+1]), the second term only within its
document, and a token meets itself with gamma = dt lambda alone. At the end of a row or document the
look-ahead is empty, so the state there equals that of the recurrence.

Legend: as megacpp/kernels/mamba3_inputs.py, and J chunks of a row, C tokens of a chunk. Inside,
the N axis is ordered so that pair i is rows i and i + N/2, whatever the pairing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3_inputs import (
    HeadWeights,
    Mamba3State,
    Pairing,
    ScanInputs,
    from_halves,
    to_halves,
)
from megacpp.kernels.mamba3_ops import (
    NEVER,
    Chunks,
    carried_sum,
    decayed_product,
    rotate_pairs,
    segmented_cumsum,
)
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide


@dataclass(frozen=True, eq=False)
class ChunkedScan:
    """A prepared scan: `states` passes states across chunks, `outputs` needs what enters each."""

    chunks: Chunks
    pairing: Pairing
    q_BHJNRC: Tensor
    k_BHJNRC: Tensor
    v_BHJRCP: Tensor  # not scaled
    scaled_BHJRCP: Tensor
    sums_BHJC: Tensor  # log decay from the start of the chunk or document to the token, inclusive
    gamma_BHJC: Tensor
    angle_BHJAC: Tensor
    first_BHNP: Tensor  # the state that enters the row

    @staticmethod
    def of(
        inputs: ScanInputs,
        weights: HeadWeights,
        docs: Documents,
        pairing: Pairing,
        chunk: int,
        initial: Mamba3State | None,
    ) -> ChunkedScan:
        """Rotated q and k, weighted v and log decays of every chunk."""
        chunks = Chunks.of(docs, chunk)
        ADT_BHJC, DT_BHJC = _chunked(inputs.ADT, chunk, -1), _chunked(inputs.DT, chunk, -1)
        Trap_BHJC = wide(_chunked(inputs.Trap, chunk, -1))
        gamma_BHJC = DT_BHJC * torch.sigmoid(Trap_BHJC)
        beta_BHJC = DT_BHJC * torch.sigmoid(-Trap_BHJC)
        ahead_BHT = F.pad(beta_BHJC.flatten(2)[..., 1:], (0, 1))
        scale_BHJC = gamma_BHJC + torch.where(
            chunks.follows_BJC[:, None], ahead_BHT.view_as(gamma_BHJC), 0.0
        )
        angle_BHJAC = _angles(inputs.Angles, DT_BHJC, chunks, initial)
        dtype = inputs.V.dtype
        q_BHJNRC, k_BHJNRC = rotate_pairs(
            _time_last(inputs.Q, weights.Q_bias, pairing, chunk),
            _time_last(inputs.K, weights.K_bias, pairing, chunk),
            angle_BHJAC,
            dtype,
        )
        v_BHJCP = _chunked(inputs.V, chunk, 1).permute(0, 3, 1, 2, 4).contiguous()
        v_BHJRCP = weights.ranks(v_BHJCP)
        return ChunkedScan(
            chunks,
            pairing,
            q_BHJNRC,
            k_BHJNRC,
            v_BHJRCP,
            (v_BHJRCP * scale_BHJC[:, :, :, None, :, None]).to(dtype),
            segmented_cumsum(ADT_BHJC[:, :, :, None], chunks).squeeze(3),
            gamma_BHJC,
            angle_BHJAC,
            _entering_row(inputs, weights, initial, pairing, beta_BHJC[:, :, 0, 0]),
        )

    def states(self) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, `[B, H, J, N, P]`, and the one after the last chunk."""
        ends_BHJ1 = self.sums_BHJC[..., -1:]
        until_end_BHJC = _exp_where(self.chunks.leaves_BJC, ends_BHJ1 - self.sums_BHJC)
        k_MNX = (self.k_BHJNRC * until_end_BHJC[:, :, :, None, None]).to(self.k_BHJNRC.dtype)
        added_MNP = k_MNX.flatten(0, 2).flatten(-2) @ self.scaled_BHJRCP.flatten(0, 2).flatten(1, 2)
        added_BHJNP = wide(added_MNP).unflatten(0, self.sums_BHJC.shape[:3])
        passes_BHJ = _exp_where(self.chunks.enters_BJC[..., -1], ends_BHJ1.squeeze(-1))
        state_BHNP, entering = self.first_BHNP, []
        for passes_BH, added_BHNP in zip(passes_BHJ.unbind(2), added_BHJNP.unbind(2), strict=True):
            entering.append(state_BHNP)
            state_BHNP = torch.addcmul(added_BHNP, passes_BH[..., None, None], state_BHNP)
        return torch.stack(entering, 2), state_BHNP

    def outputs(self, entering_BHJNP: Tensor, weights: HeadWeights) -> Tensor:
        """Outputs before gate and mimo_o, `[B, H, J, R, C, P]`, at least fp32."""
        dtype, shape = self.scaled_BHJRCP.dtype, self.v_BHJRCP.shape
        y, own_BHJRRC = decayed_product(
            self.q_BHJNRC, self.k_BHJNRC, self.scaled_BHJRCP, self.sums_BHJC, self.chunks
        )
        q_MXN = self.q_BHJNRC.flatten(0, 2).flatten(-2).mT
        carried = (q_MXN @ entering_BHJNP.to(dtype).flatten(0, 2)).view(shape)
        since_start_BHJC = _exp_where(self.chunks.enters_BJC, self.sums_BHJC)
        y = torch.addcmul(wide(y), since_start_BHJC[:, :, :, None, :, None], wide(carried))
        ranks = shape[3]
        skip_H1RR1 = weights.D[:, None, None, None, None] * torch.eye(ranks).to(y)[..., None]
        own_BHJRRC = wide(own_BHJRRC) * self.gamma_BHJC[:, :, :, None, None] + skip_H1RR1
        for r in range(ranks):
            y = torch.addcmul(
                y, own_BHJRRC[:, :, :, :, r, :, None], self.v_BHJRCP[:, :, :, r, None]
            )
        return y

    def final(self, last_BHNP: Tensor, v_BHP: Tensor, num_tokens: int) -> Mamba3State:
        """The state after the last token of each row; padding behind it changes nothing."""
        j, c = divmod(num_tokens - 1, self.sums_BHJC.shape[-1])
        return Mamba3State(
            torch.remainder(self.angle_BHJAC[:, :, j, :, c], 2 * math.pi),
            from_halves(last_BHNP.mT, self.pairing),
            from_halves(self.k_BHJNRC[:, :, j, :, :, c].mT, self.pairing),
            v_BHP,
        )


def _angles(Angles: Tensor, DT_BHJC: Tensor, chunks: Chunks, initial: Mamba3State | None) -> Tensor:
    """Running sum of pi tanh(angles) dt within each document, `[B, H, J, A, C]`."""
    rate_BJCHA = _chunked(math.pi * torch.tanh(wide(Angles)), DT_BHJC.shape[-1], 1)
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


def _entering_row(
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


def _chunked(x: Tensor, chunk: int, dim: int) -> Tensor:
    """`x` with its time `dim` (1 or the last) padded by zeros and cut into (J, C)."""
    missing = -x.shape[dim] % chunk
    if missing:
        behind = 0 if dim == -1 else x.ndim - 1 - dim
        x = F.pad(x, (0, 0) * behind + (0, missing))
    return x.unflatten(dim, (-1, chunk))


def _time_last(x_BTRGN: Tensor, bias_HRN: Tensor, pairing: Pairing, chunk: int) -> Tensor:
    """Q or K of every head with its bias, `[B, H, J, N, R, C]`, pairs as halves of N."""
    G = x_BTRGN.shape[3]
    x_BJCRGN = _chunked(to_halves(wide(x_BTRGN), pairing), chunk, 1)
    x_BGJNRC = x_BJCRGN.permute(0, 4, 1, 5, 3, 2).contiguous()
    bias_GHNR = to_halves(bias_HRN, pairing).mT.unflatten(0, (G, -1))
    return (x_BGJNRC[:, :, None] + bias_GHNR[:, :, None, :, :, None]).flatten(1, 2)


def _exp_where(mask_BJ: Tensor, x_BHJ: Tensor) -> Tensor:
    """exp(x) where the mask holds, else 0; masked first, so that no stranger reaches exp."""
    return torch.where(mask_BJ[:, None], x_BHJ, NEVER).exp()
