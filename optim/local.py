"""The part of a parameter, gradient or state that this rank stores."""

from __future__ import annotations

from torch import Tensor

from megacpp.dtensor import is_dtensor


def local_part(t: Tensor) -> Tensor:
    """The local tensor of a DTensor, sharing memory; a plain tensor is its own local part.

    Call it without gradients and at every step: FSDP2 may replace a parameter's storage.
    """
    return t._local_tensor if is_dtensor(t) else t  # `to_local` makes a view of a parameter
