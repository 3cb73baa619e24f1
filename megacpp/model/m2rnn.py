"""The M2RNN mixer (arXiv 2603.14360): short convolution, matrix-state recurrence, gate, norm.

Parameter names and row order are those of lm-engine, so that its checkpoints load as they are.

Legend: B rows, T tokens of a row, D model, N heads (of v, forget, gate and state weight), K key,
V value, C convolved channels: q heads * K | k heads * K | N * V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.config import ModelConfig
from megacpp.kernels.causal_conv import causal_conv, causal_conv_step
from megacpp.kernels.m2rnn import StateClip, m2rnn_chunked, m2rnn_step
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract, wide
from megacpp.model.init import Constant, Identity, LogUniform, Rule, TimeStepBias, Uniform
from megacpp.model.linear_init import input_rule, output_rule
from megacpp.model.norm import RMSNorm


@dataclass(frozen=True)
class M2RNNState:
    """What decoding carries from token to token."""

    h_BNKV: Tensor  # at least fp32
    taps_BCJ: Tensor  # the last conv_kernel - 1 inputs of the convolution


class DecayGate(Fp32Contract):
    """Forget values exp(-exp(A_log) softplus(x + dt_bias)) in (0, 1), at least fp32."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, x_BTN: Tensor) -> Tensor:
        return torch.exp(-torch.exp(self.A_log) * F.softplus(wide(x_BTN) + self.dt_bias))

    def init_rules(self) -> dict[str, Rule]:
        return {"A_log": LogUniform(0.0, 16.0), "dt_bias": TimeStepBias(1e-3, 0.1, 1e-4)}


class ShortConv(nn.Module):
    """Depthwise causal convolution with SiLU; the weight is stored as `nn.Conv1d` stores it."""

    def __init__(self, num_channels: int, num_taps: int) -> None:
        super().__init__()
        self.num_channels, self.num_taps = num_channels, num_taps
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))

    def forward(self, x_BTC: Tensor, docs: Documents | None) -> Tensor:
        return causal_conv(x_BTC, self.weight, docs, "silu")

    def step(self, x_BC: Tensor, taps_BCJ: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv_step(x_BC, taps_BCJ, self.weight, "silu")

    def init_rules(self) -> dict[str, Rule]:
        bound = 1 / math.sqrt(self.num_taps)
        return {"weight": Uniform(-bound, bound)}


class M2RNN(Fp32Contract):
    """R block mixer, `[B, T, D]` to `[B, T, D]`.

    out = output_projection(norm((y + v D) * silu(g))), with y from the recurrence over q, k, v and
    the forget values, and the norm over all heads at once.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        r = config.m2rnn
        N = r.num_heads or max(1, config.dim // (r.key_dim + r.value_dim))
        self.num_heads, self.key_dim, self.value_dim = N, r.key_dim, r.value_dim
        self.chunk_size = r.chunk_size
        self.clip = None
        if r.gradient_clip is not None:
            self.clip = StateClip(r.gradient_clip, r.clip_mode)
        self.qkv_dims = [r.num_q_heads * r.key_dim, r.num_k_heads * r.key_dim, N * r.value_dim]
        self.input_dims = [sum(self.qkv_dims), N, N * r.value_dim]  # qkv | forget | gate
        self.input_projection = nn.Linear(config.dim, sum(self.input_dims), bias=False)
        self.conv1d = ShortConv(sum(self.qkv_dims), r.conv_kernel)
        self.decay_gate = DecayGate(N)
        self.state_weight = nn.Parameter(torch.empty(N, r.value_dim, r.value_dim))
        self.D = nn.Parameter(torch.empty(N, r.value_dim))
        self.g_norm = RMSNorm(N * r.value_dim, config.norm_eps)
        self.output_projection = nn.Linear(N * r.value_dim, config.dim, bias=False)
        self._linear_rules = {
            "input_projection.weight": input_rule(config),
            "output_projection.weight": output_rule(config),
        }

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        qkv_BTC, f_BTN, g_BTX = self.input_projection(x_BTD).split(self.input_dims, -1)
        q_BTNK, k_BTNK, v_BTNV = self._heads(self.conv1d(qkv_BTC, docs))
        f_BTN = self.decay_gate(f_BTN)
        y_BTNV = self.scan(q_BTNK, k_BTNK, v_BTNV, f_BTN, self.state_weight, docs)
        return self._output(y_BTNV, v_BTNV, g_BTX).to(x_BTD.dtype)

    def scan(
        self,
        q_BTNK: Tensor,
        k_BTNK: Tensor,
        v_BTNV: Tensor,
        f_BTN: Tensor,
        w_NVV: Tensor,
        docs: Documents | None,
    ) -> Tensor:
        """The recurrence `[B, T, N, V]`: the only part where tokens meet (besides the conv)."""
        y_BTNV, _ = m2rnn_chunked(
            q_BTNK,
            k_BTNK,
            v_BTNV,
            f_BTN,
            w_NVV,
            docs,
            clip=self.clip,
            chunk_size=self.chunk_size,
            final_states=False,
        )
        return y_BTNV

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> M2RNNState:
        """The state of `batch_size` empty documents."""
        wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        h_shape = batch_size, self.num_heads, self.key_dim, self.value_dim
        taps_shape = batch_size, self.conv1d.num_channels, self.conv1d.num_taps - 1
        return M2RNNState(
            torch.zeros(h_shape, dtype=wide_dtype, device=device),
            torch.zeros(taps_shape, dtype=dtype, device=device),
        )

    def step(self, x_BD: Tensor, state: M2RNNState) -> tuple[Tensor, M2RNNState]:
        """One token: output `[B, D]` and the next state."""
        qkv_BC, f_BN, g_BX = self.input_projection(x_BD).split(self.input_dims, -1)
        qkv_BC, taps_BCJ = self.conv1d.step(qkv_BC, state.taps_BCJ)
        q_BNK, k_BNK, v_BNV = self._heads(qkv_BC)
        y_BNV, h_BNKV = m2rnn_step(
            q_BNK, k_BNK, v_BNV, self.decay_gate(f_BN), self.state_weight, state.h_BNKV
        )
        return self._output(y_BNV, v_BNV, g_BX).to(x_BD.dtype), M2RNNState(h_BNKV, taps_BCJ)

    def init_rules(self) -> dict[str, Rule]:
        children = {"conv1d": self.conv1d, "decay_gate": self.decay_gate, "g_norm": self.g_norm}
        rules: dict[str, Rule] = {"state_weight": Identity(), "D": Constant(1.0)}
        rules |= self._linear_rules
        for prefix, child in children.items():
            rules |= {f"{prefix}.{name}": rule for name, rule in child.init_rules().items()}
        return rules

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q `[..., q heads, K]`, k `[..., k heads, K]` and v `[..., N, V]`."""
        widths = self.key_dim, self.key_dim, self.value_dim
        parts = zip(qkv.split(self.qkv_dims, -1), widths, strict=True)
        return tuple(part.unflatten(-1, (-1, width)) for part, width in parts)

    def _output(self, y: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Residual, gate, then the norm (gate first), and the way out; y and v `[..., N, V]`."""
        gated = (y + v * self.D).flatten(-2) * F.silu(wide(g))
        return self.output_projection(self.g_norm(gated).to(g.dtype))
