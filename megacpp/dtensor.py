"""Test for DTensors that doesn't import them.

`torch.distributed.tensor` takes as long to import as the rest of torch beyond its core (sympy); a
process without DTensors doesn't need it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Return whether `t` is a DTensor; False as long as the class isn't imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)
