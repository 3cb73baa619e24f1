"""Gated delta rule of a row whose segments are scanned apart: summaries, and their fold.

The state behind a segment is affine in the one that enters it, S' = M S + U: M is the product of
its tokens' transitions exp(g) (I - beta k k^T), later tokens on the left, and U the state that its
own tokens leave. Composition is associative, (M2 M1, M2 U1 + U2), and not commutative.

Legend: S segments in place of rows, L segments of a row, N value heads, K key, V value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.model.documents import Documents
from megacpp.model.scan import RowTensors
from megacpp.torch_extras import no_autocast, wide


@dataclass(frozen=True, eq=False)
class DeltaRuleSummary(RowTensors):
    """Numbers of a segment that its neighbours need, at least fp32.

    Attributes:
        through_SNKK: M; 0 where a document starts behind the segment's first token.
        added_SNKV: U, of the tokens of the segment's last document.
    """

    through_SNKK: Tensor
    added_SNKV: Tensor


@dataclass(frozen=True, eq=False)
class DeltaState(RowTensors):
    """State of each row, at least fp32."""

    S_BNKV: Tensor


def summarize(
    k_SCHK: Tensor,
    v_SCNV: Tensor,
    g_SCN: Tensor,
    beta_SCN: Tensor,
    docs: Documents | None,
    chunk_size: int = 64,
    *,
    backend: str = "torch",
) -> DeltaRuleSummary:
    """Summary of each row as a segment: one run of its states, without queries and outputs.

    M is the state behind a segment that is entered by I and writes no values, so that U and M are
    found side by side. Keeps its inputs for backward, which are the scan's too.

    Args:
        k_SCHK: keys before normalisation.
        v_SCNV: values.
        g_SCN: log decay.
        beta_SCN: write strength.
        docs: documents of the segments; None: no document starts in them.
        chunk_size: tokens of a chunk.
        backend: as in `gated_delta_rule`.
    """
    (S, _, N, V), K = v_SCNV.shape, k_SCHK.shape[-1]
    entering_KX = torch.eye(K, V + K, dtype=wide(v_SCNV[:0]).dtype, device=v_SCNV.device).roll(V, 1)
    entering = entering_KX.expand(S, N, K, V + K)
    inputs = None, k_SCHK, v_SCNV, g_SCN, beta_SCN
    _, state = gated_delta_rule(*inputs, docs, entering, chunk_size, backend=backend)
    added_SNKV, through_SNKK = state.split([V, K], -1)
    return DeltaRuleSummary(through_SNKK, added_SNKV)


def fold(
    segments: Sequence[DeltaRuleSummary], carries_LS: Tensor, entering_SNKV: Tensor | None = None
) -> list[DeltaState]:
    """State that enters each segment of a row, and the one behind the last.

    Args:
        segments: from left to right; S counts rows here.
        carries_LS: bool, no document starts in the segment, its first token included. A state that
            enters at the start of a document is not removed here: the segment on the left left it.
        entering_SNKV: the state in front of the first segment; None: zeros.
    """
    states = [torch.zeros_like(segments[0].added_SNKV) if entering_SNKV is None else entering_SNKV]
    with no_autocast(states[0]):
        for segment, carries_S in zip(segments, carries_LS, strict=True):
            passed_SNKV = segment.through_SNKK @ states[-1]
            passed_SNKV = torch.where(carries_S[:, None, None, None], passed_SNKV, 0.0)
            states.append(passed_SNKV + segment.added_SNKV)
    return [DeltaState(S_BNKV) for S_BNKV in states]
