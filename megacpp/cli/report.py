"""`megacpp report`: a run folder as one page of HTML, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp.arguments import take_flag, wants_help
from megacpp.errors import ConfigError, config_error
from megacpp.run.report_data import gather
from megacpp.run.report_page import page


def report(argv: Sequence[str]) -> int:
    """usage: megacpp report RUN [--out FILE] [--json]

    Writes RUN/report.html: loss and bits per byte, throughput, memory predicted and measured,
    communication by axis, where the seconds went, events. One file, no script, nothing from
    elsewhere. With --json the same as data, on the screen.
    """
    arguments = list(argv)
    if wants_help(arguments, report):
        return 0
    as_json, out = take_flag(arguments, "--json"), _take_out(arguments)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(
            f"arguments={' '.join(arguments)}: one run folder is reported. Fix: megacpp report RUN."
        )
    folder = Path(arguments[0])
    data = gather(folder)
    if as_json:
        print(json.dumps(data, indent=2))
        return 0
    path = out or folder / "report.html"
    try:
        path.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise config_error(
            "out", path, f"is not writable ({error.strerror})", "give another --out"
        ) from None
    for line in data["missing"]:
        print(f"not there: {line}", file=sys.stderr)
    print(path)
    return 0


def _take_out(arguments: list[str]) -> Path | None:
    """Removes `--out FILE`."""
    if "--out" not in arguments:
        return None
    place = arguments.index("--out")
    if place + 1 >= len(arguments):
        raise ConfigError("out=: a file is wanted. Fix: --out FILE.")
    path = Path(arguments[place + 1])
    del arguments[place : place + 2]
    return path
