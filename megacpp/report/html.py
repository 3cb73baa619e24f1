"""Parts of a report: the surrounding page, tables, figures, formatted numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megacpp.memory.budget import words
from megacpp.report.style import CSS, SCRIPT


def document(title: str, parts: Sequence[str]) -> str:
    """Return a whole page: one file without external resources."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def tiles(found: Sequence[tuple[str, str]]) -> str:
    """Return names with large values."""
    shown = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in found)
    return f'<div class="tiles">{shown}</div>'


def figures(drawn: Sequence[tuple[str, str]]) -> str:
    """Return captions and drawings, side by side if there is room."""
    found = [
        f"<figure>{f'<figcaption>{escape(name)}</figcaption>' if name else ''}{svg}</figure>"
        for name, svg in drawn
        if svg
    ]
    inside = "".join(found)
    return f'<div class="two">{inside}</div>' if len(found) > 1 else inside


def table(rows: Mapping[str, object]) -> str:
    """Return names and values; None and empty values are left out."""
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value
    )
    return f'<table class="pairs">{body}</table>'


def columns(names: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """Return a table with a header; it scrolls if it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def pairs(values: Mapping[str, Any]) -> str:
    """Return `name value, name value`."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def of_ranks(values: Sequence[int]) -> str:
    """Return the bytes of each rank; of many ranks the least and the most."""
    if len(values) <= 8:
        return ", ".join(words(n) for n in values)
    return f"{words(min(values))} to {words(max(values))} on {len(values)} ranks"


def plain(value: float) -> str:
    """Return a number unchanged, as text."""
    return f"{value:g}"


def power(value: float) -> str:
    """Return a small number such as `0` or `3e-04`."""
    return f"{value:.0e}" if value else "0"


def signed(n: int) -> str:
    """Return bytes with their sign."""
    return f"{'+' if n >= 0 else '-'}{words(abs(n))}"
