"""Parameter groups of Muon and AdamW, and the state of their parameters, which exists at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from optim.compressed import LowRankUpdate, resume
from optim.initial_state import StateKind, Width, momentum_dtype, new_state
from optim.muon_plan import MuonPlan
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


class GroupState(SavedState):
    """Groups and state of `MuonAdamW`, whose step changes them.

    A group has `algorithm="muon"` or `"adamw"`; settings that are missing come from `MUON` or
    `ADAMW`. Groups of `muon` also take `view`, a `MatrixView` that divides their parameters into
    matrices, or `views`, one per parameter; the optimizer stores these itself, and `param_groups`
    remain plain data. A group of `adamw` may take `folds` in the same way: its parameters are
    latents of these low-rank updates.

    State exists from the start, with the parameters' shapes and shardings: `momentum` (bf16 by
    default), or `exp_avg`, `exp_avg_sq` and `step`. State doesn't depend on the owners of matrices,
    so it moves between meshes like parameters do.

    Args:
        params: groups of parameters or of (name, parameter).
        momentum_width: dtype of the momentum (`momentum_dtype`).
        adamw_state: storage of AdamW's moments; see `new_state`.
        redraw_every: steps of a latent after which its projection is redrawn (0: never).
    """

    def __init__(
        self,
        params: Iterable[Any],
        momentum_width: Width,
        adamw_state: StateKind,
        redraw_every: int,
    ) -> None:
        self._momentum_width: Width = momentum_width
        self._adamw_state: StateKind = adamw_state
        self._redraw_every = redraw_every
        self._views: dict[Tensor, MatrixView] = {}
        self._folds: dict[Tensor, LowRankUpdate] = {}
        # Step counters of each AdamW group; every `step` is an element.
        self._steps: dict[int, Tensor] = {}
        self._plan: MuonPlan | None = None
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create its state; the next step makes Muon's plan again."""
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
                dtype = momentum_dtype(p, self._momentum_width)
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        else:
            for p in params:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, **new_state(p, self._adamw_state)}
            self._folds |= {f.latent: f for f in folds}
            if params:
                self._link_steps(len(self.param_groups) - 1, [self.state[p] for p in params])
        self._plan = None

    def resumed(self) -> None:
        """Restore the projections from the step counts of loaded state."""
        for latent, of_it in self._folds.items():
            resume(of_it, self.state[latent], self._redraw_every)

    def _link_steps(self, number: int, states: list[dict[str, Tensor]]) -> None:
        """Make step counters elements of one tensor per group: one operation increments all."""
        self._steps[number] = torch.stack([state["step"] for state in states])
        for state, step in zip(states, self._steps[number].unbind(), strict=True):
            state["step"] = step
