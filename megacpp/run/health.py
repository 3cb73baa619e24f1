"""Warnings about gradient norms and losses outside the range of earlier steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacpp.config.mix import data_setting
from megacpp.config.schema import Config
from megacpp.errors import DataError, NonFiniteError
from megacpp.state.checkpoint import newest_sound

ROUNDING = 1e-6  # losses this close to each other, relatively, differ by fp32 sums alone


def budget_spent(config: Config, folder: Path) -> NonFiniteError:
    """Return the error that ends a run after `train.max_skips` bad steps in a row.

    Args:
        config: configuration of the run.
        folder: folder of checkpoints; none is saved between the first of these steps and the end.
    """
    again = "resume from that checkpoint" if newest_sound(folder) else "start again"
    return NonFiniteError(
        f"train.max_skips={config.train.max_skips}: so many steps in a row were left out or had "
        f"values that are not finite; {_before(folder)}. Fix: lower optim.lr ({config.optim.lr:g}) "
        f"or raise optim.warmup_steps, and {again}."
    )


def ended_badly(config: Config, folder: Path, bad_steps: int) -> NonFiniteError:
    """Return the error of a run whose last steps were bad.

    Args:
        config: configuration of the run.
        folder: folder of checkpoints; the last one has the state behind these steps.
        bad_steps: number of them.
    """
    return NonFiniteError(
        f"run.steps={config.run.steps}: the last steps ({bad_steps}) were left out or had values "
        f"that are not finite, so final/ is not written; {_before(folder)}. Fix: lower optim.lr "
        f"({config.optim.lr:g}), or go on with more run.steps: a good step ends such a streak."
    )


def no_labels(config: Config) -> DataError:
    """Return the error that ends a run after `train.max_skips` steps in a row without a label.

    Args:
        config: configuration of the run.
    """
    return DataError(
        f"{data_setting(config.data)}: no label of {config.train.max_skips} steps in a row counts "
        "(train.max_skips), so nothing is learned. Fix: look at the labels with megacpp data "
        "inspect, and prepare a corpus in which some count."
    )


def _before(folder: Path) -> str:
    newest = newest_sound(folder)
    return f"{newest} is from before them" if newest else "nothing was saved before them"


class Health:
    """Monitor of the steps that updated the weights; it warns, and counts spikes (rewind.py).

    A gradient norm is compared with the exponential average of the norms before it, and then added
    to it. A loss is compared with mean and standard deviation of the losses before it. Non-finite
    values are handled by the guard: they enter neither and aren't spikes.

    A young average would be biased towards its start at 0. Here each step x has the weight that it
    would have in `a <- (1 - alpha) a + alpha x`, over the sum of the weights so far (the bias
    correction of Adam, arXiv 1412.6980, section 3): after one step the average is that step.

    In comparison, OLMo-core skips steps whose loss or norm is 6 sigma above the last 128 and lets
    NaN into that window, where it disables the rule until it leaves; the spike score of OLMo 2
    (arXiv 2501.00656) counts values 7 sigma off the last 1,000. Spikes enter the window here, and
    the average of norms as `warn` times it; otherwise a loss or a norm that stays on a higher level
    would be reported forever.

    Args:
        alpha: weight of the newest gradient norm.
        warn, critical: multiples of the average at which gradient norms are reported.
        sigmas: standard deviations above the mean that make a loss a spike.
        window: number of losses for mean and deviation.
        least: number of losses before any is called a spike.

    Attributes:
        spikes: steps in a row, up to the last one, whose loss or gradient norm was reported; of the
            first `least` steps none is counted.
    """

    def __init__(
        self,
        alpha: float = 0.01,
        warn: float = 10.0,
        critical: float = 100.0,
        sigmas: float = 6.0,
        window: int = 128,
        least: int = 32,
    ) -> None:
        assert 0 < alpha <= 1 and 1 < warn <= critical and 2 <= least <= window
        self.alpha, self.warn, self.critical = alpha, warn, critical
        self.sigmas, self.least = sigmas, least
        self._average = self._weight = 0.0  # average of gradient norms; sum of weights
        self._losses: deque[float] = deque(maxlen=window)
        self._ratio: float | None = None
        self._sigma: float | None = None
        self.spikes = 0

    def observe(self, step: int, loss: float, grad_norm: float) -> list[str]:
        """Add a step that wasn't skipped.

        Args:
            step: index of the step; the first is 0, the text counts from 1.
            loss: loss of the step over all ranks, nats per valid token.
            grad_norm: global norm, before clipping.

        Returns:
            Warnings, one line each.
        """
        enough = len(self._losses) >= self.least
        found = [self._check_norm(grad_norm), self._check_loss(loss)]
        self.spikes = self.spikes + 1 if enough and any(found) else 0
        return [f"step {step + 1}: {line}" for line in found if line]

    def figures(self) -> dict[str, float | None]:
        """Return the figures of the last observed step for its record; None without a comparison.

        `grad_norm_ratio`: gradient norm over its average. `loss_sigma`: standard deviations of the
        loss above the mean.
        """
        return {"grad_norm_ratio": self._ratio, "loss_sigma": self._sigma}

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run; JSON keeps these floats to the last bit."""
        found = {"average": self._average, "weight": self._weight, "losses": list(self._losses)}
        return found | {"spikes": self.spikes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state()`; of a longer window the newest losses are kept."""
        self._average, self._weight = state["average"], state["weight"]
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._ratio = self._sigma = None
        self.spikes = state.get("spikes", 0)

    def _check_norm(self, norm: float) -> str:
        self._ratio = None
        if not math.isfinite(norm):
            return ""
        before = self._average
        if before > 0:
            self._ratio = norm / before
        self._weight += self.alpha * (1 - self._weight)
        taken = min(norm, self.warn * before) if before > 0 else norm
        self._average += self.alpha / self._weight * (taken - before)
        if self._ratio is None or self._ratio < self.warn:
            return ""
        word, limit = "warning", self.warn
        if self._ratio >= self.critical:
            word, limit = "CRITICAL", self.critical
        return (
            f"{word}: gradient norm {norm:.4g} is {self._ratio:.1f} times its average "
            f"{before:.4g} (limit {limit:g})"
        )

    def _check_loss(self, loss: float) -> str:
        self._sigma = None
        if not math.isfinite(loss):
            return ""
        line, seen = "", len(self._losses)
        if seen >= self.least:
            mean, deviation = self._spread()
            self._sigma = (loss - mean) / deviation if deviation else None
            if self._sigma is not None and self._sigma >= self.sigmas:
                line = (
                    f"warning: loss {loss:.4f} is {self._sigma:.1f} sigma above the mean "
                    f"{mean:.4f} of the last {seen} steps (limit {self.sigmas:g})"
                )
        self._losses.append(loss)
        return line

    def _spread(self) -> tuple[float, float]:
        """Return mean and sample standard deviation of the window, at least rounding's."""
        n = len(self._losses)
        mean = math.fsum(x / n for x in self._losses)  # no sum of large losses overflows
        squares = sum((x - mean) * (x - mean) / (n - 1) for x in self._losses)
        return mean, max(math.sqrt(squares), ROUNDING * abs(mean))
