"""The memory of a training step on one rank, in closed form: before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megacpp.config import Config
from megacpp.memory.activations import activation_bytes

Verdict = Literal["fits", "at_risk", "does_not_fit", "unknown"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the fullest moment of a step.

    Attributes:
        components: by name (components.py) at that moment; they sum to `point`.
        detail: of a component, by what it is made of.
        moment: which one that is (`backward of layer 50 (E)`, `optimizer step`, ...).
        moments: bytes at each moment that was looked at.
        resting: between two steps.
        point: what is expected; `upper`: no less than that, whatever routers and allocator do.
        budget: bytes that may be used: the device's memory less the headroom; None: not known.
        assumptions: what the figures rest on, in words.
    """

    components: dict[str, int]
    detail: dict[str, dict[str, int]]
    moment: str
    moments: dict[str, int]
    resting: int
    point: int
    upper: int
    budget: int | None
    assumptions: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """`at_risk`: the point fits, the upper bound doesn't."""
        if self.budget is None:
            return "unknown"
        if self.upper <= self.budget:
            return "fits"
        return "at_risk" if self.point <= self.budget else "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "point": self.point,
            "upper": self.upper,
            "budget": self.budget,
            "verdict": self.verdict,
            "moment": self.moment,
            "resting": self.resting,
            "components": dict(self.components),
            "detail": {name: dict(parts) for name, parts in self.detail.items()},
            "moments": dict(self.moments),
            "assumptions": list(self.assumptions),
        }


def estimate(config: Config, size: int, rank: int = 0, budget: int | None = None) -> MemoryEstimate:
    """What rank `rank` of `size` needs; `config` is resolved for `size` ranks.

    Args:
        budget: bytes that may be used.
    """
    kept = activation_bytes(config, size, rank)
    components = {"activations": kept.bytes, "communication": kept.weights}
    point = sum(components.values())
    return MemoryEstimate(components, {}, "", {}, 0, point, point, budget, ())
