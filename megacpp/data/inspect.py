"""Readable view of rows: text, document boundaries, and ignored labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacpp.data.batches import IGNORED
from megacpp.data.corpus import Corpus
from megacpp.terminal.samples import visible

if TYPE_CHECKING:
    from rich.text import Text

IGNORED_MARK = "×"  # after a token whose label is ignored


@dataclass(frozen=True)
class RowView:
    """Row with its counts; `split_row` is its number in the split."""

    split: str
    global_row: int
    split_row: int
    ids: list[int]
    labels: list[int]
    documents: list[int]
    text: str
    targets: int
    ignored: int
    padding: int
    target_bytes: int


def view_rows(corpus: Corpus, split: str, count: int) -> list[RowView]:
    """Return the first rows of a split, in the order of validation or of training epoch 0."""
    limit = corpus.rows_per_epoch if split == "train" else corpus.num_validation_rows
    return [_view(corpus, split, number) for number in range(min(count, limit))]


def row_headline(view: RowView) -> str:
    """Return one line of figures: tokens, documents, targets, ignored labels, bytes."""
    padding = f", {view.padding} padding" if view.padding else ""
    moved = f" (row {view.split_row} of the split)" if view.split == "train" else ""
    number = len(set(view.documents[: len(view.ids) - view.padding]))
    return (
        f"{view.split} row {view.global_row}{moved}: {len(view.ids)} tokens, "
        f"{number} document{'s' * (number != 1)}, {view.targets} targets, "
        f"{view.ignored} ignored{padding}, {view.target_bytes} target bytes"
    )


def row_text(view: RowView, corpus: Corpus) -> Text:
    """Return rich text with a line at each document start and `×` after ignored labels.

    Tokens between two marks are decoded together, so that characters of several tokens stay whole.
    Control characters show as pictures, so that a text can't control the terminal. Padding is
    counted in the headline and not drawn.
    """
    from rich.text import Text

    text = Text()
    plain: list[int] = []
    names, begin = corpus.tokenizer.special_names, corpus.tokenizer.specials.bos

    def flush() -> None:
        text.append(visible(corpus.tokenizer.decode(plain)))
        plain.clear()

    for i in range(len(view.ids) - view.padding):
        token, document = view.ids[i], view.documents[i]
        if i == 0 or document != view.documents[i - 1]:
            flush()
            text.append("\n" if i else "")
            text.append(f"── document {document}", "dim")
            text.append("\n" if token == begin else " continued\n", "dim")
        if token in names:
            flush()
            text.append(names[token], "bold cyan")
        else:
            plain.append(token)
        if view.labels[i] == IGNORED:
            flush()
            text.append(IGNORED_MARK, "bold red")
    flush()
    return text


def _view(corpus: Corpus, split: str, number: int) -> RowView:
    split_row = corpus.split_row(number) if split == "train" else number
    row = corpus.row(split, split_row)
    ids, labels = row.ids_T.tolist(), row.labels_T.tolist()
    reader = corpus.train if split == "train" else corpus.validation
    padding = int((row.documents_T == reader.documents).sum())
    targets = [label for label in labels if label != IGNORED]
    return RowView(
        split=split,
        global_row=number,
        split_row=split_row,
        ids=ids,
        labels=labels,
        documents=row.documents_T.tolist(),
        text=corpus.tokenizer.decode(ids),
        targets=len(targets),
        ignored=len(labels) - len(targets),
        padding=padding,
        target_bytes=sum(len(corpus.tokenizer.id_bytes[label]) for label in targets),
    )
