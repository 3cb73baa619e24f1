"""E blocks: a mixture of experts with shared experts.

Legend: B rows, T tokens (of all rows, where there is no B), D model, E experts, K experts of a
token, I hidden of an expert, S slots (copies of tokens in expert order).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megacpp.blocks.dense.module import MLP
from megacpp.blocks.experts.choices import expert_capacity, null_copies
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.init import expert_rules, mixture_rules, shared_expert_rules
from megacpp.blocks.experts.null_router import NullRouter
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.experts.fp8 import Fp8Products
from megacpp.kernels.experts.grouped_mm import row_multiple
from megacpp.kernels.experts.mlp import into_experts, out_of_experts
from megacpp.kernels.experts.rows import (
    Groups,
    group_rows,
    sum_rows,
    weigh_slots,
)
from megacpp.kernels.experts.without_slot import group_rows_to_capacity
from megacpp.model.documents import Documents
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.tokenwise import Tokenwise


class Arrived(NamedTuple):
    """Rows `[R, D]` for a process's experts, and the slots that hold copies of them.

    `weights_RK` weigh the copies; without them `Combine` weighs the results.
    """

    x_RD: Tensor
    groups: Groups
    weights_RK: Tensor | None = None


class Experts(nn.Module):
    """Routed experts, stacked: w2(silu(w1 x) * w3 x), or w2(relu(w1 x)^2).

    Their saved activations are `x_RD`, gate and up (or the argument of the ReLU) and the weights.
    The region "expert_gemm" computes gate and up again from `x_RD`: it copies rows and multiplies,
    but neither sorts nor sends.
    """

    init_rules = expert_rules
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS
    fp8: Fp8Products | None = None  # set by checkpointing/fp8.py

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        num, hidden, dim = config.moe.num_experts, config.moe.hidden_dim, config.dim
        self.w1 = nn.Parameter(torch.empty(num, hidden, dim))
        if config.moe.activation == "swiglu":
            self.w3 = nn.Parameter(torch.empty(num, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num, dim, hidden))

    def forward(
        self, x_RD: Tensor, groups: Groups, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of each slot's expert, times the row's weight, `[S, D]`, and `x_RD`.

        Whatever reads the rows next may read the second result, whose gradient is added where
        those of a row's copies are.
        """
        if self.kernels.experts == "reference":
            from megacpp.kernels.experts.reference import experts_reference

            weight_S = None if weights_RK is None else weigh_slots(weights_RK, groups)
            return experts_reference(x_RD, groups, weight_S, *self._weights, self.w2), x_RD
        *hidden, x_RD = self.recompute("expert_gemm", self._into, x_RD, groups)
        return out_of_experts(tuple(hidden), self.w2, weights_RK, groups, self.fp8), x_RD

    def _into(self, x_RD: Tensor, groups: Groups) -> tuple[Tensor, ...]:
        return into_experts(x_RD, groups, *self._weights, fp8=self.fp8)

    @property
    def _weights(self) -> tuple[Tensor, ...]:
        """Return the weights that make hidden units."""
        gated = self.config.moe.activation == "swiglu"
        return (self.w1, self.w3) if gated else (self.w1,)


class SharedExpert(MLP):
    """Expert that every token visits: a SwiGLU as wide as all shared experts, optionally gated."""

    init_rules = shared_expert_rules

    def __init__(self, config: ModelConfig) -> None:
        moe = config.moe
        super().__init__(config, moe.num_shared * moe.shared_hidden_dim, "swiglu")
        self.gate = nn.Linear(config.dim, 1, bias=False) if moe.shared_gate else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[..., D]` of inputs `[..., D]`."""
        y_BTD = super().forward(x_BTD)
        return y_BTD if self.gate is None else y_BTD * self.gate(x_BTD).sigmoid().to(y_BTD.dtype)


class Dispatch(nn.Module):
    """Grouping of tokens by their experts, all of which this process holds."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.expected = moe.top_k if null_copies(moe) else None

    def forward(
        self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, decoding: bool = False
    ) -> tuple[Arrived, Groups]:
        """Return the rows for the experts, and the slots from which `Combine` brings them back.

        Args:
            x_TD: tokens.
            indices_TK: chosen experts.
            weights_TK: weights of the chosen experts.
            decoding: nothing is dropped and nothing is padded.
        """
        num_experts = self.moe.num_experts
        if decoding or self.moe.capacity_factor is None:
            multiple = 1 if decoding else row_multiple(x_TD.device)
            how = multiple, self.expected, self.kernels.experts
            groups = group_rows(indices_TK, num_experts, *how)
        else:
            slots = expert_capacity(len(x_TD), self.moe)
            groups = group_rows_to_capacity(indices_TK, num_experts, slots)
        groups = groups.by(self.kernels.experts)
        return Arrived(x_TD, groups, weights_TK), groups


class Combine(nn.Module):
    """Sum of the experts' outputs for each token."""

    def forward(
        self,
        rows_SD: Tensor,
        weights_TK: Tensor,
        groups: Groups,
        plus: Callable[[], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the sum of each token's rows, `[T, D]`, added up in fp32 (or fp64).

        Args:
            rows_SD: outputs of the experts.
            weights_TK: for rows that come back from other ranks without their weights.
            groups: slots of the rows.
            plus: computes what is added to the sums, `[T, D]`; None: 0.
            dtype: of the result; None: fp32 (or fp64).
        """
        return sum_rows(rows_SD, groups, None if plus is None else plus(), dtype)


class MixtureOfExperts(Tokenwise):
    """Mixture sum_k weight_k expert_k(x) + shared(x) of each token (DeepSeekMoE, 2401.06066).

    Dropless by default: every choice is computed. With `capacity_factor` each expert takes the
    first `capacity` choices of a batch and the rest contribute nothing; then shapes are static,
    but whether a token is dropped depends on the tokens before it, of any document. Choices of null
    experts (`NullRouter`) have no slot and are never sent.

    Expert parallelism swaps `dispatch` and `combine`. Nothing between the two but `experts` touches
    a row, so recomputing `experts` alone repeats neither.
    """

    init_rules = mixture_rules

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = config.moe
        self.router: Router = (NullRouter if null_copies(config.moe) else Router)(config)
        self.experts = Experts(config)
        self.dispatch: nn.Module = Dispatch(config.moe)
        self.combine: nn.Module = Combine()
        self.shared = SharedExpert(config) if config.moe.num_shared else None

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; documents matter to the sequence loss only."""
        return self._mix(*self.router(x_BTD, docs)).view_as(x_BTD)

    def step(self, x_BD: Tensor, state: None) -> tuple[Tensor, None]:
        """Return the output `[B, D]` of one token, and None; nothing is dropped or counted."""
        return self._mix(*self.router(x_BD, decoding=True), decoding=True), None

    def _mix(
        self, weights_TK: Tensor, indices_TK: Tensor, x_TD: Tensor, decoding: bool = False
    ) -> Tensor:
        arrived, counts = self.dispatch(x_TD, indices_TK, weights_TK, decoding)
        rows_SD, read = self.experts(*arrived)
        beside_TD = read if arrived.x_RD is x_TD else x_TD  # rows may come from other ranks
        shared = None if self.shared is None else partial(self.shared, beside_TD)
        return self.combine(rows_SD, weights_TK, counts, shared, x_TD.dtype)
