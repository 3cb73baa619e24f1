"""Commands `megacpp presets` and `megacpp show`: contents of a configuration; no torch import."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from megacpp.config.arguments import Resolved, flatten, parse_run
from megacpp.config.environment import MOST_RANKS
from megacpp.config.help import headline
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.config.settings import as_json, setting
from megacpp.model.count import count_parameters, published_reading, short, table_lines
from megacpp.terminal.screen import columns, labelled, wrapped
from megacpp.urls import is_url

WIDE = 110  # columns from which presets show time and result


@dataclass(frozen=True)
class PresetsArgs:
    """Format of the list."""

    json: bool = setting(False, "Print one JSON list instead of text.")


def presets(args: PresetsArgs) -> int:
    """List every preset with total and active parameters.

    A wide screen also shows the time that it takes and what to expect.
    """
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
                "about": headline(name),
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    wide = columns() >= WIDE
    print(f"{'preset':16}{'total':>6}{'active':>7}  {'pattern x depth, width':25}machine")
    for row in rows:
        shape = f"{row['pattern']} x {row['depth']}, {row['dim']}"
        left = f"{row['preset']:16}{short(row['total']):>6}{short(row['active']):>7}  {shape:23}"
        _, *result, time, machine = row["about"].split("; ")
        said = "; ".join([machine.rstrip("."), time, *result]) if wide else machine.rstrip(".")
        print("\n".join(labelled(left, said, 56)))
    return 0


@dataclass(frozen=True)
class ShowArgs:
    """Number of ranks, and format."""

    world: int = setting(
        1,
        "Ranks that derived settings are worked out for.",
        "ranks",
        at_least=1,
        at_most=MOST_RANKS,
    )
    json: bool = setting(False, "Print one JSON object instead of text.")
    from_: str = setting(
        "", "Folder with weights, such as a Hugging Face one: print the settings that fit it."
    )
    check: bool = setting(False, "Compare that folder with transformers, which must be installed.")


def show(args: ShowArgs, words: list[str]) -> int:
    """Model table, parameter counts, and every resolved setting with its origin.

    With --from FOLDER instead: the model of a folder with weights, and the settings in which it
    differs from the preset. `--checkpoint.init FOLDER` takes them by itself.
    """
    resolved = parse_run(words, args.world)
    if args.from_:
        return _show_folder(args, resolved.config)
    model = resolved.config.model
    count, published = count_parameters(model), published_reading(model)
    if args.json:
        content = {
            "parameters": dataclasses.asdict(count),
            "config": as_json(resolved.config),
            "provenance": resolved.provenance,
        }
        print(json.dumps(content, indent=2))
        return 0
    heading, *kinds = table_lines(model)
    print("\n".join([*wrapped(heading), *kinds]))
    if resolved.config.preset == "nam56r_base":
        reading = (
            f"with M and R both read as Mamba-2 style mixers: {published} (published: 4.73B and "
            f"3.03B active; {published.total / 4.73e9 - 1:+.2%} and "
            f"{published.active / 3.03e9 - 1:+.2%})"
        )
        print("\n".join(wrapped(reading)))
    print("\n" + "\n".join(setting_lines(resolved)))
    return 0


def _show_folder(args: ShowArgs, config: Config) -> int:
    """Print the model of a folder with weights."""
    from megacpp.interop.places import locate, read_model
    from megacpp.interop.settings import flags_between

    folder = locate(args.from_, "from", "weights" if args.check else "settings")
    model = read_model(folder)
    flags = flags_between(config.model, model)
    if args.json:
        count = dataclasses.asdict(count_parameters(model))
        content = {"parameters": count, "model": dataclasses.asdict(model), "flags": flags}
        print(json.dumps(content, indent=2))
    else:
        heading, *kinds = table_lines(model)
        origin = args.from_ if is_url(args.from_) else folder.folder
        start = f"train.py {config.preset} --checkpoint.init {origin}"
        print("\n".join([*wrapped(heading), *kinds, "", *wrapped(f"starts from it: {start}"), ""]))
        print("\n".join([f"{config.preset} with another start has these settings too:", *flags]))
    if args.check:
        from megacpp.interop.compare import compared

        print("\n".join(wrapped(compared(folder.folder, "from"))))
    return 0


def setting_lines(resolved: Resolved) -> list[str]:
    """Return every setting as `key = value  (source)`, each on one line."""
    return [
        f"{key} = {one_line(value)}  ({resolved.provenance.get(key, 'preset')})"
        for key, value in flatten(resolved.config).items()
    ]


def one_line(value: object) -> str:
    """Return a value as text; quoted if it is empty or holds a line break."""
    text = str(value)
    return text if text and "\n" not in text else repr(text)
