"""Command `megacpp validate`: every rule of a launch, checked without starting it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megacpp.cli.show import setting_lines
from megacpp.config.arguments import Resolved, parse_run, read_run
from megacpp.config.checks.every import RULES, broken
from megacpp.config.environment import MOST_RANKS
from megacpp.config.mix import data_setting
from megacpp.config.schema import Config
from megacpp.config.settings import as_json, setting, settings_of
from megacpp.errors import MegacppError
from megacpp.memory.budget import BRIEF, GIB, as_planned, fullest, words
from megacpp.memory.fixes import memory_error
from megacpp.terminal.screen import wrapped

ALL_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class ValidateArgs:
    """Number of ranks, and optional checks."""

    world: int = setting(1, "Ranks of the launch.", "ranks", at_least=1, at_most=MOST_RANKS)
    data: bool = setting(False, "Open the corpus too: hashes, vocabulary, length of rows.")
    all: bool = setting(False, "Print every resolved setting and where it came from.")
    json: bool = setting(False, "Print one JSON object instead of text.")


def validate(args: ValidateArgs, words: list[str]) -> int:
    """Check every rule of a launch without starting anything, and list the broken ones.

    With --memory.device-gib the estimated memory is compared with a device of that size too, as the
    gate of a launch does.
    """
    problems = _problems(words, args.world)
    if args.data and not problems:
        problems += _data_problems(words, args.world)
    memory: dict[str, Any] | None = None
    resolved: Resolved | None = None
    if not problems:
        resolved = parse_run(words, args.world)
        memory, refused = _memory(resolved.config, args.world)
        problems += refused
    if args.json:
        print(json.dumps(_content(args, resolved, problems, memory)))
    elif problems or resolved is None:
        print("\n".join(f"error: {error}" for error in problems))
    else:
        print("\n".join(_lines(args, resolved, memory)))
    return problems[0].exit_code if problems else 0


def _lines(args: ValidateArgs, resolved: Resolved, memory: dict[str, Any] | None) -> list[str]:
    """Return `ok` and the list of checks."""
    mesh = asdict(resolved.config.mesh)
    axes = " x ".join(f"{axis} {mesh[axis]}" for axis in ALL_AXES if mesh[axis] > 1)
    settings = settings_of(Config).values()
    ranges = sum(one.range is not None for one in settings)
    said = (
        f"{resolved.config.preset} on {args.world} rank(s){f' ({axes})' if axes else ''}: "
        f"{len(settings)} settings, "
        f"{ranges} ranges, {len(RULES)} groups of rules ({', '.join(RULES)})"
    )
    return [
        *(setting_lines(resolved) if args.all else []),
        "ok",
        *wrapped(
            said + (f"; the corpus of {data_setting(resolved.config.data)}" if args.data else "")
        ),
        *(wrapped(_memory_line(memory)) if memory else []),
    ]


def _content(
    args: ValidateArgs,
    resolved: Resolved | None,
    problems: list[MegacppError],
    memory: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the result as JSON; `config` and `provenance` only with --all."""
    content = {
        "ok": not problems,
        "errors": [str(error) for error in problems],
        "memory": memory,
        "world": args.world,
        "rules": list(RULES),
    }
    if resolved is not None:
        content |= {"preset": resolved.config.preset, "mesh": asdict(resolved.config.mesh)}
        if args.all:
            content |= {"config": as_json(resolved.config), "provenance": resolved.provenance}
    return content


def _problems(arguments: list[str], world_size: int) -> list[MegacppError]:
    """Return all broken rules; a flag that can't be read ends the list."""
    try:
        config = read_run(arguments).config
    except MegacppError as error:
        return [error]
    return list(broken(config, world_size))


def _data_problems(arguments: list[str], world_size: int) -> list[MegacppError]:
    from megacpp.run.corpus import check_corpus, open_corpus

    config = parse_run(arguments, world_size).config
    try:
        check_corpus(config, open_corpus(config, verify=True))
    except MegacppError as error:
        return [error]
    return []


def _memory(config: Config, world_size: int) -> tuple[dict[str, Any] | None, list[MegacppError]]:
    """Return the estimate against `memory.device_gib`, if given, and the gate's decision.

    The device is assumed to be a GPU that computes in bf16, unless train.device is cpu. Calibration
    from measured launches isn't applied.
    """
    given = config.memory
    if not given.device_gib:
        return None, []
    config = as_planned(config)
    budget = int(given.device_gib * GIB * (1 - given.headroom))
    rank, needs = fullest(config, world_size, budget)
    refused: list[MegacppError] = []
    if needs.verdict == "does_not_fit" and given.gate == "on":
        room = f"{given.device_gib:g} GiB given, {given.headroom:.0%} headroom"
        price = lambda other: fullest(other, world_size, budget, BRIEF)[1]  # noqa: E731
        refused = [memory_error(config, world_size, rank, price, needs, room)]
    return {"rank": rank, "gate": given.gate, "estimate": needs.as_json()}, refused


def _memory_line(memory: dict[str, Any]) -> str:
    needs = memory["estimate"]
    said = needs["verdict"].replace("_", " ")
    off = " (memory.gate=off)" if memory["gate"] == "off" else ""
    return (
        f"memory: {words(needs['point'])} expected on rank {memory['rank']}, "
        f"{words(needs['upper'])} at most, {words(needs['budget'])} may be used: {said}{off}"
    )
