"""`megacpp validate`: every rule of a launch, checked without starting it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megacpp.arguments import (
    parse_run,
    read_flags,
    replace_keys,
    take_flag,
    take_int,
    wants_help,
)
from megacpp.cli.show import setting_lines
from megacpp.errors import MegacppError, config_error
from megacpp.presets import preset
from megacpp.rules import broken


def validate(argv: Sequence[str]) -> int:
    """usage: megacpp validate [PRESET] [--section.key value ...] [--world N] [--data] [--json]

    Lists every broken rule, or prints the resolved settings. --data also opens the corpus and
    checks its hashes, vocabulary and length against the configuration.
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
    if as_json:
        print(json.dumps({"ok": not problems, "errors": [str(error) for error in problems]}))
    elif problems:
        print("\n".join(f"error: {error}" for error in problems))
    else:
        resolved = parse_run(arguments, world_size)
        print("\n".join(setting_lines(resolved)))
        print(f"ok: {resolved.config.preset} on {world_size} rank(s)")
    return problems[0].exit_code if problems else 0


def _problems(arguments: list[str], world_size: int) -> list[MegacppError]:
    """All broken rules at once; a flag that can't be read stops the list."""
    left = list(arguments)
    name = left.pop(0) if left and not left[0].startswith("-") else "tiny"
    try:
        config = replace_keys(preset(name), dict(read_flags(left)))
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
