"""Low-rank feed-forward (Z) as other packages read it; no torch import here.

Letters: L rank.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import ALL_TOKENS, AllocationSettings, BlockKind, Parameter

if TYPE_CHECKING:
    from megacpp.blocks.low_rank.module import LowRank
    from megacpp.config.schema import ModelConfig


def build(kind: str, model: ModelConfig, layer: int) -> LowRank:
    """Return the mixer."""
    from megacpp.blocks.low_rank.module import LowRank

    return LowRank(model)


LOW_RANK = BlockKind(
    letter="Z",
    name="low-rank feed-forward",
    build=build,
    parameters=(
        Parameter(("down.weight",), "[L_tp, D]", "muon"),
        Parameter(("up.weight",), "[D, L_tp]", "muon"),
    ),
    dims=lambda model: {"L": model.low_rank.rank},
    checks=lambda config: iter(()),
    tensor_dims=lambda model: {"model.low_rank.rank": model.low_rank.rank},
    layouts=(ALL_TOKENS,),
    multiply_adds=lambda model, seq_len: 2 * model.dim * model.low_rank.rank,
    allocations=AllocationSettings("low_rank"),
    regions=lambda policy, model: set(),
)
