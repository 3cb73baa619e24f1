"""Step statistics that all ranks agree on before the optimizer step; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megacpp.run.expert_load import ExpertLoad


@dataclass(frozen=True)
class StepStatus:
    """Step statistics as numbers of the host, the same on every rank.

    Attributes:
        grad_norm: norm before clipping, of gradients whose non-finite values are zeroed.
        loss: cross entropy, nats per valid token; NaN without one.
        nll_sum, target_bytes: summed nats of the step, and the bytes that they encode.
        valid_tokens: labels that count.
        tokens: tokens of the step, over all ranks.
        nonfinite: number of non-finite gradient values, over all ranks, before the reduction.
        finite: the norm and every rank's loss are finite.
        healthy: the step may be applied. A step without a valid token may not.
        auxiliary: coefficient * mean over tokens of each enabled auxiliary loss, summed over
            layers.
        auxiliary_ratio: norm of the auxiliary losses' gradient over that of the main loss, both
            with respect to the logits of all routers; None without either.
        loads: expert load of every E layer of the model.
        leaving: number of ranks that were asked to stop after this step; if any, all stop.
        loss_scale: factor of the step's loss; None except in fp16.
        loss_by_source: the loss of each source of a mixture that the step has read.
        audit_s, differs: seconds of the step's audit, and the gradient that it found to differ.
    """

    grad_norm: float
    loss: float
    nll_sum: float
    valid_tokens: int
    tokens: int
    target_bytes: int
    nonfinite: int
    finite: bool
    healthy: bool
    auxiliary: dict[str, float]
    auxiliary_ratio: float | None
    loads: tuple[ExpertLoad, ...]
    leaving: int
    loss_scale: float | None
    loss_by_source: Mapping[str, float]
    audit_s: float | None = None
    differs: str = ""

    @property
    def clean(self) -> bool:
        """Whether all values of the step are finite."""
        return self.finite and not self.nonfinite

    @property
    def good(self) -> bool | None:
        """Whether a step was applied as it was computed; None: without a label it tells nothing."""
        return None if self.clean and not self.valid_tokens else self.healthy and self.clean

    @property
    def trouble(self) -> str:
        """Description of the step's problem; empty without one."""
        if self.nonfinite:
            return f"{self.nonfinite:,} gradient values are not finite"
        if not self.finite:
            return f"gradient norm {self.grad_norm:g}, loss {self.loss:g}"
        return "" if self.valid_tokens else "no label counts"
