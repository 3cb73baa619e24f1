"""What speaks against a backend for a configuration on a host; no torch import here.

A refusal returns the reason why its backend can't do its operation, or None: it can. It is asked
with a configuration whose other rules hold.
"""

from __future__ import annotations

from megacpp.config import Config
from megacpp.kernel_host import Host


def always(config: Config, host: Host) -> None:
    """Nothing speaks against it: plain torch, on any device, cut in any way."""


def whole_rows(config: Config, host: Host) -> str | None:
    """Definitions that know rows as a whole."""
    if config.mesh.cp > 1:
        return f"needs whole rows on a rank (mesh.cp={config.mesh.cp})"
    return None


def whole_vocabulary(config: Config, host: Host) -> str | None:
    """A definition that makes the logits of all words."""
    if config.mesh.tp > 1:
        return f"needs the whole vocabulary on a rank (mesh.tp={config.mesh.tp})"
    return None
