"""Tables of embeddings whose rows are looked up by a submodule, which vocabulary parallelism swaps.

Legend: V rows of a table, D numbers of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.kernels.autograd import autocast_dtype


class Lookup(nn.Module):
    """Rows of a table that this process holds whole."""

    def forward(self, ids: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the rows `[..., D]` of ids `[...]`."""
        return F.embedding(ids, weight_VD)


class Table(nn.Embedding):
    """Embeddings by id. It starts without values: only the model's rules initialise it."""

    def __init__(self, rows: int, dim: int) -> None:
        # A given weight skips nn.Embedding's own init, which on meta costs an import of dynamo
        # (no thread known).
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))
        self.lookup: nn.Module = Lookup()

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows `[..., D]` of ids `input` `[...]`, under autocast in its dtype."""
        rows = self.lookup(input, self.weight)
        return rows.to(autocast_dtype(rows) or rows.dtype)  # a stream as narrow as with FSDP2
