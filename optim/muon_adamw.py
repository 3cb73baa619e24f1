"""Optimizer of a whole model: Muon updates its hidden matrices, AdamW the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megacpp.torch_extras import dtensors
from optim.adamw import adamw_update
from optim.compressed import apply_low_rank_updates, redraw
from optim.group_state import GroupState
from optim.initial_state import StateKind, Width, wire_dtype
from optim.muon import MuonStep
from optim.muon_plan import Matrix, MuonPlan


class MuonAdamW(GroupState):
    """Muon and AdamW by parameter group, on plain parameters and on DTensors of any mesh.

        muon:  w <- (1 - lr * weight_decay) w - lr * scale * orthogonalised(momentum)
        adamw: torch.optim.AdamW, the fused kernel

    `lr` of a group (optim/group_state.py) is read at every step: a float or a 0-d tensor, which any
    scheduler of `torch.optim.lr_scheduler` may change.

    All ranks must construct the optimizer with the same parameters and groups, in one order. This
    is checked when the plan is made: here, and at the first step after `add_param_group`. A
    parameter without a gradient keeps its weight, decay and state. Ranks must agree on these
    parameters, as they do under FSDP2; where they don't, there is no deadlock, but zeros replace
    the missing parts of the matrices.

    Args:
        params: groups of parameters or of (name, parameter).
        muon_width: dtype of Newton-Schulz and of the exchange (`wire_dtype`).
        momentum_width: dtype of the momentum (`momentum_dtype`).
        bucket_bytes: most bytes that a rank sends, or receives, at once.
        adamw_state: storage of AdamW's moments; see `new_state`.
        process_groups: groups of ranks that hold parameters which several mesh axes shard or
            replicate (`World.holders`). Not needed for one axis, nor for the group of all ranks.
        redraw_every: steps of a latent after which its projection is redrawn (0: never).
    """

    def __init__(
        self,
        params: Iterable[Any],
        muon_width: Width = "auto",
        momentum_width: Width = "auto",
        bucket_bytes: int = 32 << 20,
        adamw_state: StateKind = "fp32",
        process_groups: Sequence[dist.ProcessGroup] = (),
        redraw_every: int = 0,
    ) -> None:
        self._muon_width: Width = muon_width
        self._bucket_bytes, self._process_groups = bucket_bytes, process_groups
        super().__init__(params, momentum_width, adamw_state, redraw_every)
        self.plan()

    def plan(self) -> MuonPlan:
        """Return the plan of the current groups; all ranks make it together, once."""
        if self._plan is None:
            matrices = [
                Matrix(
                    p,
                    number,
                    self._views[p],
                    wire_dtype(p, self._muon_width),
                    (group["steps"], group["coefficients"]),
                )
                for number, group in self._of("muon")
                for p in group["params"]
            ]
            self._plan = MuonPlan(matrices, self._bucket_bytes, self._process_groups)
        return self._plan

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self.plan()
        momenta = [self.state[m.parameter]["momentum"] for m in plan.matrices]
        muon = MuonStep(plan, self.param_groups, momenta)
        muon.here()
        for number, group in self._of("adamw"):
            params = [p for p in group["params"] if p.grad is not None]
            if len(params) == len(group["params"]):
                self._steps[number].add_(1)
            else:
                for p in params:
                    self.state[p]["step"].add_(1)
            if params:
                adamw_update(group, params, [self.state[p] for p in params])
            folds = [self._folds[p] for p in params if p in self._folds] if self._folds else []
            if folds:
                apply_low_rank_updates(group, folds)
                redraw(folds, [self.state[f.latent] for f in folds], self._redraw_every)
        muon.finish()
        # Local shards were written to, which autograd notices on plain parameters only.
        torch.autograd.graph.increment_version(
            dtensors(p for group in self.param_groups for p in group["params"])
        )
        return loss

    def transient_bytes(self) -> int:
        """Return the peak bytes of Muon's half of a step; see `MuonPlan.transient_bytes`."""
        plan = self.plan()
        momenta = [self.state[m.parameter]["momentum"] for m in plan.matrices]
        return plan.transient_bytes(momenta)

    def _of(self, algorithm: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the non-empty groups of an algorithm with their numbers."""
        groups = enumerate(self.param_groups)
        return [(i, g) for i, g in groups if g["algorithm"] == algorithm and g["params"]]
