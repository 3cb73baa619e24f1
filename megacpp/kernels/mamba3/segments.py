"""Mamba-3 state across segments of a row that are scanned apart: summaries, and their fold.

A segment counts angles from 0 in front of its first token (its frame). Only differences of angles
matter, so a state moves to the next segment's frame by a turn of its N axis. In the frame of the
segment on its right, a segment leaves

    E' = [no document starts in it] e^decay Turn(-turn) (E + beta v k^T) + added

of the state E that entered it; beta = dt (1 - lambda) is of its first token, k and v are of the
token in front of that. `added` is made of its own tokens, those of its last document.

Legend: as megacpp/kernels/mamba3/inputs.py, and S segments in place of rows, C tokens of a segment,
L segments of a row. Inside, the N axis is ordered so that pair i is rows i and i + N/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.ops import check_contract, from_halves, to_halves
from megacpp.model.documents import Documents
from megacpp.model.scan import RowTensors
from megacpp.torch_extras import once_differentiable, wide


@dataclass(frozen=True, eq=False)
class SegmentSummary(RowTensors):
    """Summary of a segment for its neighbours, at least fp32.

    Attributes:
        decay: sum of the log decays, `[S, H]`.
        turn: sum of the turns of the segment's last document modulo 2 pi, `[S, H, A]`.
        added: the state its own tokens leave, without the part of the last token's weight that
            the next token decides, in the frame of the next segment, `[S, H, P, N]`, N as halves.
        beta: dt (1 - lambda) of the first token, `[S, H]`.
        k: K of the last token without bias (which is its value in the next frame), `[S, R, G, N]`.
        v: V of the last token, before mimo_x, `[S, H, P]`.
    """

    decay: Tensor
    turn: Tensor
    added: Tensor
    beta: Tensor
    k: Tensor
    v: Tensor


def summarize(
    inputs: ScanInputs, weights: HeadWeights, docs: Documents, pairing: Pairing
) -> SegmentSummary:
    """Return the summary of each row of `inputs`, a segment: one weighted sum over tokens, no scan.

    Saves only its inputs for backward, which are the scan's too, and rotates K again there.

    Args:
        inputs: of the tokens of each segment.
        weights: of the heads.
        docs: documents of the segments.
        pairing: of the rotated dims.
    """
    check_contract(inputs, weights)
    tail_SC = None if docs.whole else docs.memo("tail", lambda: _last_document(docs))
    with torch.autocast(inputs.V.device.type, enabled=False):
        added_SHPN, decay_SH, turn_SHA = _Added.apply(  # type: ignore[misc]
            pairing,
            tail_SC,
            inputs.K,
            inputs.V,
            inputs.ADT,
            inputs.DT,
            inputs.Trap,
            inputs.Angles,
            weights.K_bias,
            weights.mimo_x,
        )
        beta_SH = inputs.DT[..., 0] * torch.sigmoid(-wide(inputs.Trap[..., 0]))
        k_SRGN, v_SHP = wide(inputs.K[:, -1]), wide(inputs.V[:, -1])
        return SegmentSummary(decay_SH, turn_SHA, added_SHPN, beta_SH, k_SRGN, v_SHP)


def fold(
    segments: Sequence[SegmentSummary],
    carries_LS: Tensor,
    weights: HeadWeights,
    pairing: Pairing,
    entering: Mamba3State | None = None,
) -> list[Mamba3State]:
    """Return the state that enters each segment of a row, in its frame, and the one after the last.

    Args:
        segments: of the row, from left to right; S counts rows here.
        carries_LS: bool, no document starts in the segment. A state that enters at the start of a
            document is not removed here, as it is what the segment on the left left behind.
        weights: of the heads.
        pairing: of the rotated dims.
        entering: the state in front of the first segment, in its frame; None: zeros.
    """
    first = segments[0]
    R, _, N = first.k.shape[1:]
    nothing = Mamba3State.zeros(first.v, first.turn.shape[-1], R, N)
    states = [nothing if entering is None else entering]
    ssm_SHPN = to_halves(states[0].ssm, pairing)
    with torch.autocast(first.v.device.type, enabled=False):
        for segment, carries_S in zip(segments, carries_LS, strict=True):
            v_SHRP = weights.ranks_of_token(states[-1].v)
            halo_SHPN = v_SHRP.mT @ to_halves(states[-1].k, pairing)
            ssm_SHPN = torch.addcmul(ssm_SHPN, segment.beta[..., None, None], halo_SHPN)
            ssm_SHPN = turned(ssm_SHPN, -segment.turn[:, :, None])
            ssm_SHPN = segment.decay.exp()[..., None, None] * ssm_SHPN
            carried_SHPN = torch.where(carries_S[:, None, None, None], ssm_SHPN, 0.0)
            ssm_SHPN = carried_SHPN + segment.added
            k_SHRN = per_head(segment.k.transpose(1, 2), weights.K_bias)
            ssm = from_halves(ssm_SHPN, pairing)
            states.append(Mamba3State(nothing.angle, ssm, k_SHRN, segment.v))
    return states


class _Added(torch.autograd.Function):
    """Autograd function of `_added` that saves its inputs alone, not K rotated for each head."""

    @staticmethod
    def forward(
        ctx: Any, pairing: Pairing, tail_SC: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.pairing = pairing
        ctx.save_for_backward(tail_SC, *inputs)
        return _added(pairing, tail_SC, *inputs)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors  # two of them may be None
        tail_SC, *inputs = saved
        leaves: list[Any] = [x if x is None else x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
            outputs = _added(ctx.pairing, tail_SC, *leaves)
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return None, None, *(None if x is None else next(found) for x in leaves)


def _added(
    pairing: Pairing,
    tail_SC: Tensor | None,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Angles: Tensor,
    K_bias: Tensor,
    mimo_x: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state from a segment's own tokens, and the sums of its log decays and turns."""
    dtype, Trap = DT.dtype, wide(Trap)
    ahead_SHC = F.pad((DT * torch.sigmoid(-Trap))[..., 1:], (0, 1))
    weight_SHC = (DT * torch.sigmoid(Trap) + ahead_SHC) * _later(ADT, -1).exp().to(dtype)
    turn_SHCA = (math.pi * torch.tanh(wide(Angles))).transpose(1, 2) * DT[..., None]
    if tail_SC is not None:
        weight_SHC = torch.where(tail_SC[:, None], weight_SHC, 0.0)
        turn_SHCA = torch.where(tail_SC[:, None, :, None], turn_SHCA, 0.0)
    # Backwards from the end of the segment, where the next frame has its 0.
    angle_SHCA = torch.remainder(-_later(turn_SHCA, 2), 2 * math.pi).to(dtype)
    k_SGCRN = to_halves(wide(K), pairing).permute(0, 3, 1, 2, 4)
    k_SHCRN = per_head(k_SGCRN, to_halves(K_bias, pairing)[:, None])
    k_SHCRN = turned(k_SHCRN, angle_SHCA[:, :, :, None])
    v_SHCP = wide(V).transpose(1, 2) * weight_SHC[..., None]
    added_SHPRN = (v_SHCP.mT @ k_SHCRN.flatten(-2)).unflatten(-1, K_bias.shape[1:])
    if mimo_x is not None:  # after the sum over tokens: V of every rank is never made
        added_SHPRN = added_SHPRN * mimo_x.mT[..., None]
    total_SHA = torch.remainder(turn_SHCA.double().sum(2), 2 * math.pi).to(dtype)
    return added_SHPRN.sum(-2), ADT.sum(-1), total_SHA


