"""What is alive at once at some moment of a step, in bytes; pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that are alive at once.

    Attributes:
        name: of the moment, for people: `after gate and up`, ...
        tensors: kept ones, those that came from behind, temporaries.
        gradients: of the layer's own weights, whole; what this microbatch has made of them.
        reads: of a mixer's backward: what its projections read has been asked for by now.
        fresh: of `gradients`, those that one process hasn't added to earlier microbatches' by now:
            it adds each as soon as it is made (None: all of them).
    """

    name: str
    tensors: int
    gradients: int = 0
    reads: bool = True
    fresh: int | None = None

    @property
    def bytes(self) -> int:
        return self.tensors + self.gradients

    @property
    def added(self) -> int:
        """Bytes, where earlier microbatches of one process have left gradients."""
        return self.tensors + (self.gradients if self.fresh is None else self.fresh)

    def more(self, tensors: int, gradients: int = 0) -> Moment:
        """The same moment with something else alive."""
        new = self.tensors + tensors, self.gradients + gradients
        return replace(self, tensors=new[0], gradients=new[1])


def one_at_a_time(moments: Iterable[Moment], most: int) -> Iterator[Moment]:
    """Where nothing is said of it, one gradient of so many bytes is fresh, if there are any."""
    for m in moments:
        yield replace(m, fresh=min(m.gradients, most)) if m.fresh is None else m
