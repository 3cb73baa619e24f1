"""M2RNN mixer (arXiv 2603.14360): short convolution, matrix-state recurrence, gate, norm.

Parameter names are those of lm-engine, except that its one input projection and one convolution
are a module per part here, so that each part can be sharded by heads: megacpp/model/upstream.py
maps both ways. Heads are counted by the shapes of weights and activations, not by the
configuration: a weight may hold some of the heads only.

Legend: B rows, T tokens of a row, D model, N heads (of v, forget, gate and state weight), K key,
V value, C convolved channels, Y the channels q heads * K | k heads * K, X = N * V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.m2rnn.descriptor import M2RNN_KIND
from megacpp.blocks.m2rnn.init import m2rnn_rules
from megacpp.blocks.m2rnn.states import M2RNNStates
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linears import linears
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.recurrent_gates import decay, gated_residual
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.norm import NormOverHeads
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.recurrent_decoding import RecurrentDecoding
from megacpp.model.scan import HeadTensors, SequenceScan, TokenTensors
from megacpp.model.short_conv import Convolve, ShortConv, stacked


class DecayGate(Fp32Contract):
    """Forget values exp(-exp(A_log) softplus(x + dt_bias)) in (0, 1), at least fp32."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, x_BTN: Tensor) -> Tensor:
        """Return the forget gate `[B, T, N]` in (0, 1), in at least fp32."""
        return decay(x_BTN, self.A_log, self.dt_bias, True, self.kernels.gates)


class M2RNN(RecurrentDecoding, Fp32Contract):
    """R block mixer, `[B, T, D]` to `[B, T, D]`.

    out = output_projection(norm((y + v D) * silu(g))), with y from the recurrence over q, k, v and
    the forget values, and the norm over all heads at once.
    """

    init_rules = m2rnn_rules
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS
    thin = "in_q", "in_k", "in_forget"  # read x in one product
    linear = staticmethod(F.linear)  # that product; `recompute.compress` puts another

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, r = config, config.m2rnn
        rows = M2RNN_KIND.rows(config)
        N = rows["in_forget.weight"]  # of the whole layer; forward goes by what its weights hold
        self.key_dim, self.value_dim = r.key_dim, r.value_dim
        clip = None if r.gradient_clip is None else StateClip(r.gradient_clip, r.clip_mode)
        self.scan: SequenceScan = M2RNNScan(r.chunk_size, clip)
        self.convolve = Convolve()
        self.in_q = nn.Linear(config.dim, rows["in_q.weight"], bias=False)
        self.in_k = nn.Linear(config.dim, rows["in_k.weight"], bias=False)
        self.in_v = nn.Linear(config.dim, rows["in_v.weight"], bias=False)
        self.in_forget = nn.Linear(config.dim, rows["in_forget.weight"], bias=False)
        self.in_gate = nn.Linear(config.dim, rows["in_gate.weight"], bias=False)
        self.conv_q = ShortConv(rows["in_q.weight"], r.conv_kernel)
        self.conv_k = ShortConv(rows["in_k.weight"], r.conv_kernel)
        self.conv_v = ShortConv(rows["in_v.weight"], r.conv_kernel)
        self.decay_gate = DecayGate(N)
        self.state_weight = nn.Parameter(torch.empty(N, r.value_dim, r.value_dim))
        self.D = nn.Parameter(torch.empty(N, r.value_dim))
        self.g_norm = NormOverHeads(N * r.value_dim, config.norm_eps)
        self.output_projection = nn.Linear(N * r.value_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; convolution and state restart at every document."""
        (qk_BTY, v_BTX), rest = self._project(x_BTD)
        qk_BTY = self.convolve(qk_BTY, stacked(self.conv_q, self.conv_k), docs)
        v_BTX = self.convolve(v_BTX, self.conv_v.weight, docs)
        inputs, rest = self._inputs((qk_BTY, v_BTX), rest)
        y_BTNV = self.scan(inputs, self.head_weights(), docs)
        return self._output(y_BTNV, inputs, rest).to(x_BTD.dtype)

    def head_weights(self) -> M2RNNWeights:
        """Return the scan's parameter, under the fp32 contract."""
        return M2RNNWeights(self.state_weight)

    def _project(self, x_BTD: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, int]]:
        """Return the channels q | k and v, and the rest: forget, gate, number of channels of q.

        q, k and forget read x in one product: all heads share a q and a k, so together they are a
        matrix worth its launch, and copying their few rows is cheap.
        """
        thin = self.in_q.weight, self.in_k.weight, self.in_forget.weight
        q, k, f = (len(w) for w in thin)
        given = {"thin": torch.cat(thin), "linear": self.linear}
        v_BTX, gate_BTX, thin_BT = linears(x_BTD, self.in_v, self.in_gate, **given)
        qk_BTY, f_BTN = thin_BT.split([q + k, f], -1)
        return (qk_BTY, v_BTX), (f_BTN, gate_BTX, q)

    def _inputs(
        self, channels: Sequence[Tensor], rest: tuple[Tensor, Tensor, int]
    ) -> tuple[M2RNNInputs, Tensor]:
        """Return q, k and v by head with the forget gate, and the output's gate."""
        (qk_BTY, v_BTX), (f_BTN, gate_BTX, q_rows) = channels, rest
        q_BTY, k_BTY = qk_BTY.split([q_rows, qk_BTY.shape[-1] - q_rows], -1)
        inputs = M2RNNInputs(
            q_BTY.unflatten(-1, (-1, self.key_dim)),
            k_BTY.unflatten(-1, (-1, self.key_dim)),
            v_BTX.unflatten(-1, (-1, self.value_dim)),
            self.decay_gate(f_BTN),
        )
        return inputs, gate_BTX

    def _output(self, y_BTNV: Tensor, inputs: M2RNNInputs, g_BTX: Tensor) -> Tensor:
        """Add the residual, gate, norm and project to the stream."""
        given = y_BTNV, inputs.v_BTNV, self.D, g_BTX, self.kernels.gates
        gated = self.recompute("conv_bc", gated_residual, *given)
        return self.output_projection(self.g_norm(gated).to(g_BTX.dtype))


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


class M2RNNScan(M2RNNStates):
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
        return self._run(inputs, weights, docs, final_states=False)[0]

    def _run(
        self,
        inputs: M2RNNInputs,
        weights: M2RNNWeights,
        docs: Documents | None,
        entering: Tensor | None = None,
        **states: bool,
    ) -> Any:
        given = inputs.q_BTNK, inputs.k_BTNK, inputs.v_BTNV, inputs.f_BTN, weights.w_NVV, docs
        settings = {"keep_states": self.keep_states, "backend": self.kernels.m2rnn}
        return m2rnn_chunked(*given, entering, self.clip, self.chunk_size, **states, **settings)
