"""Make pieces of a report: the page around them, tables, figures, numbers in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megacpp.memory.budget import words
from megacpp.report.style import CSS, SCRIPT


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page: one file, nothing from elsewhere."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def tiles(found: Sequence[tuple[str, str]]) -> str:
    """Names and large values."""
    shown = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in found)
    return f'<div class="tiles">{shown}</div>'


def figures(drawn: Sequence[tuple[str, str]]) -> str:
    """Captions and drawings, side by side where there is room."""
    found = [
        f"<figure>{f'<figcaption>{escape(name)}</figcaption>' if name else ''}{svg}</figure>"
        for name, svg in drawn
        if svg
    ]
    inside = "".join(found)
    return f'<div class="two">{inside}</div>' if len(found) > 1 else inside


def table(rows: Mapping[str, object]) -> str:
    """Names and values; what is None or empty is left out."""
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value
    )
    return f'<table class="pairs">{body}</table>'


def columns(names: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """A table with a header; it scrolls by itself where it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def pairs(values: Mapping[str, Any]) -> str:
    """`name value, name value`."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def of_ranks(values: Sequence[int]) -> str:
    """Bytes of each rank; of many ranks the least and the most."""
    if len(values) <= 8:
        return ", ".join(words(n) for n in values)
    return f"{words(min(values))} to {words(max(values))} on {len(values)} ranks"


def plain(value: float) -> str:
    """A number as it is."""
    return f"{value:g}"


def short(value: float) -> str:
    """`950`, `12.3K`, `4.73B`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def power(value: float) -> str:
    """A small number: `0`, `3e-04`."""
    return f"{value:.0e}" if value else "0"


def signed(n: int) -> str:
    """Bytes with their sign."""
    return f"{'+' if n >= 0 else '-'}{words(abs(n))}"
