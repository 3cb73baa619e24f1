"""Scan of Mamba-3 over whole rows, and over segments whose entering states are folded.

Legend: B rows, T tokens of a row, H heads, P head dim, S segments, L segments of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_scan
from megacpp.kernels.mamba3.segments import SegmentSummary, fold, summarize
from megacpp.model.documents import Documents
from megacpp.model.recompute import PLAIN, Recompute


class Mamba3Scan(nn.Module):
    """The recurrence `[B, T, H, P]`: where all tokens of a document meet."""

    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, pairing: Pairing, chunk_size: int) -> None:
        super().__init__()
        self.pairing: Pairing = pairing
        self.chunk_size = chunk_size

    def forward(
        self,
        inputs: ScanInputs,
        weights: HeadWeights,
        docs: Documents,
        entering: Mamba3State | None = None,
    ) -> Tensor:
        given = (inputs, weights, docs, self.pairing, self.chunk_size, entering)
        return mamba3_scan(*given, recompute=self.recompute, backend=self.kernels.mamba3)[0]

    def summarize(
        self, inputs: ScanInputs, weights: HeadWeights, docs: Documents
    ) -> SegmentSummary:
        """What the other segments have to know of each row, at least fp32."""
        return summarize(inputs, weights, docs, self.pairing)

    def fold(
        self, summaries: Sequence[SegmentSummary], carries_LS: Tensor, weights: HeadWeights
    ) -> list[Mamba3State]:
        """The state that enters each segment, in its frame, and the one behind the last."""
        return fold(summaries, carries_LS, weights, self.pairing)
