"""Mixture of corpora with exact shares: each row is a function of its global number alone.

    rows        0     1     2     3     4     5 ...
    source      code  prose code  code  prose code ...     code=0.6, prose=0.4
    its row     0     0     1     2     1     3 ...

After any number of rows the rows of a source differ from its share by less than one. Where rows
are padded (conversations), tokens are counted instead (token_shares.py). A stage that begins at a
later step opens a segment at the first row of that step; the rows of the sources go on where they
were. Segments are saved with the state, so that other steps after a resume (or another mixture)
change no row that was read.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from megacpp.config.mix import MixStage
from megacpp.data.batches import Batch
from megacpp.data.conversations import ChatTemplate
from megacpp.data.corpus import Corpus
from megacpp.data.token_shares import TokenWalk
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError, config_error
from megacpp.model.documents import Documents


@dataclass(frozen=True)
class Segment:
    """Rows from `first_row` on with constant shares.

    Attributes:
        first_row: global number of its first row.
        shares: share of each source, by name.
        before: rows of each source that were read before.
        tokens: tokens of each source that were read before and count; None: shares are by row.
    """

    first_row: int
    shares: Mapping[str, Fraction]
    before: Mapping[str, int]
    tokens: Mapping[str, int] | None = None

    def place(self, row: int) -> tuple[str, int]:
        """Return the source of a global row, and the row's number within that source."""
        names, ranks, counts = order_of_sources(tuple(self.shares.items()))
        turns, at = divmod(row - self.first_row, len(names))
        name = names[at]
        return name, self.before.get(name, 0) + turns * counts[name] + ranks[at]

    def rows_before(self, row: int) -> dict[str, int]:
        """Return the rows of each source before a global row of this segment."""
        names, _, counts = order_of_sources(tuple(self.shares.items()))
        turns, at = divmod(row - self.first_row, len(names))
        begun = names[:at]
        found = dict(self.before)
        for name, count in counts.items():
            found[name] = found.get(name, 0) + turns * count + begun.count(name)
        return found


