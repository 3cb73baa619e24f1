"""Loads of experts over ranks: for the auxiliary losses of a step, and for its record.

Each rank keeps the sum over its own tokens of E / K * sum_e load_e p_te
(megacpp/blocks/experts/router.py). If the loads, which have no gradient, are those of the whole
microbatch and of whole documents, the sum over ranks is the loss of one process, and so are its
gradients.

The routers of a pipeline stage are on its ranks alone, and the record is written by a rank of the
first. So every rank lays the choices that its routers counted into one table of all layers, whose
sum over all ranks is the model's; it needs neither a collective of its own nor another wait.

Legend: B rows, T tokens of all ranks in a row, t tokens of this rank (of all rows, where there is
no B), n tokens of all rows and all ranks of a group, K experts of a token, E experts, W ranks; in
the table L E layers of the whole model, N numbers of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.blocks.experts.choices import columns, null_copies, slots
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.pattern import layer_kinds
from megacpp.run.expert_load import ExpertLoad
from parallel.collectives import all_sum_plain, gather_plain


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


class LoadTable:
    """Rows of this rank's routers in the load table of all E layers, and its reading.

    Args:
        model: this rank's part.
        config: the whole model.
        ranks: number of ranks with the same routers, each with other tokens.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, ranks: int) -> None:
        self.moe, self.ranks = config.moe, ranks
        self.columns, self.slots = columns(config.moe), slots(config.moe)
        self.nulls = null_copies(config.moe) > 0
        kinds = enumerate(layer_kinds(config))
        self.layers = [layer for layer, kind in kinds if kind.startswith("E")]
        self.routers: dict[int, Router] = {}  # by row
        for name, module in model.named_modules():
            found = re.search(r"\bblocks\.(\d+)\.", name)
            if isinstance(module, Router) and found and int(found[1]) in self.layers:
                self.routers[self.layers.index(int(found[1]))] = module

    def numbers(self, device: torch.device) -> Tensor:
        """Return fp64 `[L * N]`: counts of experts (and nulls), and the range of the bias."""
        counts = self.moe.num_experts + self.nulls
        table_LN = torch.zeros(len(self.layers), counts + 1, dtype=torch.float64, device=device)
        for row, router in self.routers.items():
            table_LN[row, :counts] = router.tokens_per_expert[:counts]
            bias_E = router.expert_bias
            table_LN[row, counts] = (bias_E.amax() - bias_E.amin()).double() / self.ranks
        return table_LN.flatten()

    def read(self, numbers: Sequence[float]) -> tuple[ExpertLoad, ...]:
        """Return the load of each layer from the table's sum over all ranks, on the host.

        A step without a token has no load.
        """
        moe, width = self.moe, len(numbers) // len(self.layers)
        found = []
        for row, layer in enumerate(self.layers):
            *counts, bias_range = numbers[row * width : (row + 1) * width]
            real = tuple(int(n) for n in counts[: moe.num_experts])
            chosen = sum(counts) / self.columns * self.slots
            found.append(
                ExpertLoad(
                    layer,
                    real,
                    1 - sum(real) / chosen if self.nulls and chosen else None,
                    bias_range if moe.score == "sigmoid" else None,
                )
            )
        return tuple(found)
