"""Resolution of a launch: the memory gate, or the ladder of a fitted run."""

from __future__ import annotations

import torch

from megacpp.config.arguments import Resolved
from megacpp.launch.gate import Admission, check_memory
from megacpp.run.rank_store import RankStore


def resolve_launch(
    resolved: Resolved, peers: RankStore, device: torch.device
) -> tuple[Resolved, Admission]:
    """Return the configuration that a run starts with, and its memory estimate.

    That is the given configuration, unless `memory.fit` is `auto`. Every rank calls it, before any
    process group exists.

    Args:
        resolved: given configuration.
        peers: store of all ranks.
        device: device of this rank.

    Raises:
        ConfigError: it doesn't fit and the gate is on; or no candidate fits.
        MegacppError: an attempt failed for another reason than memory.
    """
    if resolved.config.memory.fit != "auto":
        return resolved, check_memory(resolved, peers.size, device)
    from megacpp.launch.auto_fit import fitted  # imports the planner

    return fitted(resolved, peers, device)
