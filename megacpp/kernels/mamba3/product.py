"""Chunked scan proper, forward and backward, of rotated q and k.

Per head, with s(t) the sum of log decays since the start of the chunk or document, and scale the
look-ahead weight of megacpp/kernels/mamba3/chunks.py:

    y[t] = e^s(t) S q[t] + sum over u < t of e^(s(t) - s(u)) scale[u] (q[t].k[u]) v[u]
         + gamma[t] (q[t].k[t]) v[t] + D v[t]
    S'   = e^s(C) S + sum over u of e^(s(C) - s(u)) scale[u] v[u] k[u]^T

Legend: B rows, H heads, J chunks of a row, C tokens of a chunk, R MIMO rank, N state size, P head
dim; M = B H J matrices, X = R C rows. Time is the last dim of q and k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp.kernels.mamba3.ops import Chunks, carry
from megacpp.torch_extras import no_autocast, once_differentiable, wide


class Operands(NamedTuple):
    """Operands of the scan.

    Attributes:
        q_BHJNRC: rotated queries; q, k and v are in the dtype of matrix products.
        k_BHJNRC: rotated keys.
        v_BHJRCP: values.
        sums_BHJC: log decays, summed from the start of the chunk or document; at least fp32.
        log_scale_BHJC: log of the look-ahead weights, likewise.
        gamma_BHJC: weight of a token for itself, likewise.
    """

    q_BHJNRC: Tensor
    k_BHJNRC: Tensor
    v_BHJRCP: Tensor
    sums_BHJC: Tensor
    log_scale_BHJC: Tensor
    gamma_BHJC: Tensor


def chunk_scan(
    operands: Operands, D_H: Tensor, first_BHNP: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, J, R, C, P]` and the state after each row, `[B, H, N, P]`.

    The carried state is at least fp32. Saves its inputs and the states between chunks for backward,
    none of the C x C matrices, and finds the gradients of the decays without them: those of a row
    of the product sum to q.dq, those of a column to k.dk (the delta of FlashAttention, arXiv
    2205.14135).

    Args:
        operands: of every chunk.
        D_H: skip of v to y.
        first_BHNP: state in front of each row.
        chunks: visibility.
    """
    return _ChunkScan.apply(chunks, *operands, D_H, first_BHNP)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class _Decays:
    """Exponentials of differences of log decays: into a chunk, out of it, across it."""

    since_start_BHJC: Tensor
    until_end_BHJC: Tensor
    across_BHJ: Tensor

    @staticmethod
    def from_sums(sums_BHJC: Tensor, log_scale_BHJC: Tensor, chunks: Chunks) -> _Decays:
        ends_BHJ1 = sums_BHJC[..., -1:]
        entry_BHJC = sums_BHJC - log_scale_BHJC
        return _Decays(
            _exp_where(chunks.enters_BJC, sums_BHJC),
            _exp_where(chunks.leaves_BJC, ends_BHJ1 - entry_BHJC),
            _exp_where(chunks.enters_BJC[..., -1:], ends_BHJ1).squeeze(-1),
        )


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, sums, log_scale, gamma, D, first = tensors
        q_MNX, k_MNX, v_MXP = _matrices(q, k, v)
        # C x C matrices are the largest there are: each ends with the expression that it is in.
        inside_BHJCC = _inside(sums, log_scale, chunks)
        y_MXP = wide(_weights(q, k, gamma, D, inside_BHJCC)[0].to(v.dtype) @ v_MXP)
        del inside_BHJCC
        decays = _Decays.from_sums(sums, log_scale, chunks)
        added_MNP = _times(k, decays.until_end_BHJC).view_as(k_MNX) @ v_MXP
        across_BHJ = decays.across_BHJ
        states = carry(added_MNP.unflatten(0, across_BHJ.shape), across_BHJ, first, False)
        del added_MNP
        carried_MXP = q_MNX.mT @ _entering(states, v.dtype)
        y_MXP.addcmul_(_rows(decays.since_start_BHJC, q), wide(carried_MXP))
        ctx.save_for_backward(q, k, v, sums, log_scale, gamma, D, states)
        ctx.chunks = chunks
        return y_MXP.view(v.shape), states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with no_autocast(saved[0]):
            return None, *_gradients(saved, ctx.chunks, *grads)


