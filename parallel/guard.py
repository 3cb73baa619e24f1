"""Gradient values that aren't finite: counted, then zeroed, before ranks add up their gradients.

A sum over ranks spreads one NaN to all of them and hides where it came from. So each rank looks at
what it is about to give: the flat buffer of every reduce-scatter of FSDP2, and, where a unit has no
such reduction (one shard, one process), the gradients themselves. Counts stay on the device; they
travel with the gradient norm, so that nothing waits that wouldn't wait anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.model.hybrid import HybridLM
from megacpp.torch_extras import is_dtensor
from parallel.mesh import World
from parallel.watched_units import watched_units

if TYPE_CHECKING:
    from parallel.stages import Stage


class NonFiniteGuard:
    """Guard of all gradients of this rank's part of a model.

    Attributes:
        names: of what is watched: units of FSDP2, then parameters that no reduction sees.
        counts: int64, values of each that weren't finite since `reset`, on this rank.
    """

    def __init__(
        self, model: HybridLM, world: World, stages: Sequence[Stage] = (), looks: bool = True
    ) -> None:
        """Watch the gradients of a model.

        Args:
            model: this rank's part of the model.
            world: ranks that add up gradients.
            stages: of this rank, where a pipeline has some; these are then the roots of FSDP2.
            looks: False watches nothing: no pass over gradients, and no count.
        """
        units, unseen = watched_units(model, world, stages) if looks else ([], lambda name: False)
        self.loose = [(name, p) for name, p in model.named_parameters() if unseen(name)]
        self.names = [name for name, _ in (*units, *self.loose)]
        self.counts = torch.zeros(len(self.names), dtype=torch.int64, device=world.device)
        for number, (_, unit) in enumerate(units):
            unit.set_custom_reduce_scatter(_guarded(self, number))

    @property
    def total(self) -> Tensor:
        """Number of non-finite values on this rank since `reset`, 0-d fp64."""
        return self.counts.sum(dtype=torch.float64)

    @torch.no_grad()
    def clean(self, number: int, values: Tensor) -> None:
        """Count the non-finite entries of `values` and put zeros there.

        A CPU checks first whether there is any, which costs less than a count; a GPU would have to
        wait for the answer.

        Args:
            number: row of `counts`.
            values: any shape; changed in place.
        """
        if not values.numel():
            return
        looks = values.device.type == "cpu"
        if looks and math.isfinite(torch.linalg.vector_norm(values).item()):
            return  # the 2-norm is the cheapest look by far; where it overflows, the count decides
        self.counts[number] += values.numel() - values.isfinite().sum()
        torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)

    def clean_unreduced(self) -> None:
        """Clean gradients that no reduce-scatter has seen; call it after the last backward.

        No other rank has received any part of these yet.
        """
        first = len(self.names) - len(self.loose)
        for number, (_, p) in enumerate(self.loose, first):
            if p.grad is not None:
                self.clean(number, p.grad.to_local() if is_dtensor(p.grad) else p.grad)

    def reset(self) -> None:
        """Zero all counts."""
        self.counts.zero_()

    def found(self) -> dict[str, int]:
        """Return counts by name, without the zeros; waits for the device."""
        return {n: c for n, c in zip(self.names, self.counts.tolist(), strict=True) if c}


def _guarded(guard: NonFiniteGuard, number: int) -> Any:
    """Return a reduce-scatter for `set_custom_reduce_scatter` that cleans its flat input first.

    The input is in the dtype of the reduction and belongs to FSDP2, which drops it afterwards.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Guarded(DefaultReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            guard.clean(number, input_tensor)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    return Guarded()
