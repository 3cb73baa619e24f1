"""`megacpp report`: a run folder as one page of HTML, or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megacpp.run.report_data import gather
from megacpp.run.report_page import page
from megacpp.screen import check_writable
from megacpp.settings import setting


@dataclass(frozen=True)
class ReportArgs:
    """A run and where its page goes."""

    run: str = setting(words="Folder of the run.", positional=True)
    out: str = setting("", "File of the page (empty: RUN/report.html).")
    json: bool = setting(False, "Print the page's data as JSON, write nothing.")


def report(args: ReportArgs) -> int:
    """Writes RUN/report.html: loss and bits per byte, throughput, memory predicted and measured,
    communication by axis, where the seconds went, events. One file, no script, nothing from
    elsewhere.
    """
    folder = Path(args.run)
    out = check_writable("out", Path(args.out)) if args.out and not args.json else None
    data = gather(folder)
    if args.json:
        print(json.dumps(data, indent=2))
        return 0
    path = out or check_writable("out", folder / "report.html")
    path.write_text(page(data), encoding="utf-8")
    for line in data["missing"]:
        print(f"not there: {line}", file=sys.stderr)
    print(path)
    return 0
