"""What lies on the table while a mixer is walked through: the sums of its moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megacpp.memory.forms.activation_share import Kept, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import copied


class Desk:
    """Bytes that are alive, by name; a moment is all of them and some temporaries.

    Attributes:
        gradients: of the mixer's own weights, made so far.
        reads: a projection's backward has run.
    """

    def __init__(self, own: Share, **kept: int) -> None:
        self.own, self.alive = own, kept
        self.gradients, self.reads = 0, False
        self._fresh = 0

    def put(self, **made: int) -> None:
        """Makes tensors, or larger ones of the same names."""
        for name, size in made.items():
            self.alive[name] = self.alive.get(name, 0) + size

    def drop(self, *names: str) -> None:
        """Frees what is there of them."""
        for name in names:
            self.alive.pop(name, None)

    def moment(self, name: str, *temporaries: int) -> Moment:
        """Now."""
        tensors = sum(self.alive.values()) + sum(temporaries)
        fresh, self._fresh = self._fresh, 0
        return Moment(name, tensors, self.gradients, self.reads, fresh)

    def learn(self, numbers: int) -> int:
        """The gradient of a weight is made; bytes of the narrow one where it is then cast."""
        own = self.own
        self._fresh = numbers * (own.compute if own.parallel else own.wide)
        self.gradients += self._fresh
        return 0 if own.parallel or own.compute == own.wide else numbers * own.compute


def returned(own: Share, kept: Iterable[Kept]) -> Iterator[Moment]:
    """What a mixer returns, summed over the tensor axis and cut by tokens, beside what it keeps.

    Joined weights of thin projections are counted here: they are alive like all that it keeps.
    """
    if own.tp > 1:
        numbers = own.tokens * (1 + copied(own)) + own.stream
        size = sum(count * each for _, count, each in kept)
        yield Moment("scatter", size + numbers * own.config.model.dim * own.compute)
