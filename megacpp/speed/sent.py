"""Describe what a rank of our own trainer sends in a step, for the time model; no torch import.

Bytes come from megacpp/memory/traffic.py, the number of collectives from what blocks do.
"""

from __future__ import annotations

from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import kinds_of
from megacpp.memory.traffic import carried, traffic
from megacpp.speed.collectives import AxisSpread, spread
from megacpp.speed.step import Transfer

ALONE = AxisSpread(1, 1)


def axes(config: Config, size: int, per_node: int) -> dict[str, AxisSpread]:
    """Return the spread of each mesh axis over nodes: tp innermost, pp outermost.

    The `copies` of an axis add up gradients that it has reduced: replicas, unless they take the
    place of shards.
    """
    m, per_node = config.mesh, min(per_node, size)
    folded = m.dp_shard * m.cp * m.tp
    shards = m.dp_shard * m.cp
    replicas = spread(m.dp_replicate, folded, per_node)
    return {
        "tp": spread(m.tp, 1, per_node),
        "cp": spread(m.cp, m.tp, per_node),
        "ep": spread(m.ep, 1, per_node),
        "data": spread(shards, m.tp, per_node) if shards > 1 else replicas,
        "data copies": replicas if shards > 1 else ALONE,
        "expert_data": spread(folded // m.ep, m.ep, per_node) if folded > m.ep else replicas,
        "expert_data copies": replicas if folded > m.ep else ALONE,
        "pp": spread(m.pp, size // m.pp, per_node),
    }


def between(config: Config, size: int) -> tuple[Transfer, ...]:
    """Return what ranks of tp and owners of matrices send once a step."""
    found = []
    for (axis, what), count in traffic(config, size).parts.items():
        if axis == "muon" or (axis == "tp" and what == "gradients"):
            found.append(Transfer("data" if axis == "muon" else "tp", "all_gather", count))
    return tuple(found)


def block_transfers(config: Config, own: LocalShapes, size: int) -> dict[str, tuple[Transfer, ...]]:
    """Return what a pass of each kind of block sends, from the bytes of a step.

    Experts' rows are sent by E blocks, keys and states by blocks that `cp` concerns, all else
    evenly by all blocks.

    Args:
        config: resolved, with one microbatch.
        own: sizes of the rank.
        size: number of ranks.
    """
    mesh = config.mesh
    if mesh.tp * mesh.ep * mesh.cp == 1:
        return {}
    kinds = [k for parts in kinds_of(config, size, 0) for k in parts if k[0] in KINDS]
    total = {"tp": 0, "ep": 0, "cp": 0}
    for (axis, what), count in carried(config, size).items():
        if axis in total and what != "gradients":
            total[axis] += count
    context = {kind: _context(own, kind) for kind in kinds if mesh.cp > 1}
    known = 2 * sum(t.bytes * (1 + (t.kind == "send")) for k in kinds for t in context.get(k, ()))
    # More than one layer's: recomputation, an indexer, tokens further ahead.
    more = total["cp"] / known if known else 0.0
    found: dict[str, tuple[Transfer, ...]] = {}
    for kind in dict.fromkeys(kinds):
        here: list[Transfer] = []
        for axis, mine, how in (
            ("tp", kinds, "all_gather"),
            ("ep", [k for k in kinds if k[0] == "E"], "all_to_all"),
        ):
            if total[axis] and kind in mine:
                one = Transfer(axis, how, total[axis] / (4 * len(mine)))
                here += [one, one if axis == "tp" else _beside_shared(one, config)]
        here += [t._replace(bytes=t.bytes * more) for t in context.get(kind, ())]
        found[kind] = tuple(here)
    return found


def _beside_shared(back: Transfer, config: Config) -> Transfer:
    """Return the way back from experts, which takes place beside the products of shared ones."""
    model, e = config.model, config.model.moe
    shared = 3 * model.dim * e.num_shared * e.shared_hidden_dim
    if not shared:
        return back
    every = KINDS["E"].multiply_adds(model, config.data.seq_len)
    return back._replace(hidden="products", share=shared / every)


def _context(own: LocalShapes, kind: str) -> tuple[Transfer, ...]:
    """Return what a layer sends over `cp` in a pass, on average of forward and backward."""
    exchange, mesh = KINDS[kind[0]].context, own.config.mesh
    if exchange is None:
        return ()
    how, (_, heads) = getattr(mesh, exchange.setting), exchange.heads(own.config.model)
    if how == "auto" and heads // mesh.tp % mesh.cp == 0:
        how = "heads"
    once = sum(count for _, count in exchange.traffic(own)) / 2
    if how == "ring":  # bytes count where they leave and where they arrive
        turns = mesh.cp - 1
        return (Transfer("cp", "send", once / 2 / turns, "attend"),) * turns
    if how == "heads":
        return (Transfer("cp", "all_to_all", once / 2),) * 2
    return (Transfer("cp", "all_gather", once),)
