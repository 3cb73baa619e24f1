"""Auxiliary losses of a router whose tokens are spread over ranks: loads are counted over all.

Each rank keeps the sum over its own tokens of E / K * sum_e load_e p_te
(megacpp/blocks/experts/router.py). If the loads, which have no gradient, are those of the whole
microbatch and of whole documents, the sum over ranks is the loss of one process, and so are its
gradients.

Legend: B rows, T tokens of all ranks in a row, t tokens of this rank (of all rows, where there is
no B), n tokens of all rows and all ranks of `row`, K experts of a token, E experts, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.experts.router import Router
from megacpp.model.documents import Documents
from parallel.collectives import all_sum_plain, gather_plain
from parallel.styles import ShardModule


class ShardExpertMixer(ShardModule):
    """Style of an E mixer: router and routed experts get the documents of the rank's own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def own_tokens(_: nn.Module, args: tuple[Tensor, Documents]) -> tuple[Tensor, Documents]:
            x_BtD, docs = args
            return x_BtD, docs.memo(("tokens", rank, size), lambda: _tokens(docs, rank, size))

        module.register_forward_pre_hook(own_tokens)
        return module


class SpreadRouter(ParallelStyle):
    """Style of a router of some tokens of a microbatch; applied over all ranks of a stage.

    Args:
        row: the ranks that hold tokens of the same rows. Where there is more than one, `docs` must
            be a part that refers to its rows (`Documents.take`), of as many tokens on each rank.
    """

    def __init__(self, row: DeviceMesh) -> None:
        self.row = row

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        stage, row, experts = device_mesh.get_group(), self.row.get_group(), module.moe.num_experts
        if stage.size() > 1:
            module.batch_load = BatchLoadOfRanks(experts, stage)
        if row.size() > 1:
            module.document_load = DocumentLoadOfRanks(experts, row)
        return module


class BatchLoadOfRanks(nn.Module):
    """Loads of the experts, of a microbatch whose tokens lie on all ranks of a group."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.num_experts, self.group = num_experts, group

    def forward(self, chosen_tK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the fraction of all ranks' tokens that chose each expert, `[E]`.

        One small all-reduce.

        Args:
            chosen_tK: `[t, K]` experts of this rank's tokens.
            dtype: of the result.
        """
        chosen = chosen_tK.flatten()
        counts_E = chosen.new_zeros(self.num_experts)
        counts_E = counts_E.scatter_add_(0, chosen, torch.ones_like(chosen))
        counts_E = all_sum_plain(counts_E, self.group)
        tokens = counts_E.sum() // chosen_tK.shape[1]
        return counts_E.to(dtype) / tokens.to(dtype)


class DocumentLoadOfRanks(nn.Module):
    """Loads of the experts by document, of documents whose tokens lie on the ranks of a group.

    The number of documents is nowhere on the host and nothing waits for it: every rank gets the
    choices of all tokens of its rows (2 bytes each) and counts those of its own documents.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert num_experts <= torch.iinfo(torch.int16).max
        self.num_experts, self.group = num_experts, group

    def forward(self, chosen_tK: Tensor, docs: Documents, dtype: torch.dtype) -> Tensor:
        """Return the fraction of each token's document that chose each expert, `[t, E]`.

        Args:
            chosen_tK: `[t, K]` experts of this rank's tokens.
            docs: documents of these tokens.
            dtype: of the result.
        """
        group, E = self.group, self.num_experts
        slots = docs.memo(
            ("documents of ranks", group.group_name), lambda: _document_slots(docs, group)
        )
        bytes_tK = chosen_tK.to(torch.int16).view(torch.uint8)  # not every backend sends int16
        chosen_nK = gather_plain(bytes_tK, 0, group).view(torch.int16).to(torch.int64)
        place_N = (slots.slot_n[:, None] * E + chosen_nK).flatten()
        ones_N = torch.ones_like(place_N, dtype=dtype)
        counts = ones_N.new_zeros((len(chosen_tK) + 1) * E).index_add_(0, place_N, ones_N)
        return counts.view(-1, E).index_select(0, slots.slot_t) / slots.length_t[:, None]


@dataclass(frozen=True)
class _DocumentSlots:
    """Documents of this rank's tokens, numbered by slots of which there are t.

    Attributes:
        slot_n: of every token of the rows in the order in which a gather leaves them: the slot of
            its document, or t if no token of it is here.
        slot_t, length_t: of this rank's tokens: their document's slot, and its length in the row.
    """

    slot_n: Tensor
    slot_t: Tensor
    length_t: Tensor


def _document_slots(docs: Documents, group: dist.ProcessGroup) -> _DocumentSlots:
    """Slots of documents; one small all-gather of the ranks' positions, once per batch."""
    row, index_t = docs.row, docs.index_T
    assert row is not None and index_t is not None, "documents of a part know the whole rows"
    B, T = row.ids_BT.shape
    document_BT, length_BT = (x.view(B, T) for x in row.lengths)
    index_n = gather_plain(index_t, 0, group)
    document_n = document_BT[:, index_n].view(B, group.size(), -1).transpose(0, 1).flatten()
    document_t = document_BT[:, index_t].flatten()
    t = len(document_t)
    # A document's slot is its first token here, so that its size follows from shapes.
    slot_D = document_t.new_full((B * T,), t)
    slot_D.scatter_reduce_(0, document_t, torch.arange(t, device=slot_D.device), "amin")
    return _DocumentSlots(slot_D[document_n], slot_D[document_t], length_BT[:, index_t].flatten())


def _tokens(docs: Documents, rank: int, size: int) -> Documents:
    """Documents of the tokens that a rank of `tp` holds between blocks."""
    t = docs.ids_BT.shape[1] // size
    return docs.take(torch.arange(rank * t, (rank + 1) * t, device=docs.ids_BT.device))
