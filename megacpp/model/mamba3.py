"""M blocks: Mamba-3 (arXiv 2603.15569), a linear recurrence with a rotating state.

Parameter names and the order of the input projection follow the authors' module (state-spaces
mamba), so that checkpoints map one to one.

Legend: B rows, T tokens of a row, D model, H heads, G groups of heads that share B and C, R MIMO
rank (1: SISO), N state size, P head dim, A rotated pairs, W inner width H P, C conv channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.config import ModelConfig
from megacpp.kernels.causal_conv import causal_conv, causal_conv_step
from megacpp.kernels.mamba3 import mamba3_chunked, mamba3_step
from megacpp.kernels.mamba3_inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.model.documents import Documents, documents_of
from megacpp.model.fp32 import Fp32Contract, wide
from megacpp.model.init import Constant, Rule, TimeStepBias, Uniform
from megacpp.model.linear_init import input_rule, output_rule
from megacpp.model.norm import RMSNorm


@dataclass(frozen=True, eq=False)
class Mamba3Decode:
    """Decoding state of a layer: the scan's, and the convolution's last inputs if there is one."""

    scan: Mamba3State
    taps_BCK1: Tensor | None


class Mamba3(Fp32Contract):
    """x -> in_proj -> [short conv] -> scan over documents -> out_proj, `[B, T, D]` to `[B, T, D]`.

    in_proj rows: z (gate) | x | B | C | dt | A | trap | angles; B and C as (R, G, N).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m = config.mamba3
        self.config, self.mamba = config, m
        inner = m.expand * config.dim
        self.num_heads = inner // m.headdim
        self.num_angles = int(m.d_state * m.rope_fraction) // 2
        # The authors' kernels pair (2i, 2i + 1) in SISO and (i, i + N/2) in MIMO.
        self.pairing: Pairing = "half" if m.mimo_rank > 1 else "interleaved"
        bc = m.mimo_rank * m.ngroups * m.d_state
        H, R, N, P = self.num_heads, m.mimo_rank, m.d_state, m.headdim
        self.widths = (inner, inner + 2 * bc, H, H, H, self.num_angles)
        self.in_proj = nn.Linear(config.dim, sum(self.widths), bias=False)
        self.conv1d = None
        if m.conv_kernel:
            channels = inner + 2 * bc
            self.conv1d = nn.Conv1d(channels, channels, m.conv_kernel, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.B_bias = nn.Parameter(torch.empty(H, R, N))
        self.C_bias = nn.Parameter(torch.empty(H, R, N))
        self.D = nn.Parameter(torch.empty(H))
        self.B_norm = RMSNorm(N, config.norm_eps)
        self.C_norm = RMSNorm(N, config.norm_eps)
        if R > 1:
            self.mimo_x = nn.Parameter(torch.empty(H, R, P))
            self.mimo_z = nn.Parameter(torch.empty(H, R, P))
            self.mimo_o = nn.Parameter(torch.empty(H, R, P))
        self.norm = RMSNorm(inner, config.norm_eps) if m.out_norm else None
        self.out_proj = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; the recurrence restarts where documents start."""
        docs = documents_of(x_BTD, docs)
        z_BTW, xbc_BTC, rest = self._project(x_BTD)
        if self.conv1d is not None:
            xbc_BTC = causal_conv(xbc_BTC, self.conv1d.weight, docs)
        y_BTHP, _ = self.scan(self._inputs(z_BTW, xbc_BTC, rest), self.head_weights(), docs)
        return self.out_proj(y_BTHP.flatten(2)).to(x_BTD.dtype)

    def scan(
        self,
        inputs: ScanInputs,
        weights: HeadWeights,
        docs: Documents,
        initial: Mamba3State | None = None,
    ) -> tuple[Tensor, Mamba3State]:
        """The only step that looks at other tokens: outputs `[B, T, H, P]`, last state per row."""
        return mamba3_chunked(inputs, weights, docs, self.pairing, self.mamba.chunk_size, initial)

    def head_weights(self) -> HeadWeights:
        """The scan's parameters, all under the fp32 contract."""
        mimo = self.mamba.mimo_rank > 1
        return HeadWeights(
            Q_bias=self.C_bias,
            K_bias=self.B_bias,
            D=self.D,
            mimo_x=self.mimo_x if mimo else None,
            mimo_z=self.mimo_z if mimo else None,
            mimo_o=self.mimo_o if mimo else None,
            norm=None if self.norm is None else self.norm.weight.unflatten(0, (self.num_heads, -1)),
            norm_eps=self.config.norm_eps,
        )

    def init_state(
        self, batch_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> Mamba3Decode:
        """The state in front of the first token; `dtype` is that of the activations."""
        m = self.mamba
        v_BHP = torch.zeros(batch_size, self.num_heads, m.headdim, device=device, dtype=dtype)
        taps = None
        if self.conv1d is not None:
            channels = self.widths[1]
            taps = v_BHP.new_zeros(batch_size, channels, m.conv_kernel - 1)
        return Mamba3Decode(Mamba3State.zeros(v_BHP, self.num_angles, m.mimo_rank, m.d_state), taps)

    def step(self, x_BD: Tensor, state: Mamba3Decode) -> tuple[Tensor, Mamba3Decode]:
        """One token: output `[B, D]` and the next state, at a cost that no prefix changes."""
        z_B1W, xbc_B1C, rest = self._project(x_BD[:, None])
        taps = state.taps_BCK1
        if self.conv1d is not None:
            assert taps is not None
            xbc_BC, taps = causal_conv_step(xbc_B1C[:, 0], taps, self.conv1d.weight)
            xbc_B1C = xbc_BC[:, None]
        inputs = self._inputs(z_B1W, xbc_B1C, rest)
        y_B1HP, scan = mamba3_step(inputs, self.head_weights(), state.scan, self.pairing)
        y_BD = self.out_proj(y_B1HP.flatten(1)).to(x_BD.dtype)
        return y_BD, Mamba3Decode(scan, taps)

    def init_rules(self) -> dict[str, Rule]:
        m = self.mamba
        rules: dict[str, Rule] = {
            "in_proj.weight": input_rule(self.config),
            "out_proj.weight": output_rule(self.config),
            "dt_bias": TimeStepBias(m.dt_min, m.dt_max, m.dt_init_floor),
            "B_bias": Constant(1.0),
            "C_bias": Constant(1.0),
            "D": Constant(1.0),
            "B_norm.weight": Constant(1.0),
            "C_norm.weight": Constant(1.0),
        }
        if m.mimo_rank > 1:
            share = Constant(1.0 / m.mimo_rank)
            rules |= {"mimo_x": share, "mimo_z": Constant(1.0), "mimo_o": share}
        if self.norm is not None:
            rules["norm.weight"] = Constant(1.0)
        if self.conv1d is not None:
            bound = 1.0 / math.sqrt(m.conv_kernel)
            rules["conv1d.weight"] = Uniform(-bound, bound)
        return rules

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """z, the channels x | B | C that a convolution would mix, and the rest."""
        z_BTW, xbc_BTC, *rest = self.in_proj(x_BTD).split(self.widths, dim=-1)
        return z_BTW, xbc_BTC, tuple(rest)

    def _inputs(self, z_BTW: Tensor, xbc_BTC: Tensor, rest: tuple[Tensor, ...]) -> ScanInputs:
        """Norms of B and C, and the step dt and decay A in fp32."""
        m = self.mamba
        dt_BTH, a_BTH, trap_BTH, angles_BTA = rest
        bc = m.mimo_rank * m.ngroups * m.d_state
        x_BTW, B_BTC, C_BTC = xbc_BTC.split((self.widths[0], bc, bc), dim=-1)
        shape = (m.mimo_rank, m.ngroups, m.d_state)
        DT_BHT = F.softplus(wide(dt_BTH) + self.dt_bias).mT
        return ScanInputs(
            Q=self.C_norm(C_BTC.unflatten(-1, shape)),
            K=self.B_norm(B_BTC.unflatten(-1, shape)),
            V=x_BTW.unflatten(-1, (self.num_heads, -1)),
            Z=z_BTW.unflatten(-1, (self.num_heads, -1)),
            ADT=self._decay_rate(wide(a_BTH)).mT * DT_BHT,
            DT=DT_BHT,
            Trap=trap_BTH.mT,
            Angles=angles_BTA[:, :, None],
        )

    def _decay_rate(self, a: Tensor) -> Tensor:
        """A = -activation(a), at most -a_floor."""
        if self.mamba.a_activation == "softplus":
            positive = F.softplus(a)
        else:  # 1 + a for a >= 0, else 1 / (1 - a): slope and value continuous, slow to reach 0
            positive = F.relu(a) + 1.0 / (1.0 - a.clamp(max=0.0))
        return -positive.clamp(min=self.mamba.a_floor)
