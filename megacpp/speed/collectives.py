"""Seconds of collectives, by algorithm, bytes and the layout of a group over nodes.

    seconds("all_gather", 1 << 30, AxisSpread(16, 8), gpu("H100"))

A group is described by its size and by how many of its ranks share a node, which follows from the
order of the axes, so a group of 16,384 ranks costs as much to look at as one of 8.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from megacpp.speed.hardware import GpuSpec

START_US = 15.0  # of a collective: launch and synchronisation
PEER_US = 1.5  # of each peer of an all-to-all


class AxisSpread(NamedTuple):
    """Ranks of a group, and how many of them lie in one node.

    Attributes:
        size: ranks.
        inside: ranks of a node.
    """

    size: int
    inside: int

    @property
    def nodes(self) -> int:
        """Nodes that the group covers."""
        return -(-self.size // self.inside)


def spread(size: int, stride: int, per_node: int) -> AxisSpread:
    """Return the layout of a group whose neighbours are `stride` ranks apart.

    Groups that neither divide a node nor are whole nodes lie in different ways, and all ranks wait
    for the worst: the one of which a node has the fewest ranks.

    Args:
        size: ranks of the group.
        stride: ranks between two neighbours: the product of the axes inside it.
        per_node: GPUs of a node.
    """
    covered = size * stride
    inside = min(covered, per_node)
    if per_node % covered and covered % per_node:
        inside = math.gcd(covered, per_node)
    return AxisSpread(size, max(1, inside // stride))


@lru_cache(maxsize=1 << 14)
def seconds(kind: str, count: float, group: AxisSpread, gpu: GpuSpec) -> float:
    """Return the time of a collective, in seconds.

    Args:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` or `send`.
        count: bytes of the larger side on one rank; of `send`: bytes that are sent.
        group: its ranks.
        gpu: with the links.

    Raises:
        ValueError: another kind.
    """
    if group.size <= 1 or count <= 0:
        return 0.0
    inner = gpu.nvlink_gbs * gpu.nvlink_reached * 1e9
    outer = gpu.network_gbs * gpu.network_reached * 1e9
    n, nodes = group.size, group.nodes
    if kind == "send":
        near = group.nodes == 1  # else the slowest of its hops leaves a node
        wait = gpu.node_latency_us if near else gpu.network_latency_us
        return count / (inner if near else outer) + (START_US + wait) * 1e-6
    if kind == "all_to_all":
        away = count * (n - group.inside) / n / outer
        near = count * (group.inside - 1) / n / inner
        return max(away, near) + (START_US + PEER_US * n) * 1e-6
    times = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(kind)
    if times is None:
        raise ValueError(f"kind={kind}: no such collective")
    # A ring hands on n - 1 of n shares over each of its links, those between nodes among them.
    near = count * (n - 1) / n / inner if group.inside > 1 else 0.0
    away = count * (n - 1) / n / (group.inside * outer) if nodes > 1 else 0.0
    return times * max(near, away) + (START_US + times * hops_us(group, gpu)) * 1e-6


def hops_us(group: AxisSpread, gpu: GpuSpec) -> float:
    """Return the latency of a ring's hops, or of a tree's where nodes are many, in microseconds."""
    inside = (group.inside - 1) * gpu.node_latency_us
    if group.nodes == 1:
        return inside
    ring = (group.nodes - 1) * gpu.network_latency_us + group.nodes * inside
    tree = 2 * math.log2(group.nodes) * gpu.network_latency_us + inside
    return min(ring, 4 * tree)
