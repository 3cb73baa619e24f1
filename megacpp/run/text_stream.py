"""Text of ids as they come: whole characters, ended by stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megacpp.model.hybrid import HybridLM
from megacpp.run.sample import Sampling, generate

if TYPE_CHECKING:
    from megacpp.data.tokenizer import CorpusTokenizer


class TextStream:
    """Text that grows by an id at a time and may end at a stop string.

    Bytes of an incomplete character wait for the rest of it, and what could be the beginning of a
    stop string waits until it isn't.

    Attributes:
        text: so far, up to a stop string; incomplete characters are left out.
        ended: a stop string was met.
    """

    def __init__(self, tokenizer: CorpusTokenizer, stops: Sequence[str] = ()) -> None:
        self._pieces, self._stops = tokenizer.id_bytes, [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.ended, self._shown = "", False, 0

    def feed(self, i: int) -> str:
        """Add an id, and return the text that is certain now and wasn't before."""
        return self._add(self._decoder.decode(self._pieces[i]))

    def end(self) -> str:
        """Add what waits: bytes of an incomplete character, the beginning of no stop string."""
        return self._add(self._decoder.decode(b"", final=True)) + self._show(len(self.text))

    def _add(self, more: str) -> str:
        if self.ended:
            return ""
        self.text += more
        found = [at for stop in self._stops if (at := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self.ended = self.text[: min(found)], True
            return self._show(len(self.text))
        held = max((_overlap(self.text[self._shown :], stop) for stop in self._stops), default=0)
        return self._show(len(self.text) - held)

    def _show(self, end: int) -> str:
        new, self._shown = self.text[self._shown : end], end
        return new


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string, cut short, is."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def continue_texts(
    model: HybridLM,
    tokenizer: CorpusTokenizer,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[TextStream],
    max_tokens: int,
    sampling: Sampling,
    show: Callable[[str], object] | None = None,
    end: int | None = None,
) -> list[list[int]]:
    """Return new ids of prompts, each of which ends with its document or its text.

    Args:
        model: whole on one device.
        tokenizer: of the model.
        prompts: their ids.
        texts: takes the ids of each prompt, and ends it.
        max_tokens: most new ids of a prompt.
        sampling: choice of the next token.
        show: called with each piece of text.
        end: id that ends a text; None: the end of a document.
    """

    def take(row: int, i: int) -> None:
        more = texts[row].feed(i)
        if show is not None:
            show(more)

    return generate(
        model,
        prompts,
        max_tokens,
        sampling,
        stop_id=tokenizer.specials.eos if end is None else end,
        num_ids=tokenizer.vocab_size,
        stream=take,
        finished=lambda row, ids: texts[row].ended,
    )
