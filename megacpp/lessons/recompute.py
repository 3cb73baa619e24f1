"""Recompute setups to compare, from saving all activations to recomputing whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from checkpointing.apply import CPU, ActivationCheckpointing
from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config
from megacpp.model.regions import BLOCK, NOTHING, Region


@dataclass(frozen=True)
class RecomputeSetup:
    """Recompute policy with a name.

    Attributes:
        whole: every layer but the last is recomputed as a whole, the scan of M too: the effect of a
            global switch, which no policy offers.
        compiled: blocks are compiled.
    """

    name: str
    policy: CheckpointingPolicy
    whole: bool = False
    compiled: bool = False

    def apply(self, config: Config) -> Config:
        """Return the configuration with this setup."""
        compiles = "inductor" if self.compiled else "off"
        train = replace(config.train, compile=compiles)
        return replace(config, recompute=self.policy, train=train)

    def build(self, config: Config, device: torch.device = CPU) -> ActivationCheckpointing:
        """Return the setup's `ActivationCheckpointing`; `config` is a result of `apply`."""
        return ActivationCheckpointing(config, device, self.regions(config))

    def regions(self, config: Config) -> Sequence[frozenset[Region]] | None:
        """Return the recomputed regions of every layer, or None if the policy determines them."""
        return [BLOCK] * (config.model.depth - 1) + [NOTHING] if self.whole else None


# The only setup that saves the states of the recurrence.
KEEP_ALL = RecomputeSetup("keep all", replace(KEEP, rblock="none"))
WHOLE = RecomputeSetup("every block", KEEP, whole=True)
# One selection for every kind, as trainers of dense models offer it.
SELECTIVE = RecomputeSetup("one selection", replace(KEEP, core_attn=True, mlp=True, norms=True))
BY_KIND = RecomputeSetup("by block kind", PER_BLOCK)
OFFLOAD = RecomputeSetup(
    "by kind, offload", replace(PER_BLOCK, offload="block_inputs", offload_min_mib=0)
)
COMPRESS = RecomputeSetup("by kind, compress 1/4", replace(PER_BLOCK, compress=0.25))
CHOICES = (KEEP_ALL, WHOLE, SELECTIVE, BY_KIND, OFFLOAD, COMPRESS)
compiled = partial(RecomputeSetup, compiled=True)
COMPILED = tuple(
    compiled(f"compiled {budget:g}", replace(KEEP, activation_memory_budget=budget))
    for budget in (1.0, 0.5, 0.0)
)
