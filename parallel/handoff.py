"""Tensors that a pipeline stage sends to the next: hidden states and chosen keys.

Hidden states are the output of torch's stage, and their gradient comes back. The keys that an
indexer chose for layers of later stages (megacpp/blocks/attention/sparse.py) are integers without a
gradient. Before torch 2.13 a stage demands a gradient of all that it is handed; packed into bf16
hidden states they would cost their bytes twice, forward and backward. So they go beside, in the
same batch of sends, as bytes (not every backend sends int16), and nothing comes back.

Only borders that a shared choice crosses send one (`StagePart.takes`, `hands`). Ranks of `tp` have
made the same choice; each sends that of the tokens that it holds between blocks.

Legend: B rows, t tokens of a rank between blocks, C chosen keys, X bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.blocks.attention.sparse import note_choice, noted_choice
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.stages import choice_bytes, key_bytes
from parallel.collectives import gather_plain
from parallel.mesh import World


class ChoiceHandoff:
    """Choice of keys as it travels: `[B, t, X]` bytes, of int16 where a row's keys fit in."""

    def __init__(self, model: ModelConfig, world: World) -> None:
        self.model, self.device = model, world.device
        self.cp, self.tp, self.rank = world.degree("cp"), world.degree("tp"), world.coordinate("tp")
        self.group = world.group("tp") if self.tp > 1 else None

    def buffer(self, rows: int, row: int) -> Tensor:
        """Return memory for the choice of `rows` rows of `row` tokens."""
        shape = rows, row // (self.cp * self.tp), choice_bytes(self.model, row)
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def packed(self, docs: Documents, layer: int) -> Tensor:
        """Return the keys that `layer` chose, of this rank's tokens."""
        chosen_BtC = noted_choice(docs, layer).chunk(self.tp, dim=1)[self.rank]
        return chosen_BtC.to(_dtype(docs)).contiguous().view(torch.uint8)

    def unpack(self, packed_BtX: Tensor, docs: Documents, layer: int) -> None:
        """Leave the keys that `layer` chose with the documents, as if it had run here."""
        whole = packed_BtX if self.group is None else gather_plain(packed_BtX, 1, self.group)
        note_choice(docs, layer, whole.view(_dtype(docs)).to(torch.int32))


def _dtype(docs: Documents) -> torch.dtype:
    """Integer type of key numbers while they travel."""
    row = docs if docs.row is None else docs.row
    return {2: torch.int16, 4: torch.int32}[key_bytes(row.ids_BT.shape[1])]
