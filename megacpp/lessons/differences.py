"""Largest difference between tensors, in which a value that isn't finite is infinitely large.

Python's `max` keeps its first argument when the second is NaN, so `max(0.0, nan)` is 0.0: a test
that compares such a maximum with a tolerance passes whatever was computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def largest(values: Iterable[float]) -> float:
    """Return the largest value, infinity if one is NaN.

    Raises:
        ValueError: there is no value, so nothing was compared.
    """
    return max(math.inf if math.isnan(value) else value for value in values)


def relative(got: Tensor, want: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest difference over the largest entry of what is expected.

    Equal tensors differ by 0, tensors without elements too; values that aren't finite, on either
    side, differ by infinity, and so does any value from zeros.

    Args:
        got: what was computed, of any shape.
        want: what is expected, any shape, the same.
        whole: tensor of any shape that `want` is a part of, whose largest entry counts.
    """
    assert got.shape == want.shape, (tuple(got.shape), tuple(want.shape))
    if not want.numel():
        return 0.0
    difference = (got.double() - want.double()).abs().max().item()
    size = (want if whole is None else whole).double().abs().max().item()
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)
