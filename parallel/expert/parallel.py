"""Expert parallelism: each rank of `ep` holds some experts, and every token goes to its experts.

An E mixer routes the tokens of its own rank. `ExpertParallel` swaps its `dispatch` and `combine`;
between them the mixer's own `experts` work on the rows of all ranks, so that recomputing `experts`
alone sends nothing again. It does not touch parameters: the plan gives each rank the experts
[r * E / ep, (r + 1) * E / ep) in order. `SpreadRouter` swaps the router's counts of choices, with
or without `ep`.

Legend: T tokens, K experts of a token, D model, S slots (rows in expert order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.experts.choices import expert_capacity
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.module import Arrived, MixtureOfExperts
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import MeshConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.experts.grouped_mm import row_multiple
from megacpp.model.hybrid import HybridLM
from parallel.expert.even_routing import EvenRouting
from parallel.expert.exchange import (
    DispatchCounts,
    Owners,
    send_copies,
    send_everywhere,
    send_slots,
    send_tokens,
)
from parallel.expert.load import BatchLoadOfRanks, DocumentLoadOfRanks
from parallel.plans import row_of
from parallel.styles import ShardModule

Kind = Literal["per_rank", "per_expert", "padded"]


class ExpertParallel(ParallelStyle):
    """Style that swaps `dispatch` and `combine` of an E mixer with experts sharded over an axis.

    Args:
        kind: what travels when nothing is dropped: one row per rank that holds a chosen expert
            (`per_rank`, weighed and summed there), one row per chosen expert (`per_expert`), or
            one row per rank (`padded`). With a capacity factor the first two are fixed slots per
            expert, of each rank's tokens; `padded` drops by the tokens of all ranks.
        balanced: choose experts evenly instead of as the router says (`EvenRouting`): sizes are
            known without values. The outputs are those of a model with another router.
    """

    def __init__(self, kind: Kind = "per_rank", balanced: bool = False) -> None:
        self.kind: Kind = kind
        self.balanced = balanced

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        group, kernels = device_mesh.get_group(), module.experts.kernels
        module.dispatch = ExpertDispatch(module.moe, group, self.kind, self.balanced, kernels)
        module.combine = ExpertCombine()
        return module


class SpreadRouter(ParallelStyle):
    """Style of a router of some tokens of a microbatch; applied over all ranks of a stage.

    Args:
        row: the ranks that hold tokens of the same rows. Where there is more than one, `docs` must
            be a part that refers to its rows (`Documents.take`), of as many tokens on each rank.
    """

    def __init__(self, row: DeviceMesh) -> None:
        self.row = row

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        stage, row, experts = device_mesh.get_group(), self.row.get_group(), module.moe.num_experts
        if stage.size() > 1:
            module.batch_load = BatchLoadOfRanks(experts, stage)
        if row.size() > 1:
            module.document_load = DocumentLoadOfRanks(experts, row)
        return module


def router_plan(model: HybridLM, row: DeviceMesh) -> dict[str, ParallelStyle]:
    """Return styles by router, for all ranks of a stage; `row` as in `SpreadRouter`."""
    return {f"{name}.router": SpreadRouter(row) for name in _moe(model)}


def expert_plan(
    model: HybridLM, mesh: MeshConfig, balanced: bool = False
) -> dict[str, ParallelStyle]:
    """Return styles by module: experts that a rank holds, and exchanges of rows around them."""
    plan: dict[str, ParallelStyle] = {}
    for name, mixer in _moe(model).items():
        arrays = {
            leaf: row_of(model, f"{name}.experts.{leaf}")
            for leaf, _ in mixer.experts.named_parameters()
        }
        plan[f"{name}.experts"] = ShardModule(arrays)
        plan[name] = ExpertParallel(mesh.ep_dispatch, balanced)
    return plan


def _moe(model: HybridLM) -> dict[str, MixtureOfExperts]:
    return {n: m for n, (_, m) in model.mixers().items() if isinstance(m, MixtureOfExperts)}


class ExpertDispatch(nn.Module):
    """Dispatch of tokens to the ranks of their experts, with the arguments of `Dispatch`."""

    kernels: Kernels = PLAIN_KERNELS

    def __init__(
        self,
        moe: MoEConfig,
        group: dist.ProcessGroup,
        kind: Kind,
        balanced: bool,
        kernels: Kernels,
    ) -> None:
        """Set up the exchange.

        Args:
            moe: settings of the experts.
            group: the expert ranks.
            kind: a row per chosen expert, per rank that holds some, or per rank.
            balanced: choose experts evenly instead of by the router.
            kernels: backends; `experts` moves rows within a rank.
        """
        super().__init__()
        self.moe, self.kind, self.kernels = moe, kind, kernels
        self.owners = Owners(moe.num_experts, group)
        assert self.owners.each * self.owners.ranks == moe.num_experts
        self.even = EvenRouting.from_config(moe) if balanced else None

    def forward(
        self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, decoding: bool = False
    ) -> tuple[Arrived, DispatchCounts]:
        """Return the rows that arrived for this rank's experts, and the way back.

        Args:
            x_TD: tokens of this rank.
            indices_TK: their experts.
            weights_TK: weights of these.
            decoding: nothing is dropped and nothing is padded.
        """
        owners = replace(self.owners, backend=self.kernels.experts)
        if self.even is not None:
            indices_TK = self.even.indices(len(x_TD), x_TD.device)
        capacity = None
        if self.moe.capacity_factor is not None and not decoding:
            capacity = expert_capacity(len(x_TD), self.moe)
        multiple = 1 if decoding else row_multiple(x_TD.device)
        if self.kind == "padded" and not decoding:
            given = x_TD, indices_TK, weights_TK, owners, multiple
            return send_everywhere(*given, Fraction(self.moe.top_k, owners.ranks), capacity)
        if capacity is not None:
            return send_slots(x_TD, indices_TK, owners, capacity)
        if self.kind == "per_expert":
            return send_copies(x_TD, indices_TK, owners, multiple, self.even)
        return send_tokens(x_TD, indices_TK, weights_TK, owners, multiple, self.even)


class ExpertCombine(nn.Module):
    """Return of the experts' outputs to the tokens' ranks, where they are summed."""

    def forward(
        self,
        rows_SD: Tensor,
        weights_TK: Tensor,
        counts: DispatchCounts,
        plus: Callable[[], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the sum of each token's rows, `[T, D]`, added up in fp32 (or fp64).

        Args:
            rows_SD: outputs of the experts.
            weights_TK: of the copies.
            counts: way back.
            plus: computes what is added to the sums, `[T, D]`, while the rows travel; None: 0.
            dtype: of the result; None: fp32 (or fp64).
        """
        y_TD, plus_TD = counts.back(rows_SD, weights_TK, plus or (lambda: None))
        y_TD = y_TD if plus_TD is None else y_TD + plus_TD
        return y_TD.to(dtype or y_TD.dtype)
