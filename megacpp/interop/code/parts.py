"""Definitions of a module's source, and the names that each part of one uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

PACKAGE = "megacpp."
RECORD = "BlockKind"  # fields of it that nothing reads are left out, with their values
Key = tuple[str, str]  # module, name in it
Scope = dict[str, Key | None]  # local name -> what a function imports under it


@dataclass
class CodePart:
    """CodePart of a definition that is reached by itself: a method, or a field of a record.

    Attributes:
        lines: first and last, from 1.
        names: nodes that name something of the module, or what a function imports.
        hints: nodes of annotations that do.
        attributes: names of attributes that are read.
        imports: statements that import from this package.
    """

    lines: tuple[int, int]
    names: list[tuple[ast.Name, Key | None]] = field(default_factory=list)
    hints: list[ast.Name] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    imports: list[ast.ImportFrom] = field(default_factory=list)

    @property
    def needs(self) -> set[tuple[str, Key | None]]:
        """Names that must exist when the part runs."""
        return {(node.id, there) for node, there in self.names}


@dataclass
class Definition:
    """Function, class or value of a module: what it always needs, and its parts by name."""

    whole: CodePart
    parts: dict[str, CodePart] = field(default_factory=dict)


def read_definitions(text: str) -> dict[str, Definition]:
    """Return the functions, classes and values of a module by name."""
    found, lines = {}, text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            # Functions `_` register something with what their decorator names.
            name = f"_ {node.lineno}" if node.name == "_" else node.name
            found[name] = _definition(node, lines)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for name in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(name, ast.Name):
                    found[name.id] = _definition(node, lines)
    return found


def imported(text: str) -> Iterator[tuple[dict[str, Key], bool]]:
    """Yield what each import at the top gives, and whether it is made when the module runs."""
    for node in ast.parse(text).body:
        for one in node.body if isinstance(node, ast.If) else (node,):
            if isinstance(one, ast.Import | ast.ImportFrom):
                yield _given(one), one is node


def _given(node: ast.Import | ast.ImportFrom) -> dict[str, Key]:
    if isinstance(node, ast.Import):
        return {x.asname or x.name.partition(".")[0]: (x.name, "") for x in node.names}
    return {x.asname or x.name: (node.module or "", x.name) for x in node.names}


def _definition(node: ast.stmt, lines: list[str]) -> Definition:
    found = Definition(CodePart(_span(node, lines)))
    names = _Names(found.whole)
    value = getattr(node, "value", None)
    if isinstance(node, ast.ClassDef):
        for outer in (*node.decorator_list, *node.bases, *node.keywords):
            names.visit(outer)
        inside = [x for inner in node.body for x in ast.walk(inner)]
        stored = {name for x in inside if (name := _stored(x))}
        rest = _Names(found.whole, dict.fromkeys(stored))
        for inner in node.body:
            title = getattr(inner, "name", "")
            if node.name == RECORD and isinstance(inner, ast.AnnAssign):
                title = getattr(inner.target, "id", "")
            if title:
                assert title not in found.parts, (node.name, title)
                found.parts[title] = CodePart(_span(inner, lines))
                _Names(found.parts[title]).visit(inner)
            else:
                rest.visit(inner)
    elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == RECORD:
        names.visit(value.func)
        for word in value.keywords:
            found.parts[str(word.arg)] = part = CodePart(_span(word, lines))
            _Names(part).visit(word.value)
    else:
        names.visit(node)
    return found


def _stored(node: ast.AST) -> str:
    """Return the name that a node binds, if any."""
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def _span(node: ast.stmt | ast.keyword, lines: list[str]) -> tuple[int, int]:
    """Return the lines of a definition, with its decorators and the comments above it."""
    first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].strip().startswith("#"):
        first -= 1
    return first, node.end_lineno or first


class _Names(ast.NodeVisitor):
    """Finds the names that a part uses and doesn't bind itself."""

    def __init__(self, part: CodePart, own: Scope | None = None) -> None:
        self.part, self.scopes = part, [own or {}]

    def visit_Name(self, node: ast.Name) -> None:
        """Note a name that no function around it binds."""
        there = self._bound(node.id)
        if there != ("", ""):
            self.part.names.append((node, there))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note the name of an attribute."""
        self.part.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note an attribute that is read by its name as text."""
        if getattr(node.func, "id", "") in ("getattr", "hasattr"):
            self.part.attributes |= {str(x.value) for x in node.args if isinstance(x, ast.Constant)}
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note an import from this package, within a function."""
        if (node.module or "").startswith(PACKAGE):
            self.part.imports.append(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Note an annotation, and the value."""
        self._hint(node.annotation)
        if self.scopes == [{}] or not isinstance(node.target, ast.Name):
            self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note what a function uses; its own names are local."""
        a = node.args
        every = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
        for outer in (*node.decorator_list, *a.defaults, *filter(None, a.kw_defaults)):
            self.visit(outer)
        for hint in (node.returns, *(x.annotation for x in every if x is not None)):
            if hint is not None:
                self._hint(hint)
        self.scopes.append({x.arg: None for x in every if x is not None} | _locals(node.body))
        for inner in node.body:
            self.visit(inner)
        self.scopes.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Note what a lambda uses."""
        for default in node.args.defaults:
            self.visit(default)
        self.scopes.append({x.arg: None for x in ast.walk(node.args) if isinstance(x, ast.arg)})
        self.visit(node.body)
        self.scopes.pop()

    def _bound(self, name: str) -> Key | None:
        """Return what a name is by an import around it, None: global, ("", ""): local."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name] or ("", "")
        return None

    def _hint(self, node: ast.expr) -> None:
        names = (x for x in ast.walk(node) if isinstance(x, ast.Name))
        self.part.hints += [x for x in names if self._bound(x.id) is None]


def _locals(body: list[ast.stmt]) -> Scope:
    """Return the names that a function binds, comprehensions included, functions within apart."""
    found: Scope = {}
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found |= _given(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= dict.fromkeys(_given(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            found[node.name or ""] = None
        elif name := _stored(node):
            found[name] = None
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found