class Mixture:
    """Rows of several prepared corpora, with what a run asks of a `Corpus`.

    Held-out rows are those of all sources, whatever the shares; in any first part of them a source
    has about its part of the whole.

    Args:
        corpora: sources by name, with equal row lengths.
        stages: shares from a step on; the first stage begins at step 0.
        mix: setting that they come from, for messages.

    Raises:
        ConfigError: a source has another tokenizer than the first one.
    """

    def __init__(
        self, corpora: Mapping[str, Corpus], stages: Sequence[MixStage], mix: str = ""
    ) -> None:
        self.corpora, self.stages = dict(corpora), list(stages)
        self.names = list(self.corpora)
        self.first = self.corpora[self.names[0]]
        for name, corpus in self.corpora.items():
            if not _same_ids(corpus, self.first):
                rule = f"{name} has another tokenizer than {self.names[0]}"
                fix = f"prepare {corpus.path} with --tokenizer {self.first.path} --force"
                raise config_error("data.mix", mix, rule, fix)
        padded = any(corpus.train.learned for corpus in self.corpora.values())
        self._no_tokens: dict[str, int] | None = {} if padded else None
        self.restore({"segments": []})

    # ---- training rows --------------------------------------------------------------------------

    def begin_step(self, step: int, row: int) -> None:
        """Begin a step at a global row; the first step of a stage opens a segment there."""
        shares = self.stages[bisect_right([stage.step for stage in self.stages], step) - 1].shares
        last = self.segments[-1]
        goes_on = shares == last.shares and (last.tokens is None) == (self._no_tokens is None)
        if last.tokens is not None:
            before, tokens = self._walk(last).before(row)
            self._mark = Segment(row, shares, before, tokens) if goes_on else None
        elif not goes_on:
            before = last.rows_before(row)
        if goes_on:
            return
        if last.first_row == row:
            self._walks.pop(row, None)
            self.segments.pop()
        self.segments.append(Segment(row, shares, before, self._no_tokens))

    def changes_at(self, step: int) -> bool:
        """Return whether a stage begins at a step: which rows it reads isn't known before."""
        return any(stage.step == step for stage in self.stages)

    def place(self, row: int) -> tuple[str, int]:
        """Return the source of a global row, and the row's number within that source."""
        at = bisect_right([segment.first_row for segment in self.segments], row) - 1
        one = self.segments[at]
        return one.place(row) if one.tokens is None else self._walk(one).place(row)

    def _walk(self, one: Segment) -> TokenWalk:
        """Return the order of the rows of a segment whose shares are by token."""
        if one.first_row not in self._walks:
            self._walks[one.first_row] = TokenWalk(
                *(one.first_row, one.shares, one.before, one.tokens or {}),
                lambda name, row: self.corpora[name].row_tokens(row),
            )
        return self._walks[one.first_row]

    def train_batch(self, rows: Sequence[int]) -> Batch:
        """Return training rows by global number, with their sources.

        Raises:
            DataError: a corrupt block or an unknown id; the error names source, shard and row.
        """
        places = [self.place(row) for row in rows]
        return self._joined(rows, places, lambda corpus, row: corpus.train_batch([row]))

    def state(self) -> dict[str, Any]:
        """Return the segments as JSON; one by token from the step on that began last."""
        found = [*self.segments[:-1], self._mark or self.segments[-1]]
        return {
            "segments": [
                {
                    "first_row": one.first_row,
                    "shares": {name: str(share) for name, share in one.shares.items()},
                    "before": dict(one.before),
                    **({} if one.tokens is None else {"tokens": dict(one.tokens)}),
                }
                for one in found
            ]
        }

    def restore(self, state: Any) -> None:
        """Restore the segments from `state`; without any the first stage begins."""
        self.segments = [
            Segment(
                one["first_row"],
                {name: Fraction(share) for name, share in one["shares"].items()},
                dict(one["before"]),
                one.get("tokens"),
            )
            for one in state["segments"]
        ] or [Segment(0, self.stages[0].shares, {}, self._no_tokens)]
        self._walks: dict[int, TokenWalk] = {}  # by the first row of their segment
        self._mark: Segment | None = None

    @property
    def counters(self) -> dict[str, Mixture]:
        """Counters to save with the state of a run, by name."""
        return {"mixture": self}

    # ---- held-out rows --------------------------------------------------------------------------

    @property
    def num_validation_rows(self) -> int:
        """Number of held-out rows of all sources."""
        return sum(corpus.num_validation_rows for corpus in self.corpora.values())

    def validation_batch(self, rows: Sequence[int]) -> Batch:
        """Return held-out rows by number; rows past the end hold padding only and no label."""
        return self._joined(
            rows, map(self._held_out, rows), lambda corpus, row: corpus.validation_batch([row])
        )

    def _held_out(self, row: int) -> tuple[str, int]:
        """Return the source of a held-out row, and the row's number within that source."""
        if row < len(self._held_out_order):
            return self._held_out_order[row]
        return self.names[-1], self.corpora[self.names[-1]].num_validation_rows

    @functools.cached_property
    def _held_out_order(self) -> list[tuple[str, int]]:
        sizes = {name: corpus.num_validation_rows for name, corpus in self.corpora.items()}
        places = [(name, row) for name, size in sizes.items() for row in range(size)]
        return sorted(places, key=lambda place: (place[1] + 0.5) / sizes[place[0]])

    def _joined(
        self,
        rows: Sequence[int],
        places: Sequence[tuple[str, int]] | Iterator[tuple[str, int]],
        read: Callable[[Corpus, int], Batch],
    ) -> Batch:
        places = list(places)
        parts = []
        for name, row in places:
            try:
                parts.append(read(self.corpora[name], row))
            except DataError as error:
                raise DataError(f"data.mix: source {name}: {error}") from None
        sources_SB = torch.zeros(len(self.names), len(parts), dtype=torch.float64)
        targets = [0] * len(self.names)
        for b, ((name, _), part) in enumerate(zip(places, parts, strict=True)):
            sources_SB[self.names.index(name), b] = 1
            targets[self.names.index(name)] += part.num_targets
        return Batch(
            ids_BT=torch.cat([part.ids_BT for part in parts]),
            labels_BT=torch.cat([part.labels_BT for part in parts]),
            docs=Documents.from_ids(torch.cat([part.docs.ids_BT for part in parts])),
            target_bytes=sum(part.target_bytes for part in parts),
            num_targets=sum(targets),
            rows=tuple(rows),
            sources_SB=sources_SB,
            source_targets=targets,
        )

    def validation_documents(self) -> Iterator[str]:
        """Yield the texts of the held-out documents, source by source."""
        for corpus in self.corpora.values():
            yield from corpus.validation_documents()

    @property
    def validation_text_bytes(self) -> int:
        """UTF-8 bytes of all held-out documents."""
        return sum(corpus.validation_text_bytes for corpus in self.corpora.values())

    @property
    def validation_targets(self) -> int:
        """Number of labels of all held-out documents."""
        return sum(corpus.validation_targets for corpus in self.corpora.values())

    def gzip_bits_per_byte(self) -> float:
        """Return bits per byte of `gzip -9` over each held-out document alone."""
        return self._by_bytes(Corpus.gzip_bits_per_byte) or math.nan

    def xz_bits_per_byte(self) -> float | None:
        """Return bits per byte of `xz -9` over one stream a source, or None."""
        return self._by_bytes(Corpus.xz_bits_per_byte)

    def _by_bytes(self, bits: Callable[[Corpus], float | None]) -> float | None:
        """Return the mean of the sources' bits per byte, weighted by held-out bytes."""
        total = 0.0
        for corpus in self.corpora.values():
            found = bits(corpus)
            if found is None:
                return None
            total += found * corpus.validation_text_bytes
        return total / self.validation_text_bytes

    @property
    def no_verdict(self) -> str:
        """Reason why the loss can't be compared with compressors; empty if it can."""
        reasons = ((name, corpus.no_verdict) for name, corpus in self.corpora.items())
        return next((f"{name}: {reason}" for name, reason in reasons if reason), "")

    # ---- the rest that a run asks for -----------------------------------------------------------

    @property
    def path(self) -> Path:
        """Folder of the first source whose tokenizer has a chat template, else of the first."""
        corpora = self.corpora.values()
        return next((one for one in corpora if one.tokenizer.template), self.first).path

    @property
    def tokenizer(self) -> CorpusTokenizer:
        """Tokenizer of all sources."""
        return self.first.tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.first.vocab_size

    @property
    def sample_prompt(self) -> str:
        """Default prompt of a sample: that of the first source."""
        return self.first.sample_prompt

    @property
    def chat(self) -> ChatTemplate | None:
        """Template of the first source's conversations; None: its documents are plain texts."""
        return self.first.chat

    @property
    def fingerprint(self) -> str:
        """Short hash of names and contents of the sources; shares don't count."""
        words = sorted(f"{name} {corpus.fingerprint}" for name, corpus in self.corpora.items())
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]

    def describe(self) -> list[str]:
        """Return lines for the header of a run: shares by stage, then each source."""
        unit = "row" if self._no_tokens is None else "token"
        lines = [
            f"mixture of {len(self.names)} corpora [{self.fingerprint}], shares exact by {unit}"
        ]
        for stage in self.stages:
            shares = ", ".join(f"{name} {float(s):.4g}" for name, s in stage.shares.items())
            lines.append(f"  from step {stage.step:,}: {shares}")
        return lines + [line for corpus in self.corpora.values() for line in corpus.describe()]


