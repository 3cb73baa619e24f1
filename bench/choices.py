"""What may be kept and what may run again, from one end to the other, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from checkpointing.apply import CPU, ActivationCheckpointing
from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import CheckpointingPolicy, Config
from megacpp.model.pieces import BLOCK, NOTHING, Piece


@dataclass(frozen=True)
class RecomputeSetup:
    """A policy with a name.

    Attributes:
        whole: every layer but the last runs again as a whole, the scan of M too: what a global
            switch does, and no policy offers.
        compiled: blocks are compiled.
    """

    name: str
    policy: CheckpointingPolicy
    whole: bool = False
    compiled: bool = False

    def apply(self, config: Config) -> Config:
        """The run with this choice."""
        compiles = "inductor" if self.compiled else "off"
        train = replace(config.train, compile=compiles)
        return replace(config, recompute=self.policy, train=train)

    def keeper(self, config: Config, device: torch.device = CPU) -> ActivationCheckpointing:
        """What gives a model on a device this choice; `config` is of `of`."""
        return ActivationCheckpointing(config, device, self.pieces(config))

    def pieces(self, config: Config) -> Sequence[frozenset[Piece]] | None:
        """Of every layer, if the policy doesn't say."""
        return [BLOCK] * (config.model.depth - 1) + [NOTHING] if self.whole else None


# States of the recurrence are kept here and nowhere else.
KEEP_ALL = RecomputeSetup("keep all", CheckpointingPolicy(rblock="none"))
WHOLE = RecomputeSetup("every block", CheckpointingPolicy(), whole=True)
# One selection for every kind, as trainers of dense models offer it.
SELECTIVE = RecomputeSetup(
    "one selection", CheckpointingPolicy(core_attn=True, mlp=True, norms=True)
)
BY_KIND = RecomputeSetup("by block kind", PER_BLOCK)
OFFLOAD = RecomputeSetup(
    "by kind, offload", replace(PER_BLOCK, offload="block_inputs", offload_min_mib=0)
)
COMPRESS = RecomputeSetup("by kind, compress 1/4", replace(PER_BLOCK, compress=0.25))
CHOICES = (KEEP_ALL, WHOLE, SELECTIVE, BY_KIND, OFFLOAD, COMPRESS)
compiled = partial(RecomputeSetup, compiled=True)
COMPILED = tuple(
    compiled(f"compiled {budget:g}", CheckpointingPolicy(activation_memory_budget=budget))
    for budget in (1.0, 0.5, 0.0)
)
