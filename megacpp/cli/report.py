"""Command `megacpp report`: one run, or several compared, as a page of HTML or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megacpp.config.settings import setting
from megacpp.report.compare import comparison, differences
from megacpp.report.data import gather
from megacpp.report.page import page
from megacpp.terminal.screen import check_writable


@dataclass(frozen=True)
class ReportArgs:
    """Runs, and the file of their page."""

    run: tuple[str, ...] = setting(words="Folders of runs.", positional=True)
    out: str = setting("", "File of the page (empty: RUN/report.html; of several: compare.html).")
    json: bool = setting(False, "Print the page's data as JSON, write nothing.")


def report(args: ReportArgs) -> int:
    """Write RUN/report.html about a run, or compare.html about several.

    The page of one run shows curves, samples, predicted and measured memory, communication by axis,
    goodput and events; it is a single file without external resources. For several runs
    compare.html, in the current folder, shows their curves together, totals, and settings that
    differ.
    """
    folders = [Path(word) for word in args.run]
    out = check_writable("out", Path(args.out)) if args.out and not args.json else None
    runs = [gather(folder) for folder in folders]
    alone = len(runs) == 1
    if args.json:
        found = runs[0] if alone else {"runs": runs, "differences": differences(runs)}
        print(json.dumps(found, indent=2))
        return 0
    plain = folders[0] / "report.html" if alone else Path("compare.html")
    path = out or check_writable("out", plain)
    path.write_text(page(runs[0]) if alone else comparison(runs), encoding="utf-8")
    for folder, run in zip(folders, runs, strict=True):
        for line in run["missing"]:
            print(f"not there: {line}" if alone else f"{folder}: {line}", file=sys.stderr)
    print(path)
    return 0
