"""Settings of published runs that their rows leave out, as the recipes of their releases have them.

Source: Megatron-Bridge, scripts/performance/configs/{deepseek,qwen,qwen3,nemotronh}, as released.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """Settings of the runs of one model on one GPU.

    Attributes:
        model: its name in the rows.
        gpu: opening of the GPU's name.
        release: regular expression of the source's name.
        ep: degree of expert parallelism; 0: any.
        parallel: settings that are added to those of the row.
        graphs: modules that CUDA graphs replay.
    """

    model: str
    gpu: str
    release: str
    ep: int = 0
    parallel: dict[str, Any] = {}  # noqa: RUF012 - never written
    graphs: tuple[str, ...] = ()


OVERLAP, LATER = {"ep_overlap": True}, r"Megatron-Bridge 2[6-9]"
RECIPES = (
    # FP8 with DeepEP drops no token; the variant that drops tokens has another row.
    Recipe("deepseek-v3", "H100", r"Megatron-Bridge 25", 64, OVERLAP | {"dispatcher": "DeepEP"}),
    Recipe("deepseek-v3", "B200", LATER, 32, OVERLAP),
    Recipe("qwen3-235b-a22b", "H100", LATER, 32, OVERLAP),
    Recipe("qwen3-30b-a3b", "B200", r"Megatron-Bridge 25", graphs=("full_iteration",)),
)


def completed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the settings of its recipe; what the row itself says stays."""
    model, p, notes = row.get("model"), row.get("parallel"), str(row.get("notes") or "")
    if not (isinstance(model, dict) and isinstance(p, dict)):
        return row
    for recipe in RECIPES:
        if (
            model.get("name") == recipe.model
            and str(row.get("gpu")).startswith(recipe.gpu)
            and re.match(recipe.release, str(row.get("source")))
            and recipe.ep in (0, p.get("ep"))
        ):
            scope = f"cuda_graph_scope: [{', '.join(recipe.graphs)}]"
            notes += f"; {scope}" if recipe.graphs and "cuda_graph_scope" not in notes else ""
            return row | {"parallel": recipe.parallel | p, "notes": notes}
    return row
