"""Checkout that this package belongs to, and the cache of a user; imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megacpp.errors import ConfigError

HOME = Path(__file__).parents[1]
ROOMS = ("checkpointing", "optim", "parallel")


def cache_folder() -> Path:
    """Return the folder of files that megacpp caches for a user and can make again."""
    given = os.environ.get("MEGACPP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/megacpp").expanduser()


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
