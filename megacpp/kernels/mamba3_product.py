"""The chunked scan proper, forward and backward: what is left once q and k are rotated.

Per head, with s(t) the sum of log decays since the start of the chunk or document, and scale the
look-ahead weight of megacpp/kernels/mamba3_chunks.py:

    y[t] = e^s(t) S q[t] + sum over u < t of e^(s(t) - s(u)) scale[u] (q[t].k[u]) v[u]
         + gamma[t] (q[t].k[t]) v[t] + D v[t]
    S'   = e^s(C) S + sum over u of e^(s(C) - s(u)) scale[u] v[u] k[u]^T

Legend: B rows, H heads, J chunks of a row, C tokens of a chunk, R MIMO rank, N state size, P head
dim; M = B H J matrices, X = R C rows. Time is the last dim of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacpp.kernels.mamba3_ops import Chunks
from megacpp.model.fp32 import wide


def chunk_scan(
    q_BHJNRC: Tensor,
    k_BHJNRC: Tensor,
    v_BHJRCP: Tensor,
    sums_BHJC: Tensor,
    log_scale_BHJC: Tensor,
    gamma_BHJC: Tensor,
    D_H: Tensor,
    first_BHNP: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, J, R, C, P]` and the state after each row, `[B, H, N, P]`, from `first`.

    q, k, v are the operands of matrix products, in their dtype; all else, the carried state
    included, is at least fp32. Keeps its inputs and the states between chunks for backward, none of
    the C x C matrices, and finds the gradients of the decays without them: those of a row of the
    product sum to q.dq, those of a column to k.dk (the delta of FlashAttention, arXiv 2205.14135).
    """
    return _ChunkScan.apply(  # type: ignore[return-value]
        q_BHJNRC, k_BHJNRC, v_BHJRCP, sums_BHJC, log_scale_BHJC, gamma_BHJC, D_H, first_BHNP, chunks
    )


@dataclass(frozen=True, eq=False)
class _Decays:
    """exp of differences of log decays: token to token, into a chunk, out of it, across it."""

    inside_BHJCC: Tensor
    since_start_BHJC: Tensor
    until_end_BHJC: Tensor
    across_BHJ: Tensor

    @staticmethod
    def of(sums_BHJC: Tensor, log_scale_BHJC: Tensor, chunks: Chunks) -> _Decays:
        ends_BHJ1 = sums_BHJC[..., -1:]
        entry_BHJC = sums_BHJC - log_scale_BHJC
        # From differences, as either factor alone may over- or underflow. Bounded before exp: what
        # the mask is going to remove must stay finite, and less than e^-80 is nothing but makes
        # exp ten times slower and its products subnormal.
        inside_BHJCC = torch.sub(sums_BHJC[..., :, None], entry_BHJC[..., None, :])
        inside_BHJCC.clamp_(-80.0, 80.0).exp_().mul_(chunks.before_BJCC[:, None])
        return _Decays(
            inside_BHJCC,
            _exp_where(chunks.enters_BJC, sums_BHJC),
            _exp_where(chunks.leaves_BJC, ends_BHJ1 - entry_BHJC),
            _exp_where(chunks.enters_BJC[..., -1:], ends_BHJ1).squeeze(-1),
        )


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sums: Tensor,
        log_scale: Tensor,
        gamma: Tensor,
        D: Tensor,
        first: Tensor,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor]:
        decays = _Decays.of(sums, log_scale, chunks)
        q_MNX, k_MNX, v_MXP = _matrices(q, k, v)
        weights_MXX, _ = _weights(q, k, gamma, D, decays.inside_BHJCC)
        y_MXP = wide(weights_MXX.to(v.dtype) @ v_MXP)
        added_MNP = _times(k, decays.until_end_BHJC).view_as(k_MNX) @ v_MXP
        all_states = [first]
        for j, added_BHNP in enumerate(wide(added_MNP).unflatten(0, sums.shape[:3]).unbind(2)):
            across_BH11 = decays.across_BHJ[:, :, j, None, None]
            all_states.append(torch.addcmul(added_BHNP, across_BH11, all_states[-1]))
        states = torch.stack(all_states, 2)
        carried_MXP = q_MNX.mT @ _entering(states, v.dtype)
        since_start_MX1 = _rows(decays.since_start_BHJC, q)
        y_MXP.addcmul_(since_start_MX1, wide(carried_MXP))
        ctx.save_for_backward(q, k, v, sums, log_scale, gamma, D, states)
        ctx.chunks = chunks
        return y_MXP.view(v.shape), all_states[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sums, log_scale, gamma, D, states = ctx.saved_tensors
        with torch.autocast(v.device.type, enabled=False):
            return *_backward(q, k, v, sums, log_scale, gamma, D, states, ctx.chunks, *grads), None


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    log_scale: Tensor,
    gamma: Tensor,
    D: Tensor,
    states: Tensor,
    chunks: Chunks,
    dy: Tensor,
    dlast_BHNP: Tensor,
) -> tuple[Tensor, ...]:
    dtype = v.dtype
    decays = _Decays.of(sums, log_scale, chunks)
    q_MNX, k_MNX, v_MXP = _matrices(q, k, v)
    dy_MXP = dy.reshape(v_MXP.shape)
    dy_low_MXP = dy_MXP.to(dtype)

    # Inside chunks.
    weights_MXX, own_BHJRRC = _weights(q, k, gamma, D, decays.inside_BHJCC)
    dv_MXP = weights_MXX.to(dtype).mT @ dy_low_MXP
    dweights = _by_rank(dy_low_MXP @ v_MXP.mT, q)
    down_BHJRRC = wide(dweights.diagonal(dim1=-3, dim2=-1))
    dgamma = (down_BHJRRC * own_BHJRRC).sum((3, 4))
    dD = down_BHJRRC.diagonal(dim1=3, dim2=4).sum((0, 2, 3, 4))
    down_BHJRRC = (down_BHJRRC * gamma[:, :, :, None, None]).to(dtype)
    dscores_MXX = dweights.mul_(_over_ranks(decays.inside_BHJCC)).view_as(weights_MXX)
    dk_MNX = q_MNX @ dscores_MXX

    # Through the states: what outputs read of them, what they pass on, what chunks add to them.
    dcarried_MXP = (dy_MXP * _rows(decays.since_start_BHJC, q)).to(dtype)
    entering_MNP = _entering(states, dtype)
    dq_MNX = torch.baddbmm(entering_MNP @ dcarried_MXP.mT, k_MNX, dscores_MXX.mT)
    dstates = _through_states(q_MNX @ dcarried_MXP, dlast_BHNP, decays.across_BHJ)
    dadded_MNP = dstates[:, :, 1:].reshape(entering_MNP.shape).to(dtype)
    dk_end = (dadded_MNP @ v_MXP.mT).view(k.shape)
    dk = dk_MNX.view(k.shape).addcmul_(dk_end, _columns(decays.until_end_BHJC).to(dtype))
    dv_MXP.baddbmm_(_times(k, decays.until_end_BHJC).view_as(k_MNX).mT, dadded_MNP)

    # Log decays. A state is proportional to exp of its chunk's total, an output to exp of s(t).
    dq = dq_MNX.view(q.shape)
    column_BHJC = (wide(k) * dk).sum((3, 4))
    dsums = (wide(q) * dq).sum((3, 4)) - column_BHJC
    dsums[..., -1] += (dstates[:, :, 1:] * states[:, :, 1:]).sum((3, 4))

    for r in range(q.shape[-2]):  # a token with itself, which no log decay touches
        dq.addcmul_(k[..., r : r + 1, :], down_BHJRRC[..., None, :, r, :])
        dk.addcmul_(q[..., r : r + 1, :], down_BHJRRC[..., None, r, :, :])
    return dq, dk, dv_MXP.view(v.shape), dsums, column_BHJC, dgamma, dD, dstates[:, :, 0]


