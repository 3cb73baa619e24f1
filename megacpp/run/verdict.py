"""What all ranks know of a step that was made, before it is taken; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.run.expert_load import ExpertLoad


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of a step, as numbers of the host; the same on every rank.

    Attributes:
        grad_norm: before clipping, of gradients in which what wasn't finite is zero.
        loss: cross entropy, nats per valid token; NaN without one.
        nll_sum, target_bytes: nats of the step, and the bytes that they stand for.
        nonfinite: gradient values that weren't finite, over all ranks, before ranks summed theirs.
        finite: the norm and every rank's loss are.
        healthy: the step may be taken. One without a valid token teaches nothing, and may not.
        auxiliary: coefficient * mean over tokens of each auxiliary loss that is on, summed over
            layers.
        auxiliary_ratio: norm of the gradient of the auxiliary losses over that of the main loss,
            both of the logits of all routers; None without the one or the other.
        loads: of the experts of every E layer of the model.
        leaving: ranks that were told to stop after this step: if one was, all do.
        loss_scale: what the step's loss was multiplied with; None where nothing is (all but fp16).
    """

    grad_norm: float
    loss: float
    nll_sum: float
    valid_tokens: int
    target_bytes: int
    nonfinite: int
    finite: bool
    healthy: bool
    auxiliary: dict[str, float]
    auxiliary_ratio: float | None
    loads: tuple[ExpertLoad, ...] = ()
    leaving: int = 0
    loss_scale: float | None = None

    @property
    def clean(self) -> bool:
        """Nothing in the step wasn't finite."""
        return self.finite and not self.nonfinite

    @property
    def trouble(self) -> str:
        """What is odd about the step, for a person; empty if nothing is."""
        if self.nonfinite:
            return f"{self.nonfinite:,} gradient values are not finite"
        if not self.finite:
            return f"gradient norm {self.grad_norm:g}, loss {self.loss:g}"
        return "" if self.valid_tokens else "no label counts"
