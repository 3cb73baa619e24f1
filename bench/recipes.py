"""Settings of published runs that their rows leave out, as the recipes of their releases have them.

Source: Megatron-Bridge, scripts/performance/configs/{deepseek,gpt_oss,qwen,qwen3,nemotronh} and
recipes/{deepseek,moonlight}, as released; the models' own configurations for `MODELS`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """Settings of the runs of one model on one GPU.

    Attributes:
        model: regular expression of its name in the rows.
        gpu: opening of the GPU's name.
        release: regular expression of the source's name.
        ep: degree of expert parallelism; 0: any.
        parallel: settings that are added to those of the row.
        sizes: words that are added to those of the row's model.
        graphs: modules that CUDA graphs replay.
        again: modules that run again, where a row has those of another variant; empty: as it says.
    """

    model: str
    gpu: str
    release: str
    ep: int = 0
    parallel: dict[str, Any] = {}  # noqa: RUF012 - never written
    sizes: dict[str, Any] = {}  # noqa: RUF012 - never written
    graphs: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


OVERLAP, ANY, LATER = {"ep_overlap": True}, r"Megatron-Bridge", r"Megatron-Bridge 2[6-9]"
# What a row's words about a model lack: groups from which a token takes its experts, norms of
# queries and keys, biases of experts, MLA's rotary embedding without a kernel.
MODELS = (
    Recipe(r"deepseek-(v3|r1)", "", "", sizes={"expert_groups": 8, "kept_groups": 4}),
    Recipe(r"qwen3", "", "", sizes={"qk_norm": True}),
    Recipe(r"gpt-oss", "", "", sizes={"expert_bias": True}),
    Recipe(r"moonlight", "", ANY, sizes={"plain_rope": True}),
)
RECIPES = (
    *MODELS,
    Recipe(r"deepseek-v3|qwen3|gpt-oss", "", ANY, sizes={"fused_router": True}),
    # FP8 with DeepEP drops no token; the variant that drops tokens has another row.
    Recipe("deepseek-v3", "H100", r"Megatron-Bridge 25", 64, OVERLAP | {"dispatcher": "DeepEP"}),
    Recipe("deepseek-v3", "B200", LATER, 32, OVERLAP),
    # Each of 16 stages has four layers, but the last, which has one beside MTP and the loss.
    Recipe("deepseek-v3", "B200", ANY, parallel={"filled_stages": True}),
    Recipe("qwen3-235b-a22b", "H100", LATER, 32, OVERLAP),
    Recipe("qwen3-30b-a3b", "B200", r"Megatron-Bridge 25", graphs=("full_iteration",)),
    # Rows have what runs again in the later recipe, on 16 ranks of ep.
    Recipe(
        "nemotron-3-nano", "H100", LATER, 8, graphs=("mamba",),
        again=("moe", "layernorm", "core_attn", "moe_act"),
    ),
    Recipe("nemotron-3-nano", "B200", LATER, graphs=("attn", "mamba", "moe_router")),
)  # fmt: skip


def completed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the settings of its recipes; what the row itself says stays."""
    for recipe in RECIPES:
        model, p, notes = row.get("model"), row.get("parallel"), str(row.get("notes") or "")
        if not (isinstance(model, dict) and isinstance(p, dict)):
            return row
        if (
            re.match(recipe.model, str(model.get("name")).lower())
            and str(row.get("gpu")).startswith(recipe.gpu)
            and re.match(recipe.release, str(row.get("source")))
            and recipe.ep in (0, p.get("ep"))
        ):
            scope = f"cuda_graph_scope: [{', '.join(recipe.graphs)}]"
            notes += f"; {scope}" if recipe.graphs and "cuda_graph_scope" not in notes else ""
            p, model = recipe.parallel | p, recipe.sizes | model
            row = row | {"parallel": p, "model": model, "notes": notes}
            row = row | {"recompute": ", ".join(recipe.again)} if recipe.again else row
    return row
