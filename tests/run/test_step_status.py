"""Words of a step that isn't applied."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megacpp.run.step_status import StepStatus

SOUND = StepStatus(1.5, 2.25, 9.0, 4, 6, 16, 0, True, True, {}, None, (), 0, None, {})


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (SOUND, ""),
        (replace(SOUND, valid_tokens=0), "no label counts"),
        (replace(SOUND, nonfinite=1024), "1,024 gradient values are not finite"),
        (replace(SOUND, loss=math.inf, finite=False), "gradient norm 1.5, loss inf"),
        (replace(SOUND, nonfinite=1, finite=False), "1 gradient values are not finite"),
    ],
)
def test_a_step_says_what_is_wrong(status: StepStatus, words: str) -> None:
    assert status.trouble == words
    assert status.clean == (words in ("", "no label counts"))


def test_a_step_without_a_label_is_neither_good_nor_bad() -> None:
    empty = replace(SOUND, valid_tokens=0, healthy=False)
    assert SOUND.good is True and empty.good is None
    assert replace(empty, nonfinite=1).good is False
    assert replace(SOUND, nonfinite=1).good is False  # applied with zeros instead
