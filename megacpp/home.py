"""Checkout that this package belongs to; imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

from megacpp.errors import ConfigError

HOME = Path(__file__).parents[1]
ROOMS = ("checkpointing", "optim", "parallel")


def put_first() -> None:
    """Put this checkout first on `sys.path`: other projects have a `parallel` too.

    Raises:
        ConfigError: another package of that name is imported already.
    """
    if sys.path[:1] != [str(HOME)]:
        sys.path.insert(0, str(HOME))
    for room in ROOMS:
        found = getattr(sys.modules.get(room), "__file__", None)
        if found and Path(found).parent != HOME / room:
            raise ConfigError(
                f"import={room}: {found} was imported before megacpp's own. "
                f"Fix: start in a process that doesn't import it, or rename it."
            )
