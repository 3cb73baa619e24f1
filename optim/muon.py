"""Muon: momentum whose step is orthogonalised, matrix by matrix (Keller Jordan).

Works on plain parameters and on DTensors of any mesh; a sharded run equals the unsharded one,
because whole matrices are orthogonalised wherever their cells live (optim/ownership.py).

Legend: R rows, C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optim.boxes import layout_of, stack_view
from optim.local import local_part
from optim.newton_schulz import (
    Scale,
    iteration_dtype,
    newton_schulz_plain,
    orthogonalise,
    update_scale,
)
from optim.ownership import Item, MatrixView, Ownership, items_of


def muon_update(
    grad_RC: Tensor,
    momentum_RC: Tensor,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    scale: Scale = "keller",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The update of one matrix, to be subtracted times the learning rate: the reference of `Muon`.

    `momentum_RC` becomes momentum * momentum_RC + (1 - momentum) * grad_RC.
    """
    momentum_RC.lerp_(grad_RC, 1 - momentum)
    u_RC = torch.lerp(grad_RC, momentum_RC, momentum) if nesterov else momentum_RC
    o_RC = newton_schulz_plain(u_RC, steps, dtype)
    return o_RC.to(grad_RC.dtype) * update_scale(scale, *grad_RC.shape)


class Muon(torch.optim.Optimizer):
    """w <- (1 - lr * weight_decay) w - lr * scale * orthogonalised(momentum), for matrices only.

    A group's `view` (`MatrixView`) says which matrices its parameters are: one each, row blocks
    of a fused projection, or a stack of experts. The scale is that of the single matrix.

    State: `momentum`, of the parameter's shape, dtype and sharding; it exists from the start, so
    that a fresh optimizer can be loaded into. Parameters without a gradient are left alone; all
    ranks of a mesh must agree which these are, as they do under FSDP2.

    Parameters that the same ranks hold share the two exchanges of a step, whatever axes of whatever
    mesh cut them; optim/ownership.py says what these cost.

    Args:
        dtype: of Newton-Schulz and of what ranks exchange; see `iteration_dtype` for the default.
        process_groups: of ranks that share parameters cut along several mesh axes (fsdp and tp,
            efsdp and ep). Not needed along one axis, nor where these ranks are all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        scale: Scale = "keller",
        view: MatrixView = MatrixView(),  # noqa: B008 - frozen
        dtype: torch.dtype | None = None,
        process_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.dtype, self.process_groups = dtype, process_groups
        self._plans: dict[tuple[int, ...], list[tuple[Ownership, torch.dtype]]] = {}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "steps": steps,
            "scale": scale,
            "view": view,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            group["view"].heights(parameter.shape)  # a view that doesn't fit fails here
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active: list[Tensor] = []
        groups: list[dict[str, Any]] = []
        updates: list[Tensor] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                active += params
                groups += [group] * len(params)
                updates += self._momentum_updates(group, params)
        weights = [stack_view(local_part(p)) for p in active]
        for ownership, dtype in self._plan(active, groups):
            mine = {i: stack_view(updates[i]).to(dtype) for i in ownership.layouts}
            steps = groups[next(iter(mine))]["steps"]
            solve = partial(orthogonalise, steps=steps, dtype=dtype)
            for item, where, o in ownership.solve(mine, solve):
                group = groups[item.parameter]
                factor = -group["lr"] * update_scale(group["scale"], item.rows, item.cols)
                weights[item.parameter][where].view(o.shape).add_(o, alpha=factor)
        return loss

    def _momentum_updates(self, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Decays weights, moves the momenta, and returns what is to be orthogonalised."""
        weights = [local_part(p) for p in params]
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        momenta = [local_part(self.state[p]["momentum"]) for p in params]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        if not group["nesterov"]:
            return momenta
        return list(torch._foreach_lerp(grads, momenta, group["momentum"]))

    def _plan(
        self, active: list[Tensor], groups: list[dict[str, Any]]
    ) -> list[tuple[Ownership, torch.dtype]]:
        """Who solves what, per set of ranks and dtype; made once for a set of parameters."""
        key = tuple(map(id, active))
        if key not in self._plans:
            layouts = {i: layout_of(p, self.process_groups) for i, p in enumerate(active)}
            items: dict[Any, list[Item]] = {}
            for i, (parameter, group) in enumerate(zip(active, groups, strict=True)):
                dtype = self.dtype or iteration_dtype(parameter)
                where = items.setdefault((layouts[i].ranks, dtype, group["steps"]), [])
                matrices = group["view"].matrices(parameter.shape)
                where += items_of(i, matrices, layouts[i].boxes)
            self._plans[key] = [
                (Ownership(some, {i.parameter: layouts[i.parameter] for i in some}), dtype)
                for (_, dtype, _), some in items.items()
            ]
        return self._plans[key]