def _later(x: Tensor, dim: int) -> Tensor:
    """Sum over later tokens, in fp64: only the remainder of thousands of radians matters."""
    from_here = x.double().flip(dim).cumsum(dim).flip(dim)
    beyond = from_here.narrow(dim, 1, x.shape[dim] - 1)
    return torch.cat([beyond, torch.zeros_like(from_here.narrow(dim, 0, 1))], dim)


def _last_document(docs: Documents) -> Tensor:
    """Return bool `[S, C]`: the token's document still runs at the end of its segment."""
    run_SC = docs.starts_BT.cumsum(1)
    return run_SC == run_SC[:, -1:]


def per_head(x_SGXN: Tensor, bias_HXN: Tensor) -> Tensor:
    """Return a group's tensor for each of its heads (dim 1), plus the head's own bias."""
    return x_SGXN.repeat_interleave(len(bias_HXN) // x_SGXN.shape[1], 1) + bias_HXN


def turned(x_N: Tensor, angle_A: Tensor) -> Tensor:
    """Rotate pairs (i, i + N/2) of the last dim by angle i; pairs without an angle stay."""
    turned, half = angle_A.shape[-1], x_N.shape[-1] // 2
    first, first_rest, second, second_rest = x_N.split(
        [turned, half - turned, turned, half - turned], -1
    )
    cos, sin = angle_A.cos(), angle_A.sin()
    parts = [first * cos - second * sin, first_rest, first * sin + second * cos, second_rest]
    return torch.cat(parts, -1)
