"""Tokens and labels that stand beside a token in its document.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.model.documents import Documents


def tokens_beside(docs: Documents, by: int, fill: int) -> Tensor:
    """Return for each token the id `by` tokens after it (before it: `by` < 0), `[B, T]`.

    Args:
        docs: with tokens (`Documents.with_tokens`); a part of whole rows reads them too.
        by: distance.
        fill: id where the token's document has no such token.
    """
    return _beside(docs, whole_rows(docs).tokens_BT, by, fill)


def labels_beside(docs: Documents, by: int, fill: int) -> Tensor:
    """Return for each token the label `by` tokens after it, `[B, T]`; as `tokens_beside`.

    Args:
        docs: with labels.
        by: distance.
        fill: label where the token's document has no such token.
    """
    return _beside(docs, whole_rows(docs).labels_BT, by, fill)


def whole_rows(docs: Documents) -> Documents:
    """Return the documents of whole rows of which `docs` may be a part."""
    return docs if docs.row is None else docs.row


def _beside(docs: Documents, values_BT: Tensor | None, by: int, fill: int) -> Tensor:
    assert values_BT is not None, "documents that know no tokens (Documents.with_tokens)"
    found_BT = beside(values_BT, whole_rows(docs).ids_BT, by, fill)
    return found_BT if docs.index_T is None else found_BT[:, docs.index_T]


def beside(values_BT: Tensor, documents_BT: Tensor, by: int, fill: int) -> Tensor:
    """Return values of whole rows moved `by` tokens to the left within documents, `[B, T]`.

    Args:
        values_BT: ids or labels.
        documents_BT: document ids.
        by: tokens; negative ones move to the right.
        fill: value where the document has no such token.
    """
    if by == 0:
        return values_BT
    moved_BT = torch.full_like(values_BT, fill)
    if abs(by) >= values_BT.shape[1]:
        return moved_BT
    here, there = (slice(None, -by), slice(by, None)) if by > 0 else (slice(-by, None), slice(by))
    same_BT = documents_BT[:, here] == documents_BT[:, there]
    moved_BT[:, here] = torch.where(same_BT, values_BT[:, there], fill)
    return moved_BT
