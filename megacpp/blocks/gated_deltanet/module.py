"""Gated DeltaNet mixer (arXiv 2412.06464): short convolution, gated delta rule, gated norm.

Parameter names are those of Qwen3-Next, except that its two input projections and one convolution
are a module per part here, so that each part can be sharded by heads:
megacpp/model/upstream.py maps both ways. Heads are counted by the shapes of weights and
activations, which may hold some of the heads only.

Legend: B rows, T tokens of a row, D model, H key heads, N value heads (N / H neighbours share a key
head), K key, V value, C convolved channels q | k | v, X = N V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.blocks.gated_deltanet.scan import NO_WEIGHTS, DeltaInputs, GatedDeltaScan
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.causal_conv import causal_conv_step, last_inputs
from megacpp.kernels.gated_delta_rule.reference import gated_delta_step
from megacpp.kernels.linears import linears
from megacpp.kernels.recurrent_gates import decay, gated_ranks
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.init import LogUniform, Rule, TimeStepBias
from megacpp.model.linear_init import input_rule, output_rule
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.short_conv import Convolve, ShortConv, stacked
from megacpp.torch_extras import wide


@dataclass(frozen=True)
class GatedDeltaState:
    """State that decoding carries from token to token."""

    S_BNKV: Tensor  # at least fp32
    taps_BCJ: Tensor  # the last conv_kernel - 1 inputs of the convolution


class GatedDeltaNet(Fp32Contract):
    """G block mixer, `[B, T, D]` to `[B, T, D]`.

    out = out_proj(norm(o) * silu(z)), with o from the gated delta rule over q, k, v, the log decay
    -exp(A_log) softplus(a + dt_bias) and the write strength sigmoid(b); one norm weight `[V]`
    serves all heads.
    """

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
        q, k, v, z_BTX, b_BTN, a_BTN = self._project(x_BTD)
        weight_C1K = stacked(self.conv_q, self.conv_k, self.conv_v)
        qkv_BTC = self.convolve(torch.cat([q, k, v], -1), weight_C1K, docs)
        q, k, v = qkv_BTC.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        o_BTNV = self.scan(self._inputs(q, k, v, b_BTN, a_BTN), NO_WEIGHTS, docs)
        return self._output(o_BTNV, z_BTX).to(x_BTD.dtype)

    def init_state(
        self, batch_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> GatedDeltaState:
        """Return the state of `batch_size` empty documents; `dtype` is that of the activations."""
        g = self.delta
        shape = batch_size, g.num_value_heads, g.key_dim, g.value_dim
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        channels = sum(conv.num_channels for conv in (self.conv_q, self.conv_k, self.conv_v))
        return GatedDeltaState(
            torch.zeros(shape, dtype=state_dtype, device=device),
            torch.zeros(batch_size, channels, g.conv_kernel - 1, dtype=dtype, device=device),
        )

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, GatedDeltaState]:
        """Return the output `[B, T, D]` of rows of one document each, and the state behind them."""
        q, k, v, z_BTX, b_BTN, a_BTN = self._project(x_BTD)
        qkv_BTC = torch.cat([q, k, v], -1)
        taps = last_inputs(qkv_BTC, self.delta.conv_kernel - 1)
        qkv_BTC = self.convolve(qkv_BTC, stacked(self.conv_q, self.conv_k, self.conv_v), docs)
        q, k, v = qkv_BTC.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        assert isinstance(self.scan, GatedDeltaScan)
        o_BTNV, S_BNKV = self.scan.with_state(self._inputs(q, k, v, b_BTN, a_BTN), docs)
        return self._output(o_BTNV, z_BTX).to(x_BTD.dtype), GatedDeltaState(S_BNKV, taps)

    def step(self, x_BD: Tensor, state: GatedDeltaState) -> tuple[Tensor, GatedDeltaState]:
        """Decode one token: return the output `[B, D]` and the next state."""
        q, k, v, z_BX, b_BN, a_BN = self._project(x_BD)
        weight_C1K = stacked(self.conv_q, self.conv_k, self.conv_v)
        qkv_BC, taps = causal_conv_step(torch.cat([q, k, v], -1), state.taps_BCJ, weight_C1K)
        q, k, v = qkv_BC.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
        inputs = self._inputs(q, k, v, b_BN, a_BN)
        o_BNV, S_BNKV = gated_delta_step(*inputs.in_order(), state.S_BNKV)
        z_B1X = None if z_BX is None else z_BX[:, None]
        y_BD = self._output(o_BNV[:, None], z_B1X)[:, 0]
        return y_BD.to(x_BD.dtype), GatedDeltaState(S_BNKV, taps)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter, by name below the mixer."""
        convs = {"conv_q": self.conv_q, "conv_k": self.conv_k, "conv_v": self.conv_v}
        rules: dict[str, Rule] = {
            "A_log": LogUniform(0.0, 16.0),
            "dt_bias": TimeStepBias(1e-3, 0.1, 1e-4),
            "norm.weight": self.norm.init_rules()["weight"],
            "out_proj.weight": output_rule(self.config),
        }
        into = (name for name in GATED_DELTANET.rows(self.config) if name.startswith("in_"))
        rules |= {name: input_rule(self.config) for name in into}
        return rules | {f"{name}.weight": conv.rule() for name, conv in convs.items()}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Return q, k, v, z, b and a of `[..., D]`; the thin b and a in one product."""
        thin = self.in_b.weight, self.in_a.weight
        gate = () if self.in_z is None else (self.in_z,)
        given = {"thin": torch.cat(thin), "linear": self.linear}
        q, k, v, *z, ba = linears(x, self.in_q, self.in_k, self.in_v, *gate, **given)
        b, a = ba.split([len(w) for w in thin], -1)
        return q, k, v, z[0] if z else None, b, a

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor) -> DeltaInputs:
        """Tensors of the scan by head, from convolved channels `[..., H K]`, `[..., N V]`."""
        beta = torch.sigmoid(wide(b))
        return DeltaInputs(
            q.unflatten(-1, (-1, self.delta.key_dim)),
            k.unflatten(-1, (-1, self.delta.key_dim)),
            v.unflatten(-1, (-1, self.delta.value_dim)),
            decay(a, self.A_log, self.dt_bias, False, self.kernels.gates),
            2 * beta if self.delta.allow_neg_eigval else beta,
        )

    def _output(self, o_BTNV: Tensor, z_BTX: Tensor | None) -> Tensor:
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
