"""Cost of gradient accumulation over the data axes: bytes that travel, bytes that stay.

All figures are per parameter, for matrices in `compute_bytes` (2: bf16) whose gradients are reduced
in `reduce_bytes` (4: fp32). A collective counts with the bytes of its larger side; a ring of n
ranks sends (n - 1) / n of them.

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
    """Bytes that travel per parameter and optimizer step."""

    gathered: int
    reduced: int

    @property
    def total(self) -> int:
        """Bytes gathered and reduced."""
        return self.gathered + self.reduced


def travelling(
    sync: GradientSync,
    microbatches: int,
    gathered_again: bool = True,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
) -> Travelling:
    """Return the bytes per parameter that FSDP2 moves for a block in a step.

    Args:
        sync: `train.gradient_sync`.
        microbatches: their number in the step.
        gathered_again: a backward gathers the parameters again (`mesh.reshard=always`).
        compute_bytes: bytes of an element in matrix products.
        reduce_bytes: bytes of an element in gradient reductions.
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
        """Bytes of gradients and parameters."""
        return self.whole_gradients + self.sharded_gradients + self.whole_parameters


def held(
    sync: GradientSync,
    parameters: int,
    sharded_parameters: int,
    microbatches: int,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
) -> BetweenMicrobatches:
    """Return bytes that a rank keeps from one microbatch to the next; 0 with one microbatch.

    Args:
        sync: `train.gradient_sync`.
        parameters: elements of the units that a rank gathers (after tp, ep and pp), whole.
        sharded_parameters: elements of its shards of them.
        microbatches: their number in the step.
        compute_bytes: bytes of an element in matrix products.
        reduce_bytes: bytes of an element in gradient reductions.
    """
    if microbatches == 1:
        return BetweenMicrobatches(0, 0, 0)
    if sync == "each":
        return BetweenMicrobatches(0, sharded_parameters * reduce_bytes, 0)
    kept = parameters * compute_bytes if sync == "resident" else 0
    return BetweenMicrobatches(parameters * reduce_bytes, 0, kept)
