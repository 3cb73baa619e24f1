"""Scan of Mamba-3 over whole rows, by token, and over segments whose entering states are folded.

Legend: B rows, T tokens of a row, H heads, P head dim, S segments, L segments of a row.
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
from megacpp.model.recompute import PLAIN, Recompute


class Mamba3Scan(nn.Module):
    """Recurrence `[B, T, H, P]`: the only submodule in which all tokens of a document meet."""

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
        """Return outputs `[B, T, H, P]`.

        Args:
            inputs: of every token.
            weights: of the heads.
            docs: documents, at which the state restarts.
            entering: state in front of each row's first token; None: zeros.
        """
        given = (inputs, weights, docs, self.pairing, self.chunk_size, entering)
        return mamba3_scan(*given, recompute=self.recompute, backend=self.kernels.mamba3)[0]

    def extend(
        self,
        inputs: ScanInputs,
        weights: HeadWeights,
        state: Mamba3State | None,
        docs: Documents | None,
    ) -> tuple[Tensor, Mamba3State]:
        """Return outputs of tokens behind a state, and the state behind them.

        Args:
            inputs: of a prompt, or of one token.
            weights: of the heads.
            state: in front of the token; None: zeros.
            docs: documents of a prompt, one a row; None: it is one token.
        """
        if docs is None:
            return mamba3_step(inputs, weights, state, self.pairing)
        given = inputs, weights, docs, self.pairing, self.chunk_size
        y_BTHP, state = mamba3_scan(*given, backend=self.kernels.mamba3, with_state=True)
        assert state is not None
        return y_BTHP, state

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
