"""Local shards of parameters, gradients and optimizer state."""

from __future__ import annotations

from torch import Tensor

from megacpp.dtensor import is_dtensor


def local_part(t: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, sharing memory, or a plain tensor itself.

    Call it without gradients and at every step: FSDP2 may replace a parameter's storage.

    Args:
        t: any shape.
    """
    return t._local_tensor if is_dtensor(t) else t  # `to_local` makes a view of a parameter
