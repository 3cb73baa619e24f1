"""What is alive at once at some moment of a step, in bytes; pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that are alive at once.

    Attributes:
        name: of the moment, for people: `after gate and up`, ...
        tensors: kept ones, those that came from behind, temporaries.
        gradients: of the layer's own weights, whole; what this microbatch has made of them.
        reads: of a mixer's backward: what its projections read has been asked for by now.
    """

    name: str
    tensors: int
    gradients: int = 0
    reads: bool = True

    @property
    def bytes(self) -> int:
        return self.tensors + self.gradients

    def more(self, tensors: int, gradients: int = 0) -> Moment:
        """The same moment with something else alive."""
        return Moment(self.name, self.tensors + tensors, self.gradients + gradients, self.reads)
