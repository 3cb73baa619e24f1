"""Assignment 5: ring attention."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def ring_attention(
    link: Any, q_NtH: Tensor, k_NtH: Tensor, v_NtH: Tensor, positions: Sequence[Sequence[int]]
) -> Tensor:
    """Return causal attention for this rank's queries, `[heads, tokens, width]`.

    Args:
        link: way to the other ranks.
        q_NtH: queries of this rank's tokens.
        k_NtH: their keys.
        v_NtH: their values.
        positions: positions in the row of each rank's tokens.
    """
    raise NotImplementedError
