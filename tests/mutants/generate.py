"""Faults made by seed: operators, comparisons, dropped arguments and calls, swapped axes."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.faults import Fault, program

# Rooms, and how often a fault is drawn from each. Within a room a file counts by its length.
ROOMS = {
    "train.py": 6,
    "parallel": 10,
    "optim": 6,
    "megacpp/state": 6,
    "megacpp/launch": 4,
    "megacpp/run": 6,
}
COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMBINED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*"}
AXES = {
    "batch": "loss", "loss": "batch", "cp": "tp", "tp": "cp", "stage": "world", "world": "stage",
    "shard": "expert_shard", "expert_shard": "shard", "fsdp": "batch",
}  # fmt: skip
# Calls whose arguments are words for people, of which no test compares each.
WORDS = {"print", "say", "warn", "config_error", "region", "span", "join"}
# Calls for which the order of arguments doesn't matter, or isn't one of values.
UNORDERED = {
    "max", "min", "isinstance", "getattr", "setattr", "partial", "gcd", "cast", "promote_types",
    "transpose",
}  # fmt: skip
# Drawings and tables for people, and what only a GPU runs.
LEFT_OUT = (
    "parallel/simulate/drawing.py",
    "parallel/simulate/explain.py",
    "megacpp/launch/recompute_table.py",
    "megacpp/run/kernel_check.py",
    "megacpp/run/profiling.py",
)


def generated(root: Path, count: int, seed: int, others: Sequence[Fault] = ()) -> list[Fault]:
    """Return random faults of the rooms, no two on one line; the same for a seed.

    Args:
        root: the checkout.
        count: number of faults.
        seed: of the draw.
        others: faults that aren't drawn again.
    """
    rng, drawn = random.Random(seed), {}
    listed = {program(f.planted((root / f.file).read_text())) for f in others}
    files = {room: _files(root, room) for room in ROOMS}
    places: dict[Path, dict[str, list[Fault]]] = {}
    while len(drawn) < count:
        (room,) = rng.choices(list(ROOMS), list(ROOMS.values()))
        (path,) = rng.choices(files[room], [file.stat().st_size for file in files[room]])
        text = path.read_text()
        if path not in places:
            places[path] = {}
            for fault in faults(str(path.relative_to(root)), text):
                places[path].setdefault(fault.name.split(":")[0], []).append(fault)
        if not places[path]:
            continue
        fault = rng.choice(places[path][rng.choice(sorted(places[path]))])
        new = _other_program(fault, text)
        if new is not None and new not in listed:
            drawn.setdefault((fault.file, fault.line(text)), fault)
    return list(drawn.values())


def _files(root: Path, room: str) -> list[Path]:
    paths = sorted((root / room).rglob("*.py")) or [root / room]
    return [path for path in paths if str(path.relative_to(root)) not in LEFT_OUT]


def _other_program(fault: Fault, text: str) -> str | None:
    """Return what the text says with the fault; None: nothing, or the same as without."""
    try:
        new = program(fault.planted(text))
    except SyntaxError:
        return None
    return None if new == program(text) else new


def faults(file: str, text: str) -> Iterator[Fault]:
    """Yield every change that can be made of a file; a few aren't Python."""
    starts, encoded = [0], text.splitlines(keepends=True)
    for line in encoded:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        """Return the characters before a place; `ast` counts bytes of UTF-8."""
        before = encoded[line - 1].encode()[:column].decode()
        return starts[line - 1] + len(before)

    def span(node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    for node in walk(ast.parse(text)):
        for name, first, last, new in changes(node, text, span):
            yield Fault(file, name, first, text[first:last], new)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no annotations, imports, messages or assertions."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr
            if isinstance(child, ast.AST) and not isinstance(child, skipped) and not _talks(child):
                yield from walk(child)


def _talks(node: ast.AST) -> bool:
    """Whether it only makes words or types."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Call) and _called(node) in WORDS


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def changes(node: ast.AST, text: str, span) -> Iterator[tuple[str, int, int, str]]:
    """Yield what may go wrong at a node: its kind and name, the span that changes, the new text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = COMPARED[type(node.ops[0])]
        first, last = span(node.left)[1], span(node.comparators[0])[0]
        yield f"comparison: {new}", *_between(text, first, last, new)
    elif isinstance(node, ast.BinOp) and type(node.op) in COMBINED:
        new = COMBINED[type(node.op)]
        if not isinstance(node.left, ast.Constant) or not isinstance(node.left.value, str):
            first, last = span(node.left)[1], span(node.right)[0]
            yield f"operator: {new}", *_between(text, first, last, new)
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        new = "or" if isinstance(node.op, ast.And) else "and"
        first, last = span(node.values[0])[1], span(node.values[1])[0]
        yield f"operator: {new}", *_between(text, first, last, new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "operator: not dropped", *span(node), text[slice(*span(node.operand))]
    elif isinstance(node, ast.Constant) and node.value in AXES:
        yield f"axis: {AXES[node.value]}", *span(node), f'"{AXES[node.value]}"'
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10:
        yield f"number: {node.value + 1}", *span(node), str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"call: {_called(node.value)} dropped", *span(node), "pass"
    elif isinstance(node, ast.AugAssign):
        yield f"call: {ast.unparse(node.target)} dropped", *span(node), "pass"
    elif isinstance(node, ast.Call):
        yield from _arguments(node, text, span)


def _between(text: str, first: int, last: int, new: str) -> tuple[int, int, str]:
    """Return the span of the operator between two operands, brackets around these left out."""
    old = text[first:last]
    inner = old.strip(" \n()")
    first += old.index(inner)
    return first, first + len(inner), new


def _arguments(node: ast.Call, text: str, span) -> Iterator[tuple[str, int, int, str]]:
    for keyword in node.keywords:
        if keyword.arg is not None:
            first, last = span(keyword)
            comma = len(text[last:]) - len(text[last:].lstrip(" \n")) if text[last:] else 0
            if text[last + comma : last + comma + 1] == ",":
                last += comma + 1
            else:
                first = len(text[:first].rstrip(" \n,"))
            yield f"argument: {keyword.arg} dropped", first, last, ""
    if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        one, two = span(node.args[0]), span(node.args[1])
        a, b = text[slice(*one)], text[slice(*two)]
        if a != b and _called(node) not in UNORDERED:
            swapped = b + text[one[1] : two[0]] + a
            yield f"argument: first two of {_called(node)} swapped", one[0], two[1], swapped
