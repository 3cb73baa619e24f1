"""M blocks: Mamba-3 (arXiv 2603.15569), a linear recurrence with a rotating state.

Parameter names follow the authors' module (state-spaces mamba), except that its one input
projection and one convolution are a module per part here, so that heads can be cut in each part:
megacpp/model/upstream.py maps both ways. Nothing below counts heads by the configuration where a
weight or an activation can tell: a weight may hold some of the heads only.

Legend: B rows, T tokens of a row, D model, H heads, G groups of heads that share B and C, R MIMO
rank (1: SISO), N state size, P head dim, A rotated pairs, W inner width H P, C conv channels, S the
channels B | C, 2 R G N of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.mamba3.descriptor import MAMBA3
from megacpp.blocks.mamba3.init import mamba3_rules
from megacpp.blocks.mamba3.states import Mamba3States
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linears import linears
from megacpp.kernels.mamba3.chunks import mamba3_scan
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.recurrent_gates import by_triton, in_triton, steps
from megacpp.model.documents import Documents, documents_of
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.recurrent_decoding import RecurrentDecoding
from megacpp.model.scan import SequenceScan
from megacpp.model.short_conv import Convolve, ShortConv, stacked
from megacpp.torch_extras import autocast_dtype


class Mamba3(RecurrentDecoding, Fp32Contract):
    """Mixer x -> in_* -> [short conv] -> scan over documents -> out_proj, all `[B, T, D]`."""

    init_rules = mamba3_rules
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS
    thin = "in_B", "in_C", "in_dt", "in_A", "in_trap", "in_angles"  # read x in one product
    linear = staticmethod(F.linear)  # that product; `recompute.compress` puts another

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m = config.mamba3
        self.config, self.mamba = config, m
        rows = MAMBA3.rows(config)
        # The authors' kernels pair (2i, 2i + 1) in SISO and (i, i + N/2) in MIMO.
        self.pairing: Pairing = "half" if m.mimo_rank > 1 else "interleaved"
        self.scan: SequenceScan = Mamba3Scan(self.pairing, m.chunk_size)
        self.convolve = Convolve()
        H, R, N, P = rows["in_dt.weight"], m.mimo_rank, m.d_state, m.headdim
        self.in_z = nn.Linear(config.dim, rows["in_z.weight"], bias=False)
        self.in_x = nn.Linear(config.dim, rows["in_x.weight"], bias=False)
        self.in_B = nn.Linear(config.dim, rows["in_B.weight"], bias=False)
        self.in_C = nn.Linear(config.dim, rows["in_C.weight"], bias=False)
        self.in_dt = nn.Linear(config.dim, H, bias=False)
        self.in_A = nn.Linear(config.dim, H, bias=False)
        self.in_trap = nn.Linear(config.dim, H, bias=False)
        self.in_angles = nn.Linear(config.dim, rows["in_angles.weight"], bias=False)
        if m.conv_kernel:
            self.conv_x = ShortConv(rows["in_x.weight"], m.conv_kernel)
            self.conv_B = ShortConv(rows["in_B.weight"], m.conv_kernel)
            self.conv_C = ShortConv(rows["in_C.weight"], m.conv_kernel)
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
        self.norm = RMSNorm(H * P, config.norm_eps) if m.out_norm else None
        self.out_proj = nn.Linear(H * P, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; the recurrence restarts where documents start."""
        docs = documents_of(x_BTD, docs)
        (v_BTW, bc_BTS), rest = self._project(x_BTD)
        if self.mamba.conv_kernel:
            v_BTW = self.convolve(v_BTW, self.conv_x.weight, docs)
            bc_BTS = self.convolve(bc_BTS, stacked(self.conv_B, self.conv_C), docs)
        inputs, _ = self._inputs((v_BTW, bc_BTS), rest)
        y_BTHP = self.scan(inputs, self.head_weights(), docs)
        return self._output(y_BTHP).to(x_BTD.dtype)

    def head_weights(self) -> HeadWeights:
        """Return the scan's parameters, all under the fp32 contract."""
        mimo = self.mamba.mimo_rank > 1
        return HeadWeights(
            Q_bias=self.C_bias,
            K_bias=self.B_bias,
            D=self.D,
            mimo_x=self.mimo_x if mimo else None,
            mimo_z=self.mimo_z if mimo else None,
            mimo_o=self.mimo_o if mimo else None,
            norm=None if self.norm is None else self._by_head(self.norm.weight),
            norm_eps=self.config.norm_eps,
        )

    def _project(self, x_BTD: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """Return x (the scan's V) and the channels B | C, and the rest: z, dt, A, trap, angles.

        The thin parts read x_BTD in one product: together they are a matrix worth its launch, and
        copying their few rows is cheap. z and x are wide; backward would keep a copy of both.
        """
        bc = self.in_B.weight, self.in_C.weight
        rest = self.in_dt.weight, self.in_A.weight, self.in_trap.weight, self.in_angles.weight
        widths = [sum(len(w) for w in bc), *(len(w) for w in rest)]
        given = {"thin": torch.cat([*bc, *rest]), "linear": self.linear}
        z_BTW, v_BTW, thin_BTX = linears(x_BTD, self.in_z, self.in_x, **given)
        bc_BTS, *rest_BT = thin_BTX.split(widths, -1)
        return (v_BTW, bc_BTS), (z_BTW, *rest_BT)

    def _inputs(
        self, channels: Sequence[Tensor], rest: tuple[Tensor, ...]
    ) -> tuple[ScanInputs, None]:
        """Return the inputs of the scan, from the convolved channels and the rest."""
        (v_BTW, bc_BTS), (z_BTW, dt_BTH, a_BTH, trap_BTH, angles_BTA) = channels, rest
        Q, K, ADT_BHT, DT_BHT = self.recompute("conv_bc", self._steps, bc_BTS, dt_BTH, a_BTH)
        inputs = ScanInputs(
            Q=Q,
            K=K,
            V=self._by_head(v_BTW),
            Z=self._by_head(z_BTW),
            ADT=ADT_BHT,
            DT=DT_BHT,
            Trap=trap_BTH.mT,
            Angles=angles_BTA[:, :, None],
        )
        return inputs, None

    def _steps(self, bc_BTS: Tensor, dt_BTH: Tensor, a_BTH: Tensor) -> tuple[Tensor, ...]:
        """Return normed C and B, and in fp32 the log decay A dt and the step dt."""
        ranks, eps = self.mamba.mimo_rank, self.config.norm_eps
        how = self.mamba.a_floor, self.mamba.a_activation == "softplus"
        if by_triton(self.kernels.gates, dt_BTH):
            dtype = autocast_dtype(bc_BTS) or bc_BTS.dtype
            weights = self.dt_bias, bc_BTS, self.C_norm.weight, self.B_norm.weight
            given = dt_BTH, a_BTH, *weights
            return in_triton("steps", None, (ranks, eps, dtype, *how), *given)
        B_BTC, C_BTC = bc_BTS.chunk(2, -1)
        shape = (ranks, -1, self.mamba.d_state)
        ADT_BHT, DT_BHT = steps(dt_BTH, a_BTH, self.dt_bias, *how)
        Q, K = C_BTC.unflatten(-1, shape), B_BTC.unflatten(-1, shape)
        return self.C_norm(Q), self.B_norm(K), ADT_BHT, DT_BHT

    def _output(self, y_BTHP: Tensor, *_: Any) -> Tensor:
        """Project all heads to the stream."""
        return self.out_proj(y_BTHP.flatten(2))

    def _by_head(self, x_W: Tensor) -> Tensor:
        """Return `[..., H P]` as `[..., H, P]`, for any number of heads."""
        return x_W.unflatten(-1, (-1, self.mamba.headdim))


class Mamba3Scan(Mamba3States):
    """Recurrence `[B, T, H, P]`: the only submodule in which all tokens of a document meet."""

    recompute: Recompute = PLAIN

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
