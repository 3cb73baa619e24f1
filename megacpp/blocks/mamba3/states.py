"""States at the ends of rows of a Mamba-3 scan, for decoding and for context parallelism.

Legend: as megacpp/blocks/mamba3/module.py, and S rows, L segments of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.mamba3.chunks import mamba3_scan
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_step
from megacpp.kernels.mamba3.segments import SegmentSummary, fold, summarize
from megacpp.model.documents import Documents


class Mamba3States(nn.Module):
    """Part of a scan that returns states, which a training forward on one rank doesn't."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, pairing: Pairing, chunk_size: int) -> None:
        super().__init__()
        self.pairing: Pairing = pairing
        self.chunk_size = chunk_size

    def prompt(
        self, inputs: ScanInputs, weights: HeadWeights, docs: Documents
    ) -> tuple[Tensor, Mamba3State]:
        """Return outputs of prompts, one a row, and the state behind them."""
        given = inputs, weights, docs, self.pairing, self.chunk_size
        y_BTHP, state = mamba3_scan(*given, backend=self.kernels.mamba3, with_state=True)
        assert state is not None
        return y_BTHP, state

    def token(
        self, inputs: ScanInputs, weights: HeadWeights, state: Mamba3State | None
    ) -> tuple[Tensor, Mamba3State]:
        """Return the output `[B, 1, H, P]` behind a state (None: zeros), and the next state."""
        return mamba3_step(inputs, weights, state, self.pairing)

    def summarize(
        self, inputs: ScanInputs, weights: HeadWeights, docs: Documents
    ) -> SegmentSummary:
        """Return the summary of each row for the other segments, in at least fp32."""
        return summarize(inputs, weights, docs, self.pairing)

    def fold(
        self, summaries: Sequence[SegmentSummary], carries_LS: Tensor, weights: HeadWeights
    ) -> list[Mamba3State]:
        """Return the state that enters each segment, in its frame, and the one behind the last."""
        return fold(summaries, carries_LS, weights, self.pairing)
