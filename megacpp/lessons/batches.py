"""Batches without a corpus: ragged documents, ragged label masks, a function of the row number.

`micro_rows` says which rows a rank has, from the global rows of a step: the loader counts its own.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp.data.batches import IGNORED, Batch
from megacpp.model.documents import Documents
from parallel.mesh import World


def ragged_batch(rows: Sequence[int], tokens: int = 12, vocab_size: int = 50) -> Batch:
    """Return the rows of these global numbers; a row is the same in any batch.

    Documents have random lengths, labels stop at their ends, and a part of the labels that differs
    from row to row is ignored; row 3, 7, 11, ... has no label at all.
    """
    made = [_row(row, tokens, vocab_size) for row in rows]
    ids_BT, labels_BT, documents_BT = (torch.stack(column) for column in zip(*made, strict=True))
    valid = int((labels_BT != IGNORED).sum())
    return Batch(
        ids_BT=ids_BT,
        labels_BT=labels_BT,
        docs=Documents.from_ids(documents_BT),
        target_bytes=3 * valid,
        num_targets=valid,
        rows=tuple(rows),
    )


def micro_rows(rows: Sequence[int], world: World, device_batch_size: int) -> list[Sequence[int]]:
    """Return this rank's rows of each microbatch, from the global rows of one step.

    Microbatch m of batch rank r holds rows `[(m * size + r) * b, ... + b)`: any split of the same
    global rows into ranks and microbatches covers each row once. Ranks that differ only along
    `cp`, `tp` or `pp` read the same rows.
    """
    stride = world.degree("batch") * device_batch_size
    first = world.coordinate("batch") * device_batch_size
    return [rows[s + first : s + first + device_batch_size] for s in range(0, len(rows), stride)]


def without_labels(batch: Batch) -> Batch:
    """Return a batch with no label."""
    labels_BT = torch.full_like(batch.labels_BT, IGNORED)
    return dataclasses.replace(batch, labels_BT=labels_BT, num_targets=0, target_bytes=0)


def _row(row: int, tokens: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(row)
    ids_T = torch.randint(vocab_size, (tokens + 1,), generator=generator)
    documents_T = (torch.rand(tokens + 1, generator=generator) < 0.25).cumsum(0)
    ignored_T = torch.rand(tokens, generator=generator) < (row % 4) / 3
    ignored_T |= documents_T[1:] != documents_T[:-1]
    return ids_T[:-1], torch.where(ignored_T, IGNORED, ids_T[1:]), documents_T[:-1]
