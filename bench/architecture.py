"""Picture of all rooms and of who imports whom, drawn from the code's own imports.

    python -m bench.architecture [--write]

Prints what docs/architecture.md shows between its marks, or writes it there. The picture is a
Mermaid flowchart: an arrow goes from a room to one that it imports, unless a longer path of arrows
says so already. Rooms that import each other stand in one box. What is imported inside a function
or for types alone doesn't count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
START, END = "<!-- drawn by python -m bench.architecture -->", "<!-- end -->"
TOP = ("parallel", "optim", "checkpointing")
FILES = [file for room in ("megacpp", *TOP) for file in (ROOT / room).rglob("*.py")]


def room_of(module: str) -> str | None:
    """Return the room of a module's dotted name; None where it isn't ours."""
    first, *rest = module.split(".")
    if first in ("train", *TOP):
        return "train.py" if first == "train" else first
    if first == "megacpp" and rest and (ROOT / first / rest[0]).is_dir():
        return f"megacpp/{rest[0]}"
    return None


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Yield modules that statements import when a file is loaded."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from imported(node.body)


def imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    rooms: dict[str, set[str]] = {}
    for file in (ROOT / "train.py", *FILES):
        here = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if here is not None:
            there = {room_of(module) for module in imported(ast.parse(file.read_text()).body)}
            rooms.setdefault(here, set()).update(room for room in there - {None, here} if room)
    return rooms


def reached(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room reaches by any number of imports."""
    reach = {room: set(others) for room, others in rooms.items()}
    for middle in reach:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    return reach


def picture() -> str:
    """Return the flowchart and the table of rooms as Markdown."""
    rooms = imports()
    reach = reached(rooms)
    boxes = {
        room: frozenset({room} | {o for o in reach[room] if room in reach[o]}) for room in rooms
    }
    above = {box: set().union(*(reach[room] for room in box)) - box for box in boxes.values()}
    order = sorted(set(boxes.values()), key=lambda box: (-len(above[box]), sorted(box)))
    lines = ["```mermaid", "flowchart TD"]
    for number, box in enumerate(order):
        names = [f'  {_name(room)}["{room}"]' for room in sorted(box)]
        if len(box) > 1:
            names = [f'  subgraph box{number}[" "]', *(f"  {name}" for name in names), "  end"]
        lines += names
    number = {box: index for index, box in enumerate(order)}
    for box in order:
        below = {boxes[room] for room in above[box]}
        direct = [b for b in below if not any(b <= above[other] for other in below)]
        for other in sorted(direct, key=lambda b: number[b]):
            lines.append(f"  {_end(box, number)} --> {_end(other, number)}")
    table = ["| room | what lives there | imports |", "|---|---|---|"]
    for room in sorted(rooms, key=lambda room: (number[boxes[room]], room)):
        others = ", ".join(other.removeprefix("megacpp/") for other in sorted(rooms[room]))
        table.append(f"| `{room}` | {_sentence(room)} | {others or '-'} |")
    return "\n".join([*lines, "```", "", *table])


def drawn(page: str) -> str:
    """Return a page's text with the picture of today between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n{picture()}\n{END}{rest.split(END)[1]}"


def _name(room: str) -> str:
    return room.replace("megacpp/", "").replace(".py", "")


def _end(box: frozenset[str], number: dict[frozenset[str], int]) -> str:
    return _name(*box) if len(box) == 1 else f"box{number[box]}"


def _sentence(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    file = ROOT / room if room.endswith(".py") else ROOT / room / "__init__.py"
    return (
        (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    )


def main() -> None:
    """Print the picture, or write it into the page."""
    if "--write" in sys.argv:
        PAGE.write_text(drawn(PAGE.read_text()))
    else:
        print(picture())


if __name__ == "__main__":
    main()
