"""AdamW by torch's fused kernel on the local parts of parameters.

The update is elementwise, so shards need no exchange. Going around DTensor's dispatch and torch's
per-parameter bookkeeping leaves little more than the kernel, which counts when parameters are
small or many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from optim.local import local_part


class AdamW(torch.optim.Optimizer):
    """Equals `torch.optim.AdamW(..., fused=True)` bit for bit (Loshchilov & Hutter, 1711.05101).

    State: `exp_avg` and `exp_avg_sq`, of the parameter's shape, dtype and sharding, and `step`,
    fp32; all exist from the start, so that a fresh optimizer can be loaded into.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._steps: list[Tensor] = []  # per group; the `step` of its parameters are elements
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            state = self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        self._link_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also behind load_state_dict
        self._link_steps()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, steps in zip(self.param_groups, self._steps, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if len(params) == len(group["params"]):
                steps.add_(1)
            else:
                for p in params:
                    self.state[p]["step"].add_(1)
            for dtype in dict.fromkeys(p.dtype for p in params):
                self._update(group, [p for p in params if p.dtype == dtype])
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """The fused kernel wants tensors of one dtype."""
        states = [self.state[p] for p in params]
        torch._fused_adamw_(
            [local_part(p) for p in params],
            [local_part(p.grad) for p in params if p.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],  # of amsgrad
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _link_steps(self) -> None:
        """Step counters become elements of one tensor per group: one operation counts them all."""
        self._steps = []
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"]]
            steps = torch.stack([state["step"] for state in states])
            for state, step in zip(states, steps.unbind(), strict=True):
                state["step"] = step
            self._steps.append(steps)
