"""Held-out losses token by token: by place in a row, or of some ids alone.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.data.batches import Batch
from megacpp.data.corpus import Corpus
from megacpp.model.hybrid import HybridLM

AT_ONCE = 8  # rows of a batch


@torch.no_grad()
def token_losses(model: HybridLM, batch: Batch) -> Tensor:
    """Return the loss `[B, T]` of each label in nats, 0 where there is none.

    Args:
        model: whole on one device, in eval mode.
        batch: rows.
    """
    logits_BTV = model.head.logits(model.hidden(batch.ids_BT, batch.docs)).float()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), reduction="none")
    return losses.view_as(batch.labels_BT)


def loss_by_place(
    model: HybridLM, corpus: Path, seq_len: int, parts: int, rows: int = 64
) -> list[float]:
    """Return the mean loss of each of `parts` equal parts of a row, first part first.

    Only held-out rows that lie within one document count: a token there has all tokens in front of
    it as its context.

    Args:
        model: whole on one device, in eval mode.
        corpus: folder of the corpus.
        seq_len: tokens of a row.
        parts: number of parts; divides `seq_len`.
        rows: most rows.
    """
    found = list(_batches(corpus, seq_len, rows, lambda one: one.num_targets == seq_len))
    losses_BT = torch.cat([token_losses(model, batch) for batch in found])
    return losses_BT.view(-1, parts, seq_len // parts).mean((0, 2)).tolist()


def loss_of_ids(
    model: HybridLM, corpus: Path, seq_len: int, first: int, rows: int = 64
) -> tuple[float, float]:
    """Return the mean loss of held-out labels below the id `first`, and of those from it on.

    Args:
        model: whole on one device, in eval mode.
        corpus: folder of the corpus.
        seq_len: tokens of a row.
        first: first id of the second kind.
        rows: most rows.
    """
    sums, counts = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    for batch in _batches(corpus, seq_len, rows, lambda one: True):
        losses_BT = token_losses(model, batch)
        known_BT = (batch.labels_BT >= 0) & (batch.labels_BT < first)
        for kind, mask_BT in enumerate((known_BT, batch.labels_BT >= first)):
            sums[kind] += losses_BT[mask_BT].sum().double()
            counts[kind] += mask_BT.sum()
    known, new = (sums / counts).tolist()
    return known, new


def _batches(
    folder: Path, seq_len: int, rows: int, wanted: Callable[[Batch], bool]
) -> Iterator[Batch]:
    """Yield the first held-out rows that are wanted, in batches."""
    corpus, chosen = Corpus(folder, seq_len), list[int]()
    for row in range(corpus.num_validation_rows):
        if len(chosen) < rows and wanted(corpus.validation_batch([row])):
            chosen.append(row)
    for first in range(0, len(chosen), AT_ONCE):
        yield corpus.validation_batch(chosen[first : first + AT_ONCE])
