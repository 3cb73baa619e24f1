"""Copies of a token that a dispatcher of experts sends.

sent_once(8, 64, 8)     # 5.25 of 8 nodes: a token of 8 experts among 64 ranks
"""

from __future__ import annotations

import math


def sent_once(top: int, size: int, per_node: int, groups: tuple[int, int] = (1, 1)) -> float:
    """Return copies of a token in an all-to-all that sends it once to each node, or to each rank.

    A dispatcher such as DeepEP's sends a token once over the network, and copies it inside a node.

    Args:
        top: experts of a token.
        size: ranks that share the experts.
        per_node: ranks of them in a node.
        groups: of experts, and those from which a token takes its experts.
    """
    nodes = -(-size // per_node)
    if nodes == 1:
        return size * chosen(top, size, *groups)
    away = (nodes - 1) * chosen(top, nodes, *groups)
    return away * size / (size - min(size, per_node))  # of which that share crosses the network


def chosen(top: int, places: int, groups: int = 1, kept: int = 1) -> float:
    """Return the probability that one of a token's experts is at a place.

    Choices are independent among the experts of the kept groups.

    Args:
        top: experts of a token.
        places: ranks or nodes that share the experts evenly.
        groups: of experts.
        kept: groups of a token.
    """
    if places >= groups:  # a place has a part of a group
        return kept / groups * (1 - (1 - groups / (kept * places)) ** top)
    here, found = groups // places, 0.0
    for few in range(1, min(here, kept) + 1):
        ways = math.comb(here, few) * math.comb(groups - here, kept - few)
        found += ways / math.comb(groups, kept) * (1 - (1 - few / kept) ** top)
    return found
