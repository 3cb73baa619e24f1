"""Rank of this process, from torchrun's environment variables; imports no torch.

    WORLD_SIZE  RANK  LOCAL_RANK  MASTER_ADDR  MASTER_PORT

Without WORLD_SIZE, or with WORLD_SIZE=1, a run is one process without a process group.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp.config.schema import MOST_RANKS as MOST_RANKS
from megacpp.errors import ConfigError, config_error

PORTS = 1 << 16
RANKS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def ranks_started(environment: Mapping[str, str]) -> int:
    """Return the number of ranks of this process's run (1 without torchrun).

    Raises:
        ConfigError: variables that don't identify a rank, so that a process group would fail or
            wait.
    """
    size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS + 1)
    if size is None or size == 1:
        _alone(environment)
        return 1
    for name in NEEDED:
        if not environment.get(name):
            rule = f"WORLD_SIZE={size} asks for {size} ranks, which need it to meet"
            raise config_error(name, "", rule, _fix(size))
    _number(environment, "RANK", 0, size)
    local = _number(environment, "LOCAL_WORLD_SIZE", 1, size + 1) or size
    _number(environment, "LOCAL_RANK", 0, local)
    _number(environment, "MASTER_PORT", 1, PORTS)
    return size


def _alone(environment: Mapping[str, str]) -> None:
    """Check that a single process has rank 0, if it has any."""
    for name in ("RANK", "LOCAL_RANK"):
        if _number(environment, name, 0, MOST_RANKS):
            rule = f"WORLD_SIZE={environment.get('WORLD_SIZE', '')} is one process, which is rank 0"
            raise config_error(name, environment[name], rule, _fix(2))


def _number(environment: Mapping[str, str], name: str, least: int, end: int) -> int | None:
    """Return the integer value of a variable, in [least, end); None if it isn't set."""
    text = environment.get(name)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not least <= number < end:
        raise _wrong(name, text, least, end)
    return number


def _wrong(name: str, text: str, least: int, end: int) -> ConfigError:
    return config_error(name, text, f"must be a whole number from {least} to {end - 1}", _fix(2))


def _fix(size: int) -> str:
    return (
        f"start with torchrun --standalone --nproc-per-node={size} train.py, "
        "or unset WORLD_SIZE RANK LOCAL_RANK"
    )
