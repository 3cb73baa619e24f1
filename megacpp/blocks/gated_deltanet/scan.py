"""Scan of Gated DeltaNet over whole rows, by token, and over segments that a fold joins.

Legend: B rows, T tokens of a row, H key heads, N value heads, K key, V value, S segments, L of them
in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.reference import gated_delta_step
from megacpp.kernels.gated_delta_rule.segments import DeltaRuleSummary, DeltaState, fold, summarize
from megacpp.model.documents import Documents
from megacpp.model.scan import HeadTensors, TokenTensors
from megacpp.torch_extras import wide

NO_WEIGHTS = HeadTensors()


@dataclass(frozen=True, eq=False)
class DeltaInputs(TokenTensors):
    """Tensors with a token axis: q and k before normalisation, log decay, write strength."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    v_BTNV: Tensor
    g_BTN: Tensor
    beta_BTN: Tensor

    def in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return all tensors in the order of the kernels' arguments."""
        return self.q_BTHK, self.k_BTHK, self.v_BTNV, self.g_BTN, self.beta_BTN


class GatedDeltaScan(nn.Module):
    """Recurrence `[B, T, N, V]`: the only submodule in which tokens of a document meet."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self,
        inputs: DeltaInputs,
        weights: HeadTensors,
        docs: Documents | None,
        entering: DeltaState | None = None,
    ) -> Tensor:
        """Return outputs `[B, T, N, V]`.

        Args:
            inputs: q, k, v and gates.
            weights: none; the call is that of `FoldingScan`.
            docs: documents, at which the state restarts; None: one per row.
            entering: state in front of each row's first token; None: zeros.
        """
        initial_BNKV = None if entering is None else entering.S_BNKV
        given = *inputs.in_order(), docs, initial_BNKV, self.chunk_size
        return gated_delta_rule(*given, backend=self.kernels.gated_delta_rule)[0]

    def extend(
        self,
        inputs: DeltaInputs,
        weights: HeadTensors,
        state: Tensor | None,
        docs: Documents | None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of tokens behind a state, and the state `[B, N, K, V]` behind them.

        Args:
            inputs: of a prompt, or of one token.
            weights: none.
            state: in front of the token; None: zeros.
            docs: documents of a prompt, one a row; None: it is one token.
        """
        if docs is not None:
            given = *inputs.in_order(), docs, None, self.chunk_size
            return gated_delta_rule(*given, backend=self.kernels.gated_delta_rule)
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