def _gradients(
    saved: Sequence[Tensor], chunks: Chunks, dy: Tensor, dlast_BHNP: Tensor
) -> tuple[Tensor, ...]:
    """Return those of the operands, of D and of the first state."""
    q, k, v, sums, log_scale, gamma, D, states = saved
    dtype = v.dtype
    q_MNX, k_MNX, v_MXP = _matrices(q, k, v)
    dy_MXP = dy.reshape(v_MXP.shape)
    inside_BHJCC = _inside(sums, log_scale, chunks)
    dv_MXP, dscores_MXX, down_BHJRRC, dgamma, dD = _inside_chunks(
        q, k, v_MXP, gamma, D, inside_BHJCC, dy_MXP.to(dtype)
    )
    del inside_BHJCC
    dk_MNX = q_MNX @ dscores_MXX

    # Through the states: outputs read them, they pass on, and chunks add to them.
    decays = _Decays.from_sums(sums, log_scale, chunks)
    dcarried_MXP = (dy_MXP * _rows(decays.since_start_BHJC, q)).to(dtype)
    dread_MNX = _entering(states, dtype) @ dcarried_MXP.mT
    dq_MNX = torch.baddbmm(dread_MNX, k_MNX, dscores_MXX.mT)
    del dread_MNX, dscores_MXX
    across_BHJ = decays.across_BHJ
    dentering_BHJNP = (q_MNX @ dcarried_MXP).unflatten(0, across_BHJ.shape)
    # Of the state in front of each chunk and of the one after the last.
    dstates = carry(dentering_BHJNP, across_BHJ, dlast_BHNP, True)
    del dentering_BHJNP, dcarried_MXP
    dadded_MNP = dstates[:, :, 1:].to(dtype).flatten(0, 2)
    dk_end = (dadded_MNP @ v_MXP.mT).view(k.shape)
    dk = dk_MNX.view(k.shape).addcmul_(dk_end, _columns(decays.until_end_BHJC).to(dtype))
    del dk_end
    dv_MXP.baddbmm_(_times(k, decays.until_end_BHJC).view_as(k_MNX).mT, dadded_MNP)
    del dadded_MNP

    # Log decays. A state is proportional to exp of its chunk's total, an output to exp of s(t).
    dq = dq_MNX.view(q.shape)
    column_BHJC = _dot(k, dk, sums.dtype).sum((3, 4))
    dsums = _dot(q, dq, sums.dtype).sum((3, 4)) - column_BHJC
    dsums[..., -1] += (dstates[:, :, 1:] * states[:, :, 1:]).sum((3, 4))

    for r in range(q.shape[-2]):  # a token with itself, which no log decay touches
        dq.addcmul_(k[..., r : r + 1, :], down_BHJRRC[..., None, :, r, :])
        dk.addcmul_(q[..., r : r + 1, :], down_BHJRRC[..., None, r, :, :])
    return dq, dk, dv_MXP.view(v.shape), dsums, column_BHJC, dgamma, dD, dstates[:, :, 0]


