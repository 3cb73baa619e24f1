"""`megacpp presets` and `megacpp show`: what a configuration is, counted on the meta device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from megacpp.arguments import (
    Resolved,
    flatten,
    parse_run,
    refuse_rest,
    take_flag,
    take_int,
    wants_help,
)
from megacpp.presets import PRESETS


def presets(argv: Sequence[str]) -> int:
    """usage: megacpp presets [--json]

    Lists every preset with total and active parameters.
    """
    arguments = list(argv)
    if wants_help(arguments, presets):
        return 0
    as_json = take_flag(arguments, "--json")
    refuse_rest(arguments)
    from megacpp.model.count import count_parameters, short

    rows = []
    for name, make in PRESETS.items():
        config = make()
        count = count_parameters(config.model)
        rows.append(
            {
                "preset": name,
                "total": count.total,
                "active": count.active,
                "pattern": config.model.pattern,
                "depth": config.model.depth,
                "dim": config.model.dim,
                "about": (make.__doc__ or "").strip().splitlines()[0],
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'preset':16}{'total':>8}{'active':>8}  {'pattern x depth, width':32}about")
    for row in rows:
        shape = f"{row['pattern']} x {row['depth']}, {row['dim']}"
        print(
            f"{row['preset']:16}{short(row['total']):>8}{short(row['active']):>8}  "
            f"{shape:32}{row['about'].split('; ', 1)[1]}"
        )
    return 0


def show(argv: Sequence[str]) -> int:
    """usage: megacpp show [PRESET] [--section.key value ...] [--world N] [--json]

    The model table, parameter counts and every resolved setting with where it came from.
    """
    arguments = list(argv)
    if wants_help(arguments, show):
        return 0
    as_json = take_flag(arguments, "--json")
    resolved = parse_run(arguments, take_int(arguments, "--world", 1))
    from megacpp.model.count import count_parameters, published_reading, table_lines

    model = resolved.config.model
    count, published = count_parameters(model), published_reading(model)
    if as_json:
        content = {
            "parameters": dataclasses.asdict(count),
            "config": dataclasses.asdict(resolved.config),
            "provenance": resolved.provenance,
        }
        print(json.dumps(content, indent=2))
        return 0
    print("\n".join(table_lines(model)))
    if resolved.config.preset == "nam56r_base":
        print(
            f"with M and R both read as Mamba-2 style mixers: {published} (published: 4.73B and "
            f"3.03B active; {published.total / 4.73e9 - 1:+.2%} and "
            f"{published.active / 3.03e9 - 1:+.2%})"
        )
    print("\n" + "\n".join(setting_lines(resolved)))
    return 0


def setting_lines(resolved: Resolved) -> list[str]:
    """Every setting as `key = value  (source)`, each on one line."""
    return [
        f"{key} = {one_line(value)}  ({resolved.provenance.get(key, 'preset')})"
        for key, value in flatten(resolved.config).items()
    ]


def one_line(value: object) -> str:
    """A value as text; quoted when it is empty or holds a line break."""
    text = str(value)
    return text if text and "\n" not in text else repr(text)
