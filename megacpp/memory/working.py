"""What a part of the model needs while it runs, in closed form: beside what others keep.

`forward` and `backward` give the fullest moments of one layer. Counted at a moment: what the layer
keeps, as far as it is alive, what came from behind, temporaries, and the gradients of the layer's
own weights, whole. Not counted: weights (shards, gathered, in collectives), what layers before
keep. tests/memory/working_sets.py finds the same in a traced step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that are alive at once.

    Attributes:
        name: of the moment, for people: `after gate and up`, ...
        tensors: kept ones, those that came from behind, temporaries.
        gradients: of the layer's own weights, whole.
    """

    name: str
    tensors: int
    gradients: int = 0

    @property
    def bytes(self) -> int:
        return self.tensors + self.gradients