def _inside_chunks(
    q: Tensor,
    k: Tensor,
    v_MXP: Tensor,
    gamma: Tensor,
    D: Tensor,
    inside_BHJCC: Tensor,
    dy_low_MXP: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of v and of q.k, of a token with itself apart from others, of gamma and of D."""
    dtype = dy_low_MXP.dtype
    weights_MXX, own_BHJRRC = _weights(q, k, gamma, D, inside_BHJCC)
    dv_MXP = weights_MXX.to(dtype).mT @ dy_low_MXP
    del weights_MXX
    dweights_MXX = dy_low_MXP @ v_MXP.mT
    dweights = _by_rank(dweights_MXX, q)
    down_BHJRRC = wide(dweights.diagonal(dim1=-3, dim2=-1))
    dgamma = (down_BHJRRC * own_BHJRRC).sum((3, 4))
    dD = down_BHJRRC.diagonal(dim1=3, dim2=4).sum((0, 2, 3, 4))
    down_BHJRRC = (down_BHJRRC * gamma[:, :, :, None, None]).to(dtype)
    dweights.mul_(_over_ranks(inside_BHJCC))
    return dv_MXP, dweights_MXX, down_BHJRRC, dgamma, dD


def _inside(sums_BHJC: Tensor, log_scale_BHJC: Tensor, chunks: Chunks) -> Tensor:
    """Decay from token to token of a chunk, `[B, H, J, C, C]`; zeros where none sees another."""
    entry_BHJC = sums_BHJC - log_scale_BHJC
    # From differences, as either factor alone may over- or underflow. Bounded before exp: what
    # the mask is going to remove must stay finite, and less than e^-80 is nothing but makes
    # exp ten times slower and its products subnormal.
    inside_BHJCC = torch.sub(sums_BHJC[..., :, None], entry_BHJC[..., None, :])
    return inside_BHJCC.clamp_(-80.0, 80.0).exp_().mul_(chunks.before_BJCC[:, None])


def _weights(
    q: Tensor, k: Tensor, gamma: Tensor, D: Tensor, inside_BHJCC: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight of every v in every y of its chunk, `[M, X, X]`, and q.k of tokens with themselves."""
    q_MNX, k_MNX = q.flatten(0, 2).flatten(-2), k.flatten(0, 2).flatten(-2)
    scores_MXX = wide(q_MNX.mT @ k_MNX)
    scores = _by_rank(scores_MXX, q)
    own_BHJRRC = scores.diagonal(dim1=-3, dim2=-1).clone()
    scores.mul_(_over_ranks(inside_BHJCC))
    diagonal_BHJRRC = own_BHJRRC * gamma[:, :, :, None, None]
    diagonal_BHJRRC.diagonal(dim1=3, dim2=4).add_(D[:, None, None, None])
    scores.diagonal(dim1=-3, dim2=-1).copy_(diagonal_BHJRRC)
    return scores_MXX, own_BHJRRC


def _dot(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Products in `dtype`, in one tensor of it."""
    return torch.mul(x, y) if x.dtype == dtype else x.to(dtype).mul_(y)


def _matrices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_MNX, k_MNX = q.flatten(0, 2).flatten(-2), k.flatten(0, 2).flatten(-2)
    return q_MNX, k_MNX, v.flatten(0, 2).flatten(1, 2)


def _entering(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state in front of each chunk, `[M, N, P]`."""
    return states[:, :, :-1].to(dtype).flatten(0, 2)


def _by_rank(scores_MXX: Tensor, q_BHJNRC: Tensor) -> Tensor:
    B, H, J, _, R, C = q_BHJNRC.shape
    return scores_MXX.view(B, H, J, R, C, R, C)


def _over_ranks(inside_BHJCC: Tensor) -> Tensor:
    return inside_BHJCC[:, :, :, None, :, None, :]


def _columns(x_BHJC: Tensor) -> Tensor:
    """View numbers per token so that they broadcast over q or k."""
    return x_BHJC[:, :, :, None, None]


def _rows(x_BHJC: Tensor, q_BHJNRC: Tensor) -> Tensor:
    """View numbers per token so that they broadcast over the rows of v or y: `[M, X, 1]`."""
    R = q_BHJNRC.shape[-2]
    return x_BHJC.flatten(0, 2).repeat(1, R)[..., None]


def _times(k: Tensor, x_BHJC: Tensor) -> Tensor:
    return (k * _columns(x_BHJC)).to(k.dtype)


def _exp_where(mask_BJC: Tensor, x_BHJC: Tensor) -> Tensor:
    """Return exp(x) where the mask holds, else 0; masked before exp, which could overflow."""
    return torch.where(mask_BJC[:, None], x_BHJC, float("-inf")).exp()
