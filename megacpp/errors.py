"""Every way a run ends early, with the exit code that tells a launcher which one it was."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit code -> meaning, for help and launchers. torchrun's own is 1; its table has ours.
EXIT_CODES = {
    0: "the work is done",
    1: "a check failed, or an error that is none of these",
    2: "configuration: a setting breaks a rule, nothing was started",
    3: "data: missing, damaged or not for this vocabulary",
    4: "checkpoint: missing, damaged or of another model",
    5: "too many non-finite steps in a row",
    6: "a peer is lost or hangs",
    75: "preempted: saved, start it again",
}


class MegacppError(Exception):
    """An error whose message is one line for a person; `exit_code` is for the launcher."""

    exit_code = 1
    agreed = False  # all ranks raise it: the first one prints it


class ConfigError(MegacppError, ValueError):
    """A setting breaks a rule: `key=value: rule (numbers). Fix: action.` Raised before any work."""

    exit_code = 2


class DataError(MegacppError):
    """The corpus is missing, truncated, corrupt or out of vocabulary; names shard and row."""

    exit_code = 3


class CheckpointError(MegacppError):
    """Saved training state is missing, incomplete or doesn't match the model."""

    exit_code = 4


class PreemptedError(MegacppError):
    """The run was told to leave, and has saved."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: what is tried again succeeds


class NonFiniteError(MegacppError):
    """The budget of non-finite steps is spent."""

    exit_code = 5


def config_error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """One-line configuration error; `key` is the dotted flag without dashes (`model.depth`)."""
    return ConfigError(f"{key}={value}: {rule}. Fix: {fix}.")


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`did you mean 'x'` when a known word is close, else a list of the known words."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}" if close else f"use one of {', '.join(words)}"
