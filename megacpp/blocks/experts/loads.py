"""Loads of the experts, by microbatch and by document, as balance losses read them.

Legend: T tokens (of all rows), E experts, K experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacpp.model.documents import Documents


class BatchLoad(nn.Module):
    """Loads of the experts by a microbatch whose tokens this process holds."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, chosen_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the fraction of the microbatch's tokens that chose each expert, `[E]`."""
        counts_E = torch.zeros(self.num_experts, dtype=dtype, device=chosen_TK.device)
        return counts_E.scatter_(0, chosen_TK.flatten(), 1.0, reduce="add") / len(chosen_TK)


class DocumentLoad(nn.Module):
    """Loads of the experts by documents whose tokens this process holds."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, chosen_TK: Tensor, docs: Documents, dtype: torch.dtype) -> Tensor:
        """Return the fraction of each token's document that chose each expert, `[T, E]`."""
        return document_load(chosen_TK, docs, self.num_experts, dtype)


def document_load(
    chosen_TK: Tensor, docs: Documents, num_experts: int, dtype: torch.dtype
) -> Tensor:
    """Return for every token the fraction of its document that chose each expert, `[T, E]`.

    The switch loss with it is the mean over documents, each weighted by its number of tokens.

    Args:
        chosen_TK: experts of each token.
        docs: documents.
        num_experts: E.
        dtype: of the result.
    """
    document_T, length_T = docs.lengths
    place_TK = torch.add(chosen_TK, document_T[:, None], alpha=num_experts)
    counts = torch.zeros(len(chosen_TK) * num_experts, dtype=dtype, device=chosen_TK.device)
    counts.scatter_(0, place_TK.flatten(), 1.0, reduce="add")
    return counts.view(-1, num_experts).index_select(0, document_T) / length_T[:, None]
