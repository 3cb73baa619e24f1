"""Command lines of runs, and of torchrun on one node or several; imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megacpp.config.arguments import flatten
from megacpp.config.presets import preset
from megacpp.config.values import flag_text
from megacpp.terminal.screen import columns

ENDPOINT = "$HOST:29500"  # torchrun's usual port, on the node that HOST names


def node_shape(world: int, per_node: int) -> tuple[int, int]:
    """Return the number of nodes and ranks per node, all nodes equal and as full as possible."""
    ranks = next(n for n in range(min(world, per_node), 0, -1) if world % n == 0)
    return world // ranks, ranks


def torchrun_words(world: int, per_node: int, name: str) -> list[str]:
    """Return torchrun's options for `world` ranks; the same command starts every node.

    Args:
        world: number of ranks.
        per_node: most ranks of a node.
        name: name of the launch, the same on all nodes.
    """
    nodes, ranks = node_shape(world, per_node)
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={ranks}"]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ENDPOINT}", f"--rdzv-id={name}"]
    return [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", *meet]


def node_lines(world: int, per_node: int) -> list[str]:
    """Return notes on typing the command on several nodes."""
    nodes, ranks = node_shape(world, per_node)
    if nodes == 1:
        return []
    fill = f"{world} ranks don't fill nodes of {per_node} (--per-node): {nodes} nodes of {ranks}"
    start = f"on each of {nodes} nodes, with HOST the name of one of them (docs/launch):"
    return [fill, start] if ranks != per_node else [start]


def command_words(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of settings by dotted key: a preset, and what differs from it.

    Args:
        name: of the preset.
        settings: all of them, as a resolved configuration or a launch record has them.
    """
    base = flatten(preset(name)) | {"preset": settings.get("preset")}
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    return [
        name,
        *(
            f"--{key.replace('_', '-')}={flag_text(value)}"
            for key, value in given.items()
            if key not in base or base[key] != value
        ),
    ]


def quoted(words: Sequence[str]) -> str:
    """Quote a command for a shell, which expands $HOST."""
    return " ".join(word if ENDPOINT in word else shlex.quote(word) for word in words)


def command_lines(words: Sequence[str]) -> list[str]:
    """Return a command as lines, as wide as the screen, that a shell joins."""
    lines, line = [], ""
    for i, word in enumerate(words):
        flag = word.startswith("--") and i + 1 < len(words) and not words[i + 1].startswith("--")
        needed = len(line) + 1 + len(word) + (1 + len(words[i + 1]) if flag else 0)
        if line and needed > columns() - 6:
            lines.append(f"{line} \\")
            line = "  "
        line += f"{' ' if line.strip() else ''}{quoted([word])}"
    return [*lines, line]
