"""Expert load: balance of the routers in a step, for its record; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEW = 8  # mean tokens per expert below which an idle expert may be chance


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one E layer in one step, over all ranks.

    Attributes:
        layer: index in the model.
        counts: number of choices per expert.
        nulls: part of all slots that were null experts; None without them.
        bias_range: largest selection bias minus the smallest; None without a bias.
    """

    layer: int
    counts: tuple[int, ...]
    nulls: float | None = None
    bias_range: float | None = None

    @property
    def mean(self) -> float:
        """Mean number of choices per expert."""
        return sum(self.counts) / len(self.counts)

    @property
    def busiest(self) -> float:
        """Choices of the busiest expert over the mean; 1 is even, 0 without a choice."""
        return max(self.counts) / self.mean if self.mean else 0.0

    @property
    def entropy(self) -> float:
        """Entropy of the choices over that of an even load: 1 is even, 0 all on one expert."""
        total = sum(self.counts)
        if not total or len(self.counts) == 1:
            return 0.0
        parts = [n / total for n in self.counts if n]
        return abs(math.fsum(p * math.log(p) for p in parts)) / math.log(len(self.counts))

    @property
    def dead(self) -> int:
        """Number of experts without a token."""
        return self.counts.count(0)


def load_figures(loads: Sequence[ExpertLoad]) -> dict[str, Mapping[str, float]]:
    """Return each figure by layer, to four decimals, for metrics.jsonl and TensorBoard."""
    if not loads:
        return {}
    values = {
        "load_max_over_mean": lambda load: load.busiest,
        "load_entropy": lambda load: load.entropy,
        "dead_experts": lambda load: load.dead,
        "bias_range": lambda load: load.bias_range,
        "null_fraction": lambda load: load.nulls,
    }
    found = {
        name: {str(load.layer): round(x, 4) for load in loads if (x := value(load)) is not None}
        for name, value in values.items()
    }
    return {name: by_layer for name, by_layer in found.items() if by_layer}


class LoadWatch:
    """Warning about unevenly loaded experts: one line, then none for some steps.

    Args:
        limit: load of the busiest expert over the mean of its layer that is reported.
        quiet: steps after a line without another one.
    """

    def __init__(self, limit: float, quiet: int = 100) -> None:
        self.limit, self.quiet, self._again = limit, quiet, 0

    def observe(self, step: int, loads: Sequence[ExpertLoad]) -> list[str]:
        """Return the warning about step `step` (the first is 0), or none."""
        if step < self._again:
            return []
        busy = [load for load in loads if load.busiest > self.limit]
        dead = [load for load in loads if load.dead and load.mean >= FEW]
        if not busy and not dead:
            return []
        self._again = step + self.quiet
        found = []
        if busy:
            worst = max(busy, key=lambda load: load.busiest)
            found.append(
                f"the busiest expert of layer {worst.layer} has {worst.busiest:.1f} times the mean "
                f"(limit {self.limit:g}, {len(busy)} of {len(loads)} layers)"
            )
        if dead:
            worst = max(dead, key=lambda load: load.dead)
            found.append(
                f"{worst.dead} of {len(worst.counts)} experts of layer {worst.layer} have no token "
                f"({len(dead)} of {len(loads)} layers)"
            )
        return [f"step {step + 1}: warning: {'; '.join(found)}"]
