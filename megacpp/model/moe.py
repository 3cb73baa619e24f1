"""E blocks: a mixture of experts with shared experts.

Legend: B rows, T tokens (of all rows, where there is no B), D model, E experts, K experts of a
token, I hidden of an expert, S slots (copies of tokens in expert order).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.config import ModelConfig, MoEConfig
from megacpp.kernels.expert_rows import (
    Groups,
    gather_rows,
    group_rows,
    group_rows_to_capacity,
    spread_rows,
)
from megacpp.kernels.grouped_mm import grouped_linear, row_multiple
from megacpp.model.documents import Documents
from megacpp.model.init import Rule
from megacpp.model.linear_init import input_rule, output_rule
from megacpp.model.mlp import MLP
from megacpp.model.router import Router


class Experts(nn.Module):
    """The routed experts, stacked: w2(silu(w1 x) * w3 x), or w2(relu(w1 x)^2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        num, hidden, dim = config.moe.num_experts, config.moe.hidden_dim, config.dim
        self.w1 = nn.Parameter(torch.empty(num, hidden, dim))
        if config.moe.activation == "swiglu":
            self.w3 = nn.Parameter(torch.empty(num, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num, dim, hidden))

    def forward(self, x_SD: Tensor, counts_E: Tensor | list[int] | None) -> Tensor:
        """Rows in expert order to rows `[S, D]`; counts as `grouped_linear` wants them."""
        h_SI = grouped_linear(x_SD, self.w1, counts_E)
        if self.config.moe.activation == "swiglu":
            h_SI = F.silu(h_SI) * grouped_linear(x_SD, self.w3, counts_E)
        else:
            h_SI = F.relu(h_SI).square()
        return grouped_linear(h_SI, self.w2, counts_E)

    def init_rules(self) -> dict[str, Rule]:
        into = ("w1", "w3") if self.config.moe.activation == "swiglu" else ("w1",)
        rules: dict[str, Rule] = {name: input_rule(self.config) for name in into}
        return rules | {"w2": output_rule(self.config)}


class SharedExpert(MLP):
    """What every token visits: one SwiGLU as wide as all shared experts, optionally gated."""

    def __init__(self, config: ModelConfig) -> None:
        moe = config.moe
        super().__init__(config, moe.num_shared * moe.shared_hidden_dim, "swiglu")
        self.gate = nn.Linear(config.dim, 1, bias=False) if moe.shared_gate else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        y_BTD = super().forward(x_BTD)
        return y_BTD if self.gate is None else y_BTD * self.gate(x_BTD).sigmoid().to(y_BTD.dtype)

    def init_rules(self) -> dict[str, Rule]:
        gate = {} if self.gate is None else {"gate.weight": input_rule(self.config)}
        return super().init_rules() | gate


class MixtureOfExperts(nn.Module):
    """sum_k weight_k expert_k(x) + shared(x), each token for itself (DeepSeekMoE, 2401.06066).

    Dropless by default: every choice is computed. With `capacity_factor` each expert takes the
    first `capacity` choices of a batch and the rest contribute nothing; then shapes are static,
    but whether a token is dropped depends on the tokens before it, of any document.

    Expert parallelism replaces `dispatch` and `combine`. Nothing between the two but `experts`
    touches a row, so recomputing `experts` alone repeats neither.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = config.moe
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SharedExpert(config) if config.moe.num_shared else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; documents matter to the sequence loss only."""
        weights_TK, indices_TK = self.router(x_BTD, docs)
        return self._mix(x_BTD.flatten(0, 1), weights_TK, indices_TK).view_as(x_BTD)

    def dispatch(
        self,
        x_TD: Tensor,
        indices_TK: Tensor,
        weights_TK: Tensor | None = None,
        decoding: bool = False,
    ) -> tuple[Tensor, Tensor | list[int] | None, Groups]:
        """Copies of the tokens in expert order `[S, D]`, slots per expert, and the way back.

        When decoding nothing is dropped and nothing is padded. `weights_TK` are for a dispatch
        whose rows are weighed where their experts are; here `combine` does it.
        """
        num_experts = self.moe.num_experts
        if decoding:
            groups = group_rows(indices_TK, num_experts)
        elif self.moe.capacity_factor is None:
            groups = group_rows(indices_TK, num_experts, row_multiple(x_TD.device))
        else:
            slots = expert_capacity(len(x_TD), self.moe)
            groups = group_rows_to_capacity(indices_TK, num_experts, slots)
        return spread_rows(x_TD, groups), groups.counts_E, groups

    def combine(self, rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
        """Weighted sum of each token's rows, `[T, D]` in fp32 (or fp64)."""
        return gather_rows(rows_SD, weights_TK, groups)

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """Nothing to remember."""
        return None

    def step(self, x_BD: Tensor, state: None) -> tuple[Tensor, None]:
        """One token `[B, D]`: `forward` where nothing is dropped; never counted."""
        weights_TK, indices_TK = self.router(x_BD, decoding=True)
        return self._mix(x_BD, weights_TK, indices_TK, decoding=True), None

    def init_rules(self) -> dict[str, Rule]:
        parts: dict[str, Router | Experts | MLP] = {"router": self.router, "experts": self.experts}
        if self.shared is not None:
            parts["shared"] = self.shared
        return {
            f"{part}.{name}": rule
            for part, module in parts.items()
            for name, rule in module.init_rules().items()
        }

    def _mix(
        self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, decoding: bool = False
    ) -> Tensor:
        rows_SD, counts_E, groups = self.dispatch(x_TD, indices_TK, weights_TK, decoding)
        y_TD = self.combine(self.experts(rows_SD, counts_E), weights_TK, groups)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.to(x_TD.dtype)


def expert_capacity(tokens: int, moe: MoEConfig) -> int:
    """Slots per expert in capacity mode: an even share of the choices times the factor, up."""
    assert moe.capacity_factor is not None
    return math.ceil(tokens * moe.top_k / moe.num_experts * moe.capacity_factor)
