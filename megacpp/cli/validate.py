"""`megacpp validate`: every rule of a launch, checked without starting it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megacpp.arguments import parse_run, read_run, take_flag, take_int, wants_help
from megacpp.cli.show import setting_lines
from megacpp.errors import MegacppError, config_error
from megacpp.memory.budget import BRIEF, GIB, as_run, fullest, words
from megacpp.memory.fixes import refusal
from megacpp.rules import broken


def validate(argv: Sequence[str]) -> int:
    """usage: megacpp validate [PRESET] [--section.key value ...] [--world N] [--data] [--json]

    Lists every broken rule, or prints the resolved settings. --data also opens the corpus and
    checks its hashes, vocabulary and length against the configuration. --memory.device-gib also
    holds the estimated memory against a device of that size, as the gate of a launch does.
    """
    arguments = list(argv)
    if wants_help(arguments, validate):
        return 0
    as_json, data = take_flag(arguments, "--json"), take_flag(arguments, "--data")
    world_size = take_int(arguments, "--world", 1)
    if world_size < 1:
        raise config_error("world", world_size, "must be at least 1", "use --world 1 or more")
    problems = _problems(arguments, world_size)
    if data and not problems:
        problems += _data_problems(arguments, world_size)
    memory: dict[str, Any] | None = None
    if not problems:
        memory, refused = _memory(arguments, world_size)
        problems += refused
    if as_json:
        errors = [str(error) for error in problems]
        print(json.dumps({"ok": not problems, "errors": errors, "memory": memory}))
    elif problems:
        print("\n".join(f"error: {error}" for error in problems))
    else:
        resolved = parse_run(arguments, world_size)
        print("\n".join(setting_lines(resolved)))
        if memory:
            print(_memory_line(memory))
        print(f"ok: {resolved.config.preset} on {world_size} rank(s)")
    return problems[0].exit_code if problems else 0


def _problems(arguments: list[str], world_size: int) -> list[MegacppError]:
    """All broken rules at once; a flag that can't be read stops the list."""
    try:
        config, _, _ = read_run(arguments)
    except MegacppError as error:
        return [error]
    return list(broken(config, world_size))


def _data_problems(arguments: list[str], world_size: int) -> list[MegacppError]:
    from megacpp.data.batches import Corpus
    from megacpp.run.launch import check_corpus

    config = parse_run(arguments, world_size).config
    try:
        corpus = Corpus(config.data.path, config.data.seq_len, config.run.seed, verify=True)
        check_corpus(config, corpus)
    except MegacppError as error:
        return [error]
    return []


def _memory(
    arguments: list[str], world_size: int
) -> tuple[dict[str, Any] | None, list[MegacppError]]:
    """The estimate against `memory.device_gib`, if that is given, and what the gate says to it.

    A device is taken for a GPU that computes in bf16, unless train.device is cpu. What other
    launches were measured to take is not known here.
    """
    config = parse_run(arguments, world_size).config
    given = config.memory
    if not given.device_gib:
        return None, []
    device = "cpu" if config.train.device == "cpu" else "cuda"
    config = as_run(config, device, narrow=device == "cuda")
    budget = int(given.device_gib * GIB * (1 - given.headroom))
    rank, needs = fullest(config, world_size, budget)
    refused: list[MegacppError] = []
    if needs.verdict == "does_not_fit" and given.gate == "on":
        room = f"{given.device_gib:g} GiB given, {given.headroom:.0%} headroom"
        price = lambda other: fullest(other, world_size, budget, BRIEF)[1]  # noqa: E731
        refused = [refusal(config, world_size, rank, price, needs, room)]
    return {"rank": rank, "gate": given.gate, "estimate": needs.as_dict()}, refused


def _memory_line(memory: dict[str, Any]) -> str:
    needs = memory["estimate"]
    said = needs["verdict"].replace("_", " ")
    off = " (memory.gate=off)" if memory["gate"] == "off" else ""
    return (
        f"memory: {words(needs['point'])} expected on rank {memory['rank']}, "
        f"{words(needs['upper'])} at most, {words(needs['budget'])} may be used: {said}{off}"
    )
