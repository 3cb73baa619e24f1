"""Order of the rows of sources whose rows differ in tokens: shares are exact by token.

    row          0      1      2      3        ...
    source       talks  prose  talks  talks         talks=0.5, prose=0.5; rows of 8 tokens
    its tokens   5      8      7      3

After any number of rows the tokens of a source differ from its share of all by less than a whole
row. The order is a function of the sources alone: every rank computes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

KEPT = 1 << 16  # places that are remembered, at least


class TokenWalk:
    """Order of a mixture's rows from some row on.

    The next row is of a source that has at most its share of the tokens so far; of these, of the
    one whose share comes to the end of its row first (WF2Q: Bennett and Zhang 1996).

    Args:
        first_row: global number of the first row.
        shares: share of each source, by name.
        rows: rows of each source before that row.
        tokens: tokens of each source that count, before that row.
        tokens_of: tokens of a row of a source, by its number there.
    """

    def __init__(
        self,
        first_row: int,
        shares: Mapping[str, Fraction],
        rows: Mapping[str, int],
        tokens: Mapping[str, int],
        tokens_of: Callable[[str, int], int],
    ) -> None:
        self._start = first_row, dict(rows), dict(tokens)
        self._tokens_of = tokens_of
        parts = math.lcm(*(share.denominator for share in shares.values()))
        self._counts = {name: int(share * parts) for name, share in shares.items() if share}
        all_counts = math.lcm(*self._counts.values())
        self._scales = {name: all_counts // count for name, count in self._counts.items()}
        self._parts = parts
        self._restart()

    def place(self, row: int) -> tuple[str, int]:
        """Return the source of a global row, and the row's number within that source."""
        if row < self._first:  # long ago
            self._restart()
        while row >= self._first + len(self._places):
            self._step()
        return self._places[row - self._first]

    def before(self, row: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return rows and tokens of each source before a global row."""
        if row < self._first:  # long ago
            self._restart()
        while row > self._first + len(self._places):
            self._step()
        rows, tokens = dict(self._rows), dict(self._tokens)
        for name, at in self._places[row - self._first :]:  # placed already
            rows[name] -= 1
            tokens[name] -= self._tokens_of(name, at)
        return {name: count for name, count in rows.items() if count}, tokens

    def _restart(self) -> None:
        self._first, rows, tokens = self._start
        self._rows, self._tokens = dict(rows), {**dict.fromkeys(self._counts, 0), **tokens}
        self._places: list[tuple[str, int]] = []
        self._next = {name: self._tokens_of(name, rows.get(name, 0)) for name in self._counts}

    def _step(self) -> None:
        """Append the place of one more row."""
        total = sum(self._tokens.values())
        name = min(
            (n for n, c in self._counts.items() if self._tokens[n] * self._parts <= c * total),
            key=lambda n: (self._tokens[n] + self._next[n]) * self._scales[n],
        )
        if len(self._places) == 2 * KEPT:
            self._places, self._first = self._places[KEPT:], self._first + KEPT
        at = self._rows.get(name, 0)
        self._places.append((name, at))
        self._rows[name] = at + 1
        self._tokens[name] += self._next[name]
        self._next[name] = self._tokens_of(name, at + 1)