def _through_states(dentering_MNP: Tensor, dlast_BHNP: Tensor, across_BHJ: Tensor) -> Tensor:
    """Gradients of the state in front of each chunk and after the last, `[B, H, J + 1, N, P]`."""
    dentering = wide(dentering_MNP).unflatten(0, across_BHJ.shape)
    gradients = [dlast_BHNP]
    for j in reversed(range(across_BHJ.shape[2])):
        across_BH11 = across_BHJ[:, :, j, None, None]
        gradients.append(torch.addcmul(dentering[:, :, j], across_BH11, gradients[-1]))
    return torch.stack(gradients[::-1], 2)


def _weights(
    q: Tensor, k: Tensor, gamma: Tensor, D: Tensor, inside_BHJCC: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight of every v in every y of its chunk, `[M, X, X]`, and q.k of tokens with themselves."""
    q_MNX, k_MNX = q.flatten(0, 2).flatten(-2), k.flatten(0, 2).flatten(-2)
    scores_MXX = q_MNX.mT @ k_MNX
    scores = _by_rank(wide(scores_MXX), q)
    own_BHJRRC = scores.diagonal(dim1=-3, dim2=-1).clone()
    scores.mul_(_over_ranks(inside_BHJCC))
    diagonal_BHJRRC = own_BHJRRC * gamma[:, :, :, None, None]
    diagonal_BHJRRC.diagonal(dim1=3, dim2=4).add_(D[:, None, None, None])
    scores.diagonal(dim1=-3, dim2=-1).copy_(diagonal_BHJRRC)
    return scores.view(scores_MXX.shape), own_BHJRRC


def _matrices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_MNX, k_MNX = q.flatten(0, 2).flatten(-2), k.flatten(0, 2).flatten(-2)
    return q_MNX, k_MNX, v.flatten(0, 2).flatten(1, 2)


def _entering(states: Tensor, dtype: torch.dtype) -> Tensor:
    """The state in front of each chunk, `[M, N, P]`."""
    return states[:, :, :-1].to(dtype).flatten(0, 2)


def _by_rank(scores_MXX: Tensor, q_BHJNRC: Tensor) -> Tensor:
    B, H, J, _, R, C = q_BHJNRC.shape
    return scores_MXX.view(B, H, J, R, C, R, C)


def _over_ranks(inside_BHJCC: Tensor) -> Tensor:
    return inside_BHJCC[:, :, :, None, :, None, :]


def _columns(x_BHJC: Tensor) -> Tensor:
    """Per token, against q or k."""
    return x_BHJC[:, :, :, None, None]


def _rows(x_BHJC: Tensor, q_BHJNRC: Tensor) -> Tensor:
    """Per token, against the rows of v or y: `[M, X, 1]`."""
    R = q_BHJNRC.shape[-2]
    return x_BHJC.flatten(0, 2).repeat(1, R)[..., None]


def _times(k: Tensor, x_BHJC: Tensor) -> Tensor:
    return (k * _columns(x_BHJC)).to(k.dtype)


def _exp_where(mask_BJC: Tensor, x_BHJC: Tensor) -> Tensor:
    """exp(x) where the mask holds, else 0; masked first, so that no stranger reaches exp."""
    return torch.where(mask_BJC[:, None], x_BHJC, float("-inf")).exp()
