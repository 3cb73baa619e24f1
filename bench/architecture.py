"""Table of all packages and of who imports whom, made from the code's own imports.

    python -m bench.architecture [--write]

Prints what docs/architecture.md shows between its marks, or writes it there. `packages_and_arrows`
is what docs/pictures/packages.svg draws. Imports inside a function or for types alone don't count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from bench import asked

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
START, END = "<!-- made by python -m bench.architecture -->", "<!-- end -->"
TOP = ("parallel", "optim", "checkpointing")
FILES = [file for name in ("megacpp", *TOP) for file in (ROOT / name).rglob("*.py")]


def package_of(module: str) -> str | None:
    """Return the package of a module's dotted name, or `train.py`; None where it isn't ours."""
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
    """Return the packages that each package imports."""
    packages: dict[str, set[str]] = {}
    for file in (ROOT / "train.py", *FILES):
        here = package_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if here is not None:
            there = {package_of(module) for module in imported(ast.parse(file.read_text()).body)}
            packages.setdefault(here, set()).update(p for p in there - {None, here} if p)
    return packages


def reached(packages: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the packages that each package reaches by any number of imports."""
    reach = {package: set(others) for package, others in packages.items()}
    for middle in reach:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    return reach


Box = frozenset[str]


def packages_and_arrows() -> dict[Box, list[Box]]:
    """Return each box of packages, those that import most first, and the boxes that it points at.

    Packages that import each other share a box. An arrow goes from a box to one that it imports,
    unless a longer path of arrows says so already.
    """
    packages = imports()
    reach = reached(packages)
    boxes = {p: Box({p} | {o for o in reach[p] if p in reach[o]}) for p in packages}
    above = {box: set().union(*(reach[package] for package in box)) - box for box in boxes.values()}
    order = sorted(set(boxes.values()), key=lambda box: (-len(above[box]), sorted(box)))
    arrows: dict[Box, list[Box]] = {}
    for box in order:
        below = {boxes[package] for package in above[box]}
        direct = [b for b in below if not any(b <= above[other] for other in below)]
        arrows[box] = sorted(direct, key=order.index)
    return arrows


def table() -> str:
    """Return the table of packages as Markdown."""
    packages, order = imports(), [p for box in packages_and_arrows() for p in sorted(box)]
    lines = ["| package | what lives there | imports |", "|---|---|---|"]
    for package in order:
        others = ", ".join(other.removeprefix("megacpp/") for other in sorted(packages[package]))
        lines.append(f"| `{package}` | {_sentence(package)} | {others or '-'} |")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """Return a page's text with the table of today between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


def _sentence(package: str) -> str:
    """Return the first sentence of a package's docstring."""
    file = ROOT / package if package.endswith(".py") else ROOT / package / "__init__.py"
    return (
        (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    )


def main() -> None:
    """Print the table, or write it into the page."""
    _, write = asked(__doc__)
    if write:
        PAGE.write_text(drawn(PAGE.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
