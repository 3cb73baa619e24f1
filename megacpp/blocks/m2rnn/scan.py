"""Scan of M2RNN over whole rows, by token, and over a part of each row that a state enters.

Legend: B rows, T tokens of a row, N heads, K key, V value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.m2rnn.backends import m2rnn_carried, m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.m2rnn.reference import m2rnn_step
from megacpp.model.documents import Documents
from megacpp.model.scan import HeadTensors, TokenTensors
from megacpp.torch_extras import wide


@dataclass(frozen=True, eq=False)
class M2RNNInputs(TokenTensors):
    """Tensors with a token axis; q and k heads may be fewer than those of v and f."""

    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTNV: Tensor
    f_BTN: Tensor


@dataclass(frozen=True, eq=False)
class M2RNNWeights(HeadTensors):
    """State weight of each head."""

    w_NVV: Tensor


class M2RNNScan(nn.Module):
    """Recurrence `[B, T, N, V]`: the only submodule in which all tokens of a document meet.

    Attributes:
        keep_states: save the state of every token for the backward; else it runs the recurrence
            again, chunk by chunk (`m2rnn_chunked`).
    """

    kernels: Kernels = PLAIN_KERNELS
    keep_states: bool = False

    def __init__(self, chunk_size: int, clip: StateClip | None) -> None:
        super().__init__()
        self.chunk_size, self.clip = chunk_size, clip

    def forward(self, inputs: M2RNNInputs, weights: M2RNNWeights, docs: Documents | None) -> Tensor:
        """Return outputs `[B, T, N, V]`."""
        y_BTNV, _ = m2rnn_chunked(
            *self._tensors(inputs, weights),
            docs,
            clip=self.clip,
            chunk_size=self.chunk_size,
            final_states=False,
            keep_states=self.keep_states,
            backend=self.kernels.m2rnn,
        )
        return y_BTNV

    def extend(
        self,
        inputs: M2RNNInputs,
        weights: M2RNNWeights,
        state: Tensor | None,
        docs: Documents | None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of tokens behind a state, and the state `[B, N, K, V]` behind them.

        Args:
            inputs: of a prompt, or of one token.
            weights: state weight.
            state: in front of the token; None: zeros.
            docs: documents of a prompt, one a row; None: it is one token.
        """
        h_BNKV = self.empty_state(inputs, weights) if state is None else state
        if docs is not None:
            return self.carried(inputs, weights, docs, h_BNKV)
        q, k, v, f = (x[:, 0] for x in inputs.tensors().values())
        y_BNV, h_BNKV = m2rnn_step(q, k, v, f, weights.w_NVV, h_BNKV)
        return y_BNV[:, None], h_BNKV

    def empty_state(self, inputs: M2RNNInputs, weights: M2RNNWeights) -> Tensor:
        """Zeros `[B, N, K, V]`, at least fp32."""
        (B, _, N, V), K = inputs.v_BTNV.shape, inputs.k_BTNK.shape[-1]
        return wide(inputs.v_BTNV).new_zeros(B, N, K, V)

    def carried(
        self, inputs: M2RNNInputs, weights: M2RNNWeights, docs: Documents, entering: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of a part of each row, and the state behind it, `[B, N, K, V]`.

        Args:
            inputs: q, k, v and f of the part.
            weights: state weight.
            docs: documents of the part.
            entering: state in front of it, `[B, N, K, V]`.
        """
        return m2rnn_carried(
            *self._tensors(inputs, weights),
            docs,
            entering,
            self.clip,
            self.chunk_size,
            self.keep_states,
            backend=self.kernels.m2rnn,
        )

    def _tensors(
        self, inputs: M2RNNInputs, weights: M2RNNWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return inputs.q_BTNK, inputs.k_BTNK, inputs.v_BTNV, inputs.f_BTN, weights.w_NVV
