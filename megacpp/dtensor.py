"""Test for DTensors that doesn't import them, and the local shard of one.

`torch.distributed.tensor` takes as long to import as the rest of torch beyond its core (sympy); a
process without DTensors doesn't need it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Return whether `t` is a DTensor; False as long as the class isn't imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local_part(t: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, sharing memory, or a plain tensor itself.

    Call it without gradients and at every step: FSDP2 may replace a parameter's storage.

    Args:
        t: any shape.
    """
    return t._local_tensor if is_dtensor(t) else t  # `to_local` makes a view of a parameter
