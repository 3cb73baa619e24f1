"""Content of an estimate's components; no torch import here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megacpp.blocks.experts.rows import expert_rows
from megacpp.config.schema import CheckpointingPolicy, Config
from megacpp.memory.forms.activations import activation_bytes
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import RankBytes
from megacpp.memory.forms.parts import OUTER
from megacpp.memory.forms.units import stored_of


def detail_of(config: Config, size: int, rank: int) -> dict[str, dict[str, int]]:
    """Return bytes by component and content; activations and routing of one microbatch.

    `parameters` and `optimizer_state` by class of shard and optimizer, `activations` by kind of
    block, `recompute_saves` by setting of the policy, `moe_routing` by saved tensors and rows
    through
    the experts (`at most`: for any choice of the routers), `head_loss` by part.
    """
    stored = stored_of(config, size, rank).sums
    kept = activation_bytes(config, size, rank)
    by_kind: Counter[str] = Counter()
    routing: Counter[str] = Counter()
    head: Counter[str] = Counter()
    for part in kept.parts:
        kind = part.name.split()[0]
        if kind in OUTER:
            head[kind] += part.bytes
            continue
        for group, size_bytes in part.groups.items():
            if kind == "E" and group in ("routing", "rows"):
                routing[group] += size_bytes
            else:
                by_kind[kind] += size_bytes
    return {
        "parameters": _parameters(stored),
        "gradients": dict(stored.gradients),
        "optimizer_state": {
            f"{by} {group}": n for by, of in stored.state.items() for group, n in of.items()
        },
        "activations": dict(by_kind),
        "recompute_saves": saved(config, size, rank, kept.bytes),
        "moe_routing": {**routing_of(config, size, rank), "kept": sum(routing.values())},
        "head_loss": dict(head),
    }


def _parameters(stored: RankBytes) -> dict[str, int]:
    found = {f"{by} {group}": n for (by, group), n in stored.by_mover.items()}
    return found | ({"router buffers": stored.buffers} if stored.buffers else {})


def routing_of(config: Config, size: int, rank: int) -> dict[str, int]:
    """Return bytes of one E layer's logits, and of rows before and behind the experts."""
    if "E" not in config.model.pattern.upper():
        return {}
    own, most = (LocalShapes.on_rank(config, size, rank, worst) for worst in (False, True))
    moe, row = config.model.moe, config.model.dim * own.compute
    trip, worst = expert_rows(own), expert_rows(most)
    name = "capacity" if moe.capacity_factor is not None else "dropless at most"
    return {
        "router logits": own.stream * moe.num_experts * own.wide,
        "gathered inputs": trip.slots * row,
        "expert outputs": trip.slots * row,
        name: 2 * worst.slots * row,
    }


LEVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ablock", {"ablock": "none", "core_attn": False, "mla_q_upproj": False, "mla_kv": False}),
    ("eblock", {"eblock": "none"}),
    ("mblock", {"mblock": "none"}),
    ("rblock", {"rblock": "none"}),
    ("fblock", {"fblock": "none"}),
    ("norms", {"norms": False}),
    ("mlp", {"mlp": False}),
)


def saved(config: Config, size: int, rank: int, kept: int) -> dict[str, int]:
    """Return activation bytes that each lever of the policy saves, beside all others.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: whose activations are counted.
        kept: bytes saved for the backward under the whole policy.
    """
    found: dict[str, int] = {}
    for name, off in LEVERS:
        policy: CheckpointingPolicy = replace(config.recompute, **off)
        if policy != config.recompute:
            without = replace(config, recompute=policy)
            found[name] = activation_bytes(without, size, rank).bytes - kept
    return found
