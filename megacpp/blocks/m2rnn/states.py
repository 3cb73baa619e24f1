"""States at the ends of rows of an M2RNN scan, for decoding and for context parallelism.

Legend: as megacpp/blocks/m2rnn/module.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megacpp.kernels.m2rnn.reference import m2rnn_step
from megacpp.model.documents import Documents
from megacpp.torch_extras import wide

if TYPE_CHECKING:
    from megacpp.blocks.m2rnn.module import M2RNNInputs, M2RNNWeights


class M2RNNStates(nn.Module):
    """Part of a scan that returns states, which a training forward on one rank doesn't.

    Its subclass has `_run`, the recurrence.
    """

    _run: Any

    def prompt(
        self, inputs: M2RNNInputs, weights: M2RNNWeights, docs: Documents
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of prompts, one a row, and the state `[B, N, K, V]` behind them."""
        return self.carried(inputs, weights, docs, self.empty_state(inputs, weights))

    def token(
        self, inputs: M2RNNInputs, weights: M2RNNWeights, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `[B, 1, N, V]` behind a state `[B, N, K, V]` (None: zeros), and the next state."""
        h_BNKV = self.empty_state(inputs, weights) if state is None else state
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
        return self._run(inputs, weights, docs, entering, by_row=True)
