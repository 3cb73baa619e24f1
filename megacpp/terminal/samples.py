"""Text of a model or a corpus on the screen."""

from __future__ import annotations

import re
import sys

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Return text with pictures of control codes beside line breaks and tabs.

    So a text can't control the terminal. Codes without a picture become replacement characters.
    """
    return CONTROL.sub(_picture, text)


def _picture(control: re.Match[str]) -> str:
    """Return the Unicode control picture of a control character."""
    code = ord(control[0])
    return chr(0x2400 + code if code < 0x20 else 0x2421 if code == 0x7F else 0xFFFD)


def print_sample(text: str, end: str = "\n") -> None:
    """Print text of a model at once; on a terminal control codes become `visible`."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=True)
