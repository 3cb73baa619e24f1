"""States at the ends of rows of a gated delta scan, for decoding and for context parallelism.

Legend: as megacpp/blocks/gated_deltanet/module.py, and S segments, L of them in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_step
from megacpp.kernels.gated_delta_rule.segments import DeltaRuleSummary, DeltaState, fold, summarize
from megacpp.model.documents import Documents
from megacpp.model.scan import HeadTensors
from megacpp.torch_extras import wide

if TYPE_CHECKING:
    from megacpp.blocks.gated_deltanet.module import DeltaInputs


class GatedDeltaStates(nn.Module):
    """Part of a scan that returns states, which a training forward on one rank doesn't."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def prompt(
        self, inputs: DeltaInputs, weights: HeadTensors, docs: Documents
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of prompts, one a row, and the state `[B, N, K, V]` behind them."""
        given = *inputs.in_order(), docs, None, self.chunk_size
        return gated_delta_rule(*given, backend=self.kernels.gated_delta_rule)

    def token(
        self, inputs: DeltaInputs, weights: HeadTensors, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `[B, 1, N, V]` behind a state `[B, N, K, V]` (None: zeros), and the next state."""
        (B, _, N, V), K = inputs.v_BTNV.shape, inputs.k_BTHK.shape[-1]
        S_BNKV = wide(inputs.v_BTNV).new_zeros(B, N, K, V) if state is None else state
        q, k, v, g, beta = (x[:, 0] for x in inputs.in_order())
        o_BNV, S_BNKV = gated_delta_step(q, k, v, g, beta, S_BNKV)
        return o_BNV[:, None], S_BNKV

    def summarize(
        self, inputs: DeltaInputs, weights: HeadTensors, docs: Documents
    ) -> DeltaRuleSummary:
        """Numbers of each row that the segments on its right need, at least fp32."""
        given = *inputs.in_order()[1:], docs, self.chunk_size
        return summarize(*given, backend=self.kernels.gated_delta_rule)

    def fold(
        self, summaries: Sequence[DeltaRuleSummary], carries_LS: Tensor, weights: HeadTensors
    ) -> list[DeltaState]:
        """State that enters each segment of a row, and the one behind the last."""
        return fold(summaries, carries_LS)
