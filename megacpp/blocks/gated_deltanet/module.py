"""Gated DeltaNet mixer (arXiv 2412.06464): short convolution, gated delta rule, gated norm.

Parameter names are those of Qwen3-Next, except that its two input projections and one convolution
are a module per part here, so that each part can be sharded by heads:
megacpp/model/upstream.py maps both ways. Heads are counted by the shapes of weights and
activations, which may hold some of the heads only.

Legend: B rows, T tokens of a row, D model, H key heads, N value heads (N / H neighbours share a key
head), K key, V value, C convolved channels q | k | v, X = N V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.gated_deltanet.init import gated_deltanet_rules
from megacpp.blocks.gated_deltanet.states import GatedDeltaStates
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.gated_delta_rule.chunks import gated_delta_rule
from megacpp.kernels.gated_delta_rule.segments import DeltaState
from megacpp.kernels.linears import linears
from megacpp.kernels.recurrent_gates import decay, gated_ranks
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.recurrent_decoding import RecurrentDecoding
from megacpp.model.scan import HeadTensors, TokenTensors
from megacpp.model.short_conv import Convolve, ShortConv, stacked
from megacpp.torch_extras import wide

NO_WEIGHTS = HeadTensors()


class GatedDeltaNet(RecurrentDecoding, Fp32Contract):
    """G block mixer, `[B, T, D]` to `[B, T, D]`.

    out = out_proj(norm(o) * silu(z)), with o from the gated delta rule over q, k, v, the log decay
    -exp(A_log) softplus(a + dt_bias) and the write strength sigmoid(b); one norm weight `[V]`
    serves all heads.
    """

    init_rules = gated_deltanet_rules
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS
    thin = "in_b", "in_a"  # read x in one product
    linear = staticmethod(F.linear)  # that product; `recompute.compress` puts another

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        g, sizes = config.gated_deltanet, GATED_DELTANET.dims(config)
        self.config, self.delta = config, g
        # Of the whole layer; forward goes by what its weights hold.
        D, N, keys, values = config.dim, g.num_value_heads, sizes["Q"], sizes["W"]
        self.scan, self.convolve = GatedDeltaScan(g.chunk_size), Convolve()
        self.in_q = nn.Linear(D, keys, bias=False)
        self.in_k = nn.Linear(D, keys, bias=False)
        self.in_v = nn.Linear(D, values, bias=False)
        self.in_z = nn.Linear(D, values, bias=False) if g.gate else None
        self.in_b = nn.Linear(D, N, bias=False)
        self.in_a = nn.Linear(D, N, bias=False)
        self.conv_q = ShortConv(keys, g.conv_kernel)
        self.conv_k = ShortConv(keys, g.conv_kernel)
        self.conv_v = ShortConv(values, g.conv_kernel)
        self.A_log = nn.Parameter(torch.empty(N))
        self.dt_bias = nn.Parameter(torch.empty(N))
        self.norm = RMSNorm(g.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, D, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; convolution and state restart at every document."""
        qkv, rest = self._project(x_BTD)
        weight_C1K = stacked(*self.short_convs().values())
        qkv_BTC = self.convolve(torch.cat(qkv, -1), weight_C1K, docs)
        qkv = qkv_BTC.split([part.shape[-1] for part in qkv], -1)
        inputs, rest = self._inputs(qkv, rest)
        o_BTNV = self.scan(inputs, self.head_weights(), docs)
        return self._output(o_BTNV, inputs, rest).to(x_BTD.dtype)

    def head_weights(self) -> HeadTensors:
        """Return the scan's parameters: none."""
        return NO_WEIGHTS

    def _project(self, x_BTD: Tensor) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return q, k and v, and the rest: z, b and a; the thin b and a in one product."""
        thin = self.in_b.weight, self.in_a.weight
        gate = () if self.in_z is None else (self.in_z,)
        given = {"thin": torch.cat(thin), "linear": self.linear}
        q, k, v, *z, ba = linears(x_BTD, self.in_q, self.in_k, self.in_v, *gate, **given)
        b, a = ba.split([len(w) for w in thin], -1)
        return (q, k, v), (z[0] if z else None, b, a)

    def _inputs(
        self, channels: Sequence[Tensor], rest: tuple[Any, ...]
    ) -> tuple[DeltaInputs, Tensor | None]:
        """Return tensors of the scan by head, and the output's gate."""
        (q, k, v), (z_BTX, b, a) = channels, rest
        beta = torch.sigmoid(wide(b))
        inputs = DeltaInputs(
            q.unflatten(-1, (-1, self.delta.key_dim)),
            k.unflatten(-1, (-1, self.delta.key_dim)),
            v.unflatten(-1, (-1, self.delta.value_dim)),
            decay(a, self.A_log, self.dt_bias, False, self.kernels.gates),
            2 * beta if self.delta.allow_neg_eigval else beta,
        )
        return inputs, z_BTX

    def _output(self, o_BTNV: Tensor, _: DeltaInputs, z_BTX: Tensor | None) -> Tensor:
        """Norm each head, gate it, and project it to the stream."""
        how = {"norm_eps": self.norm.eps, "dtype": o_BTNV.dtype, "backend": self.kernels.gates}
        gated_BTNV = self.recompute(
            "conv_bc",
            partial(gated_ranks, **how),
            o_BTNV[..., None, :],
            None if z_BTX is None else z_BTX.unflatten(-1, (-1, self.delta.value_dim)),
            self.norm.weight.expand(o_BTNV.shape[2], -1),
            None,
            None,
        )
        return self.out_proj(gated_BTNV.flatten(2))


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


class GatedDeltaScan(GatedDeltaStates):
    """Recurrence `[B, T, N, V]`: the only submodule in which tokens of a document meet."""

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
