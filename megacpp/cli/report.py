"""Command `megacpp report`: one run, or several compared, as a page of HTML or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megacpp.config.settings import setting
from megacpp.report.compare import comparison, differences
from megacpp.report.data import gather
from megacpp.report.files import runs_among
from megacpp.report.page import page
from megacpp.state.files import write_out
from megacpp.state.local_copy import local_copy
from megacpp.terminal.screen import check_writable
from megacpp.urls import is_url


@dataclass(frozen=True)
class ReportArgs:
    """Runs, and the file of their page."""

    run: tuple[str, ...] = setting(words="Folders or URLs of runs.", positional=True)
    out: str = setting(
        "",
        "File of the page (empty: RUN/report.html, report.html of a URL, compare.html of several).",
    )
    json: bool = setting(False, "Print the page's data as JSON, write nothing.")


def report(args: ReportArgs) -> int:
    """Write RUN/report.html about a run, or compare.html about several.

    The page of one run shows curves, samples, predicted and measured memory, communication by axis,
    goodput and events; it is a single file without external resources. For several runs
    compare.html, in the current folder, shows their curves together, totals, and settings that
    differ.
    """
    words = {Path(local_copy(word, "run", "records")): word for word in args.run}
    out = check_writable("out", Path(args.out)) if args.out and not args.json else None
    folders = runs_among(list(words))
    runs = [
        gather(folder) | ({"folder": words[folder]} if is_url(words[folder]) else {})
        for folder in folders
    ]
    alone = len(runs) == 1
    if args.json:
        found = runs[0] if alone else {"runs": runs, "differences": differences(runs)}
        print(json.dumps(found, indent=2))
        return 0
    near = Path() if is_url(args.run[0]) else folders[0]
    plain = near / "report.html" if alone else Path("compare.html")
    path = out or check_writable("out", plain)
    write_out(path, page(runs[0]) if alone else comparison(runs))
    for run in runs:
        for line in run["missing"]:
            print(f"not there: {line}" if alone else f"{run['folder']}: {line}", file=sys.stderr)
    print(path)
    return 0
