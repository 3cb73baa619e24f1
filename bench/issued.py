"""Operators that the host issues for a layer of a published run.

    forward, backward = issued(sizes, "AE", regions, {"norm"}, repeated=2)

Counts are of torch's operators in Megatron-Core's and Transformer Engine's modules; a family says
how long the host takes for one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.others import Region, RowSizes

# Operators of a block's forward with fused kernels, by letter; R is the router of E.
OPERATORS = {"A": 20, "F": 8, "E": 30, "M": 20, "R": 30}
FUSED_ROUTER = 17  # fewer of a router whose scores, choice and loss are a kernel each
LATENT = 12  # more of MLA: norms and projections of latents, rotary parts cut and joined
PLAIN_ROPE = 2 * 13  # more of MLA's queries and keys without a kernel for rotary embeddings
SIZES = 15  # of an all-to-all's sizes: 7 to count, a gather, 6 copies to the host, a wait
# Of each expert: two products; one call rounds the inputs of all (TransformerEngine#1793).
EXPERT = {"bf16": 2, "fp8": 3}
EXPERT_SCALES = 1  # more of each expert whose inputs FP8 scales and rounds by kernels of its own
EXPERT_BIAS = 3  # more of each expert whose bias is weighted by probabilities and added apart
# Of a part that runs again. Forward: three generators' states are read, in a function of autograd.
# Backward: they are read, set, and set back; inputs, outputs and the part's own backward, 3 more.
REPLAY = (3 + 1, 3 * 3 + 3)


def router_operators(model: dict[str, Any]) -> int:
    """Return operators of a router's forward.

    Args:
        model: words of a row.
    """
    return OPERATORS["R"] - FUSED_ROUTER * bool(model.get("fused_router"))


def issued(
    s: RowSizes, kind: str, regions: list[Region], again: set[str], repeated: int
) -> tuple[int, int]:
    """Return what the host issues in a layer's forward and backward, in operators of torch.

    Args:
        s: sizes of the rank.
        kind: letters of the layer.
        regions: of the layer.
        again: names of regions that run again; `all`: every one.
        repeated: operators of those.
    """
    own = set(kind.replace("E", "ER")) - set(s.captured)
    count = sum(OPERATORS[letter] for letter in own)
    if "A" in own and s.model.get("kv_lora"):
        count += LATENT + PLAIN_ROPE * bool(s.model.get("plain_rope"))
    if "R" in own:
        count += router_operators(s.model) - OPERATORS["R"]
    if "E" in own:
        each = EXPERT[s.dtype] + EXPERT_BIAS * bool(s.model.get("expert_bias"))
        each += EXPERT_SCALES * (s.scaled and s.dtype == "fp8")
        count += s.model["experts"] // s.ep * each
        count += OPERATORS["F"] * bool(s.model.get("shared_ffn"))
        count += SIZES * (s.ep > 1 and not s.flexible)
    replays = 0
    if own:
        count += sum(len(r.sent_forward) for r in regions)
        marked = ["all" in again or r.name in again for r in regions]
        replays = sum(now > before for before, now in pairwise([False, *marked]))
    back = 2 * count + (count if "all" in again else repeated) + REPLAY[1] * replays
    scale = s.family.fusion.launches
    return round(scale * (count + REPLAY[0] * replays)), round(scale * back)
