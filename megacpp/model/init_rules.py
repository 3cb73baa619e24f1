"""Initial values of a block and of a whole model, from those of their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from megacpp.model.init import Normal, Rule
from megacpp.model.pattern import EXIT

if TYPE_CHECKING:
    from megacpp.model.block import Block
    from megacpp.model.hybrid import HybridLM


def block_rules(block: Block) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the block."""
    parts = {"engram": block.engram, "mixer": block.mixer, "connection": block.connection}
    rules = {"norm.weight": block.norm.init_rules()["weight"]}
    for name, part in parts.items():
        own = part.init_rules().items() if part is not None else ()
        rules |= {f"{name}.{leaf}": rule for leaf, rule in own}
    return rules


def model_rules(model: HybridLM) -> dict[str, Rule]:
    """Return the rule of every parameter and persistent buffer, by full name."""
    rules: dict[str, Rule] = {}
    if hasattr(model, "embed"):
        rules["embed.weight"] = Normal(model.config.init_std)
    for key, block in model.blocks.items():
        own = cast("Block", block).init_rules().items()
        rules |= {f"blocks.{key}.{name}": rule for name, rule in own}
    for part in ("ngram", *EXIT):
        if hasattr(model, part) and not (part == "head" and model.config.tie_embeddings):
            own = getattr(model, part).init_rules().items()
            rules |= {f"{part}.{name}": rule for name, rule in own}
    return rules
