"""Loads of all experts of a model, on every rank: numbers that travel with the gradient norm.

The routers of a pipeline stage are on its ranks alone, and the record is written by a rank of the
first. So every rank lays the choices that its routers counted into one table of all layers, whose
sum over all ranks is the model's; it needs neither a collective of its own nor another wait.

Legend: L E layers of the whole model, N numbers of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megacpp.blocks.experts.choices import columns, null_copies, slots
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds
from megacpp.run.expert_load import ExpertLoad


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
