"""What accumulating gradients costs over the data axes: bytes that travel, bytes that stay.

All per parameter, for matrices in `compute_bytes` (2: bf16) whose gradients are reduced in
`reduce_bytes` (4: fp32). A collective counts with the bytes of its larger side, of which a ring of
n ranks sends (n - 1) / n.

    train.gradient_sync    gathers                  reductions    kept between microbatches
    defer                  2 a microbatch (1 kept)  1 a step      whole gradients
    each                   2 a microbatch (1 kept)  1 each        this rank's shard of them
    resident               1 a step                 1 a step      whole gradients and parameters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GradientSync = Literal["defer", "each", "resident"]


@dataclass(frozen=True)
class Travelling:
    """Bytes a parameter and optimizer step."""

    gathered: int
    reduced: int

    @property
    def total(self) -> int:
        return self.gathered + self.reduced


def travelling(
    sync: GradientSync,
    microbatches: int,
    gathered_again: bool = True,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
) -> Travelling:
    """What FSDP2 moves for a block in a step of `microbatches`.

    Args:
        gathered_again: a backward gathers the parameters anew (`mesh.reshard=always`).
    """
    gathers = 1 if sync == "resident" else microbatches * (2 if gathered_again else 1)
    reductions = microbatches if sync == "each" else 1
    return Travelling(gathers * compute_bytes, reductions * reduce_bytes)


@dataclass(frozen=True)
class BetweenMicrobatches:
    """Bytes of a rank between two microbatches of a step."""

    whole_gradients: int
    sharded_gradients: int
    whole_parameters: int

    @property
    def total(self) -> int:
        return self.whole_gradients + self.sharded_gradients + self.whole_parameters


def held(
    sync: GradientSync,
    parameters: int,
    sharded_parameters: int,
    microbatches: int,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
) -> BetweenMicrobatches:
    """What a rank keeps from one microbatch to the next; with one microbatch there is no next.

    Args:
        parameters: elements of the units that a rank gathers (after tp, ep and pp), whole.
        sharded_parameters: elements of its shards of them.
    """
    if microbatches == 1:
        return BetweenMicrobatches(0, 0, 0)
    if sync == "each":
        return BetweenMicrobatches(0, sharded_parameters * reduce_bytes, 0)
    kept = parameters * compute_bytes if sync == "resident" else 0
    return BetweenMicrobatches(parameters * reduce_bytes, 0, kept)
