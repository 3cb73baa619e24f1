"""Docstrings keep one rule: how they open, what they state, and which names are used.

Every rule counts its findings per package. `LEFT` lists packages whose findings are still allowed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("megacpp", "parallel", "optim", "checkpointing", "bench")
FILES = sorted([ROOT / "train.py", *(p for room in PACKAGES for p in (ROOT / room).rglob("*.py"))])
OPENERS = set("Of What Where Who As The One Some Beside A An".split())
RULES = ("opening", "missing", "raises", "args", "shapes")
# Packages with findings; the others have none. A package leaves the list, none enters it.
LEFT: dict[str, tuple[str, ...]] = {
    "opening": (),
    "missing": (),
    "raises": (),
    "args": (),
    "shapes": (),
}
SHAPE = re.compile(r"_[A-Z][A-Za-z0-9]*$|^[a-z]$")
TENSOR = re.compile(r"\bTensor\b")


class Finding(NamedTuple):
    """Docstring that breaks a rule."""

    rule: str
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.file}:{self.line} {self.name}"


def findings(path: Path) -> Iterator[Finding]:
    """Yield the broken rules of one file."""
    file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    yield from _opening(file, 1, "module", ast.get_docstring(tree))
    yield from _inside(file, tree, "", True)


def _inside(file: str, parent: ast.AST, prefix: str, public: bool) -> Iterator[Finding]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            yield from _opening(file, node.lineno, prefix + node.name, ast.get_docstring(node))
            shown = public and not node.name.startswith("_")
            yield from _inside(file, node, f"{prefix}{node.name}.", shown)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, text = prefix + node.name, ast.get_docstring(node)
            yield from _opening(file, node.lineno, name, text)
            if public and node.name == "__init__" and isinstance(parent, ast.ClassDef):
                both = f"{ast.get_docstring(parent) or ''}\n{text or ''}"
                yield from _contents(file, node, name, both.replace("Attributes:", "Args:"))
            elif public and not node.name.startswith("_"):
                yield from _contents(file, node, name, text)
            yield from _inside(file, node, f"{name}.", False)
        else:
            yield from _inside(file, node, prefix, public)


def _opening(file: str, line: int, name: str, text: str | None) -> Iterator[Finding]:
    if text and re.split(r"[\s:,.;]", text, maxsplit=1)[0] in OPENERS:
        yield Finding("opening", file, line, name)


def _contents(
    file: str, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, text: str | None
) -> Iterator[Finding]:
    """Yield what the docstring of a public function lacks."""

    def finding(rule: str) -> Finding:
        return Finding(rule, file, node.lineno, name)

    if not text:
        yield finding("missing")
        text = ""
    is_command = file.startswith("megacpp/cli/") and [a.arg for a in node.args.args][:1] == ["args"]
    if _raises(node) and "Raises:" not in text and not is_command:  # a command's help is its text
        yield finding("raises")
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parameters = [a for a in parameters if a.arg not in ("self", "cls")]
    if len(parameters) >= 4 and "Args:" not in text:
        yield finding("args")
    tensors = [a.arg for a in parameters if a.annotation and _is_tensor(a.annotation)]
    if any(not SHAPE.search(name) and name not in _shaped(text) for name in tensors):
        yield finding("shapes")


def _raises(node: ast.AST) -> bool:
    """Whether a function raises an error of its own; assertions and abstract methods aside."""
    for child in ast.walk(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            error = ast.unparse(child.exc)
            if not re.match(r"(NotImplementedError|AssertionError|SystemExit|error\b)", error):
                return True
    return False


def _is_tensor(annotation: ast.expr) -> bool:
    """Whether an annotation is a Tensor, or one or None."""
    return bool(re.fullmatch(r"(torch\.)?Tensor( \| None)?", ast.unparse(annotation)))


def _shaped(text: str) -> set[str]:
    """Names of arguments whose shape a docstring states: beside brackets, or as a scalar."""
    lines = [line for line in text.splitlines() if re.search(r"\[[^\]]*\]|0-d|[Aa]ny shape", line)]
    return {word for line in lines for word in re.findall(r"\w+", line)}


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return [finding for path in FILES for finding in findings(path)]


def is_left(finding: Finding) -> bool:
    """Whether the package of a finding isn't rewritten yet."""
    return any(finding.file == p or finding.file.startswith(f"{p}/") for p in LEFT[finding.rule])


@pytest.mark.parametrize("rule", RULES)
def test_docstrings_keep_the_rule(found: list[Finding], rule: str) -> None:
    broken = [str(f) for f in found if f.rule == rule and not is_left(f)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", RULES)
def test_a_listed_package_has_findings(found: list[Finding], rule: str) -> None:
    """Check that each entry is still needed, so that the list can only shrink."""
    needed = [
        p for p in LEFT[rule]
        if any(f.rule == rule and (f.file == p or f.file.startswith(f"{p}/")) for f in found)
    ]  # fmt: skip
    assert tuple(needed) == LEFT[rule]


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice.keys() == SHARED, f"{twice.keys() ^ SHARED}: {twice}"


def test_no_method_is_called_of() -> None:
    methods = [
        str(path.relative_to(ROOT))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "of"
    ]
    assert not [file for file in methods if not file.startswith(CALLED_OF)], methods


def table() -> str:
    """Findings per rule and package, as text; `python -m tests.test_words` prints it."""
    counts = Counter(
        (f.rule, "/".join(f.file.split("/")[: 2 if f.file.startswith("megacpp/") else 1]))
        for path in FILES
        for f in findings(path)
    )
    packages = sorted({package for _, package in counts})
    rows = [f"{'':24}" + "".join(f"{rule:>9}" for rule in RULES)]
    rows += [f"{p:24}" + "".join(f"{counts[rule, p]:9}" for rule in RULES) for p in packages]
    return "\n".join([*rows, f"{'all':24}" + "".join(
        f"{sum(counts[rule, p] for p in packages):9}" for rule in RULES)])  # fmt: skip


# Class names that two files share today, and the rooms with a method `of`.
SHARED: set[str] = set()
CALLED_OF = ("megacpp/memory/",)


if __name__ == "__main__":
    print(table())
