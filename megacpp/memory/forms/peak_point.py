"""Bytes that are alive at once at a moment of a step; pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PeakPoint:
    """Bytes that are alive at once.

    Attributes:
        name: of the moment, for people: `after gate and up`, ...
        tensors: bytes of saved activations, of gradients from later layers, and of temporaries.
        gradients: bytes of the layer's own whole weight gradients, made by this microbatch.
        fresh: the part of `gradients` that one process hasn't yet added to those of earlier
            microbatches: it adds each as soon as it is made (None: all of them).
    """

    name: str
    tensors: int
    gradients: int = 0
    fresh: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of tensors and gradients."""
        return self.tensors + self.gradients

    @property
    def added(self) -> int:
        """Bytes, if earlier microbatches of one process have left gradients."""
        return self.tensors + (self.gradients if self.fresh is None else self.fresh)

    def more(self, tensors: int, gradients: int = 0) -> PeakPoint:
        """Return the moment with more bytes alive."""
        new = self.tensors + tensors, self.gradients + gradients
        return replace(self, tensors=new[0], gradients=new[1])
