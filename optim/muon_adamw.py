"""Optimizer of a whole model: Muon updates its hidden matrices, AdamW the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.torch_extras import dtensors
from optim.adamw import adamw_update
from optim.compressed import LowRankUpdate, apply_low_rank_updates, redraw, resume
from optim.initial_state import StateKind, Width, momentum_dtype, new_state, wire_dtype
from optim.muon import MuonStep
from optim.muon_plan import Matrix, MuonPlan
from optim.ownership import MatrixView
from optim.saved_state import SavedState

MUON: dict[str, Any] = {
    "lr": 2e-2,
    "weight_decay": 0.0,
    "cautious": False,
    "momentum": 0.95,
    "nesterov": True,
    "steps": 5,
    "coefficients": "quintic",
    "scale": "spectral",
}
ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "cautious": False,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}


class MuonAdamW(SavedState):
    """Muon and AdamW by parameter group, on plain parameters and on DTensors of any mesh.

    A group has `algorithm="muon"` or `"adamw"`; settings that are missing come from `MUON` or
    `ADAMW`. `lr` is read at every step: a float or a 0-d tensor, which any scheduler of
    `torch.optim.lr_scheduler` may change. Groups of `muon` also take `view`, a `MatrixView` that
    divides their parameters into matrices, or `views`, one per parameter; the optimizer stores
    these itself, and `param_groups` remain plain data. A group of `adamw` may take `folds` in the
    same way: its parameters are latents of these low-rank updates.

        muon:  w <- (1 - lr * weight_decay) w - lr * scale * orthogonalised(momentum)
        adamw: torch.optim.AdamW, the fused kernel

    State exists from the start, with the parameters' shapes and shardings: `momentum` (bf16 by
    default), or `exp_avg`, `exp_avg_sq` and `step`. State doesn't depend on the owners of matrices,
    so it moves between meshes like parameters do.

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
        self._widths = muon_width, momentum_width
        self._bucket_bytes = bucket_bytes
        self._adamw_state: StateKind = adamw_state
        self._process_groups = process_groups
        self._redraw_every = redraw_every
        self._views: dict[Tensor, MatrixView] = {}
        self._folds: dict[Tensor, LowRankUpdate] = {}
        # Step counters of each AdamW group; every `step` is an element.
        self._steps: dict[int, Tensor] = {}
        self._plan: MuonPlan | None = None
        super().__init__(params, {})
        self.plan()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state; the next step makes the plan again."""
        algorithm = param_group.get("algorithm")
        assert algorithm in ("muon", "adamw"), f"a group's algorithm is muon or adamw: {algorithm}"
        views = param_group.pop("views", None)
        view = param_group.pop("view", MatrixView())
        folds: list[LowRankUpdate] = param_group.pop("folds", [])
        known = {"params", "algorithm", "param_names", "initial_lr", "name"}
        defaults = MUON if algorithm == "muon" else ADAMW
        strange = param_group.keys() - defaults.keys() - known
        assert not strange, f"{algorithm} has no {sorted(strange)}"
        super().add_param_group({**defaults, **param_group})
        params = self.param_groups[-1]["params"]
        if algorithm == "muon":
            for p, of_it in zip(params, views or [view] * len(params), strict=True):
                of_it.heights(p.shape)  # a view that doesn't fit fails here
                self._views[p] = of_it
                dtype = momentum_dtype(p, self._widths[1])
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        else:
            for p in params:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, **new_state(p, self._adamw_state)}
            self._folds |= {f.latent: f for f in folds}
        self._link_steps()
        self._plan = None

    def plan(self) -> MuonPlan:
        """Return the plan of the current groups; all ranks make it together, once."""
        if self._plan is None:
            matrices = [
                Matrix(
                    p,
                    number,
                    self._views[p],
                    wire_dtype(p, self._widths[0]),
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

    def resumed(self) -> None:
        """Restore the projections from the step counts of loaded state."""
        for latent, of_it in self._folds.items():
            resume(of_it, self.state[latent], self._redraw_every)

    def _of(self, algorithm: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the non-empty groups of an algorithm with their numbers."""
        groups = enumerate(self.param_groups)
        return [(i, g) for i, g in groups if g["algorithm"] == algorithm and g["params"]]

    def _link_steps(self) -> None:
        """Make step counters elements of one tensor per group: one operation increments all."""
        for number, group in self._of("adamw"):
            if number not in self._steps:
                states = [self.state[p] for p in group["params"]]
                self._steps[number] = torch.stack([state["step"] for state in states])
                for state, step in zip(states, self._steps[number].unbind(), strict=True):
                    state["step"] = step
