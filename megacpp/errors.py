"""Errors that end a run, each with the exit code that tells a launcher which one it was."""

from __future__ import annotations

import difflib
import errno
import math
import re
from collections.abc import Iterable

# Exit code -> meaning, for help and launchers. torchrun's own is 1; its table has ours.
EXIT_CODES = {
    0: "the work is done",
    1: "a check failed, or an error that is none of these",
    2: "configuration: a setting breaks a rule, nothing was started",
    3: "data: missing, damaged, or too little of it",
    4: "checkpoint: missing, damaged or of another model; or a full disk",
    5: "too many non-finite steps in a row",
    6: "a peer is lost or hangs",
    75: "preempted: saved, start it again",
    130: "interrupted by Ctrl-C",
    141: "the output was closed",
}
LONGEST = 120  # characters of a value that an error repeats
GIVEN_KEY = re.compile(r"(?<![\w.-])([a-z]\w*(?:\.[a-z]\w*)+)=([^\s,;:]+)")
GIVEN_NUMBER = re.compile(r"^use (-?\d[\d.e+-]*)(?= or |,|$)")


class MegacppError(Exception):
    """Error whose message is one line for a person; `exit_code` is for the launcher.

    Several mistakes that were found together are separate lines.
    """

    exit_code = 1
    agreed = False  # all ranks raise it: the first one prints it

    def __init__(self, *lines: object) -> None:
        super().__init__("\nerror: ".join(printable(str(line)) for line in lines))


class ConfigError(MegacppError, ValueError):
    """Setting that breaks a rule: one line `key=value: rule (numbers). Fix: action.` each."""

    exit_code = 2


class DataError(MegacppError):
    """Corpus that is missing, truncated, corrupt or out of vocabulary; names shard and row."""

    exit_code = 3


class CheckpointError(MegacppError):
    """Saved training state that is missing, incomplete or of another model."""

    exit_code = 4


class PreemptedError(MegacppError):
    """End of a run that was asked to stop, after it has saved."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: what is tried again succeeds


class NonFiniteError(MegacppError):
    """End of a run after too many non-finite steps."""

    exit_code = 5


def config_error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """Return a configuration error of one line.

    Settings in the fix (`use model.depth=8`, or `use 8` for the key itself) are shown as they are
    typed: `use --model.depth 8`.

    Args:
        key: dotted flag without dashes (`model.depth`).
        value: its value.
        rule: rule that it breaks, with numbers.
        fix: what to type instead.
    """
    if "." in key:
        fix = GIVEN_NUMBER.sub(rf"use {key}=\1", fix)
    fix = GIVEN_KEY.sub(lambda found: f"--{found[1].replace('_', '-')} {found[2]}", fix)
    return ConfigError(f"{shortened(key)}={shortened(value)}: {rule}. Fix: {fix}.")


def path_error(error: OSError) -> ConfigError:
    """Return the error for an invalid path of the command line; raise any other error again.

    An error without a path is one of the output that a command is printed to.
    """
    if error.errno in (errno.ENOSPC, errno.EIO) and error.filename is None:
        return config_error("output", "", (error.strerror or "").lower(), "print to another file")
    if error.filename is None or isinstance(error.filename, int):
        raise error
    why = (error.strerror or type(error).__name__).lower()
    path = error.filename2 or error.filename  # the one that a file was to be renamed to
    return config_error("path", path, why, "give a path that can be used")


def shortened(value: object) -> str:
    """Return a value as text of at most `LONGEST` characters, without the middle of longer ones."""
    if isinstance(value, int) and abs(value) >= 10**LONGEST:
        return f"a number of {round(value.bit_length() * math.log10(2))} digits"
    text = str(value)
    end = LONGEST // 4
    return text if len(text) <= LONGEST else f"{text[: LONGEST - end - 3]}...{text[-end:]}"


def printable(text: str) -> str:
    """Return text as one line: line breaks, control codes and invalid UTF-8 become escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `did you mean 'x'` if a known word is similar, else a list of the known words."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}" if close else f"use one of {', '.join(words)}"
