"""Questions about DTensors that don't import them.

`torch.distributed.tensor` takes as long to import as the rest of torch beyond its core (sympy); a
process that made no DTensor needs none of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Whether `t` is a DTensor; False as long as nobody imported the class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)