@functools.lru_cache(maxsize=16)
def order_of_sources(
    shares: tuple[tuple[str, Fraction], ...],
) -> tuple[list[str], list[int], dict[str, int]]:
    """Return the source of each row of one turn, its rank there, and rows by source.

    A turn has as many rows as all shares have as a common denominator. Row j of a source with share
    s has to come in `[floor(j / s), ceil((j + 1) / s))`: then the count after n rows is less than
    one from n s. The earliest deadline first meets all of them (Baruah et al. 1996, proportionate
    progress, on one processor).
    """
    parts = math.lcm(*(share.denominator for _, share in shares))
    counts = {name: int(share * parts) for name, share in shares}
    done = dict.fromkeys(counts, 0)
    names, ranks = [], []
    for at in range(parts):
        name = min(
            (name for name, count in counts.items() if done[name] * parts < (at + 1) * count),
            key=lambda name: -(-(done[name] + 1) * parts // counts[name]),
        )
        names.append(name)
        ranks.append(done[name])
        done[name] += 1
    assert done == counts, "every source has its share of a turn"
    return names, ranks, counts


def _same_ids(one: Corpus, two: Corpus) -> bool:
    """Return whether two tokenizers make the same ids of any text, as a run's and its export do."""
    if one.index["special_ids"] != two.index["special_ids"]:
        return False
    same_file = one.index["tokenizer"]["sha256"] == two.index["tokenizer"]["sha256"]
    return same_file or one.tokenizer.rules == two.tokenizer.rules
