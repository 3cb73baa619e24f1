"""Factor of the loss by which fp16 gradients neither vanish nor overflow."""

from __future__ import annotations

from megacpp.config.schema import PrecisionConfig

LEAST, MOST = 2.0**-16, 2.0**32  # beyond these no step's gradients tell anything


class LossScale:
    """Loss scale, dynamic for fp16: halved by a skipped step, doubled after many good ones.

    Any other precision has the exponents of fp32 and needs no scale: 1 forever. Powers of two, so
    that scaling a gradient there and back is exact (Micikevicius et al., arXiv 1710.03740).
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = config.dtype == "fp16"
        self.value = config.loss_scale if self.dynamic else 1.0
        self.growth_interval = config.loss_scale_growth
        self.good_steps = 0  # in a row since the scale last changed

    def update(self, stepped: bool) -> None:
        """Update the scale once per optimizer step, after it was applied or left out."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if stepped else 0
        if not stepped:
            self.value = max(LEAST, self.value * 0.5)
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(MOST, self.value * 2.0), 0

    def state(self) -> dict[str, float | bool]:
        """Return the state that a resumed run needs."""
        return {"dynamic": self.dynamic, "value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float | bool]) -> None:
        """Restore the state; a run whose precision changed starts with its own scale."""
        if self.dynamic and state["dynamic"]:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
