"""Joins a module and everything of this package that it needs into one file; runs no code of them.

Definitions are reached from a root module by the names that they use. A method is reached if an
attribute of its name is read anywhere, so training's methods stay out. Text is copied as it stands,
comments included; only names that two modules use differently are changed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path

from megacpp.interop.code.parts import CodePart, Definition, Key, imported, read_definitions

PACKAGE = "megacpp."
ALWAYS = {"forward", "backward", "_apply"}  # torch calls them


@dataclass
class Module:
    """Text of a module, its definitions and imports.

    Attributes:
        lines: of the text.
        definitions: by name.
        imports: name here -> module and name there (empty: the module itself).
        needs: modules that are imported when it runs.
    """

    lines: list[str]
    definitions: dict[str, Definition]
    imports: dict[str, Key] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)

    def knows(self, name: str) -> bool:
        """Return whether a name is defined or imported."""
        return name in self.definitions or name in self.imports


@cache
def read_module(name: str) -> Module:
    """Return the definitions of a module from its source."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    text = Path(spec.origin).read_text(encoding="utf-8")
    module = Module(text.splitlines(), read_definitions(text))
    for node, runs in imported(text):
        module.imports |= node
        module.needs += [there for there, _ in node.values() if runs]
    return module


@dataclass
class Bundle:
    """Definitions that a root module reaches, and the file that they make.

    Attributes:
        absent: modules, or `module:name`, that are never run: their names are None in the file.
        given: `module:name` -> text of the definition in place of its own.
        cut: `module:Class.method` that are left out.
        beside: modules that become a file beside this one -> its name.
    """

    root: str
    absent: Collection[str] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    cut: Collection[str] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    reached: dict[Key, None] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    external: dict[str, Key] = field(default_factory=lambda: {"Any": ("typing", "Any")})
    missing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in read_module(self.root).definitions:
            self._reach((self.root, name), name)
        size = -1
        while size != (size := len(self.reached) + len(self.attributes)):
            for module in dict.fromkeys(module for module, _ in self.reached):
                for name, one in read_module(module).definitions.items():
                    if name.startswith("_ ") and (module, one.whole.names[0][0].id) in self.reached:
                        self.reached.setdefault((module, name))
            for key in list(self.reached):
                for part in self._parts(key):
                    self.attributes |= part.attributes
                    for name, there in sorted(part.needs, key=str):
                        if there or read_module(key[0]).knows(name):
                            self._reach(there or (key[0], name), name)

    def text(self) -> str:
        """Return the text of the file: imports, then every definition behind those it needs."""
        names, parts = self._names(), []
        for module in self._order():
            own = [name for name in read_module(module).definitions if (module, name) in names]
            if own:
                parts.append(f"# ---- {module} {'-' * (93 - len(module))}")
                parts += dict.fromkeys(self._rendered((module, name), names) for name in own)
        hints = {name for key in self.reached for name in self._hints(key)}
        types = sorted(hints - set(names.values()) - self.external.keys() - self.missing)
        groups = [sorted(set(self._imports()))]
        if self.missing:
            none = [f"{name} = None" for name in sorted(self.missing)]
            groups.append(["# Parts that this model hasn't.", *none])
        if types:
            groups.append(["# Types of annotations.", *(f"{name} = Any" for name in types)])
        head = "\n\n".join("\n".join(lines) for lines in groups)
        return "\n\n\n".join([head, *parts]) + "\n"

    # ---- reach ----------------------------------------------------------------------------------

    def _reach(self, key: Key, local: str) -> None:
        module, name = self._resolved(key)
        if not module.startswith(PACKAGE) or module in self.beside:
            assert self.external.setdefault(local, (module, name)) == (module, name), key
        elif module in self.absent or f"{module}:{name}" in self.absent:
            self.missing.add(local)
        else:
            assert name, f"{key}: name what is used of a module"
            self.reached.setdefault((module, name))

    def _resolved(self, key: Key) -> Key:
        """Return where a name of a module is defined."""
        module, name = key
        while module.startswith(PACKAGE) and name not in read_module(module).definitions:
            there = read_module(module).imports
            if name not in there:
                return f"{module}.{name}", ""  # a module itself
            module, name = there[name]
        return module, name

    def _definition(self, key: Key) -> tuple[Definition, list[str]]:
        if (text := self.given.get(":".join(key))) is not None:
            return read_definitions(text)[key[1]], text.splitlines()
        module = read_module(key[0])
        return module.definitions[key[1]], module.lines

    def _parts(self, key: Key) -> Iterator[CodePart]:
        """Yield the parts of a definition that are reached."""
        one, _ = self._definition(key)
        yield one.whole
        yield from (part for name, part in one.parts.items() if self._keeps(key, name))

    def _keeps(self, key: Key, part: str) -> bool:
        if f"{key[0]}:{key[1]}.{part}" in self.cut:
            return False
        called = part in self.attributes or part in ALWAYS or part.startswith("__")
        return called or key[0] == self.root

    # ---- text -----------------------------------------------------------------------------------

    def _names(self) -> dict[Key, str]:
        """Return the name of each definition in the file: its own, unless another has it."""
        found: dict[Key, str] = {}
        taken = {*self.external, *self.missing}
        for module, name in self.reached:
            new, words = name, module.split(".")
            while new in taken:
                new = f"{new}_{words.pop()}"
            taken.add(new)
            found[module, name] = new
        return found

    def _order(self) -> list[str]:
        """Return modules, each behind those that it imports."""
        found: dict[str, None] = {}
        entered: set[str] = set()

        def visit(module: str) -> None:
            if module.startswith(PACKAGE) and module not in entered:
                entered.add(module)
                for name in read_module(module).needs:
                    visit(name)
                found[module] = None

        for module in dict.fromkeys([*(module for module, _ in self.reached), self.root]):
            visit(module)
        return list(found)

    def _hints(self, key: Key) -> Iterator[str]:
        """Yield names of this package in annotations; those of others get their import."""
        for part in self._parts(key):
            for node in part.hints:
                if read_module(key[0]).knows(node.id):
                    if self._resolved((key[0], node.id))[0].startswith(PACKAGE):
                        yield node.id
                    else:
                        self._reach((key[0], node.id), node.id)

    def _imports(self) -> Iterator[str]:
        for name, (module, there) in self.external.items():
            known = "" if name in (there, module) else f" as {name}"
            where = self.beside.get(module, module)
            yield f"from {where} import {there}{known}" if there else f"import {module}{known}"

    def _rendered(self, key: Key, names: Mapping[Key, str]) -> str:
        """Return the text of a definition, without what isn't reached, names changed."""
        one, text = self._definition(key)
        lines, (first, last) = list(text), one.whole.lines
        dropped = [part.lines for name, part in one.parts.items() if not self._keeps(key, name)]
        gone = {n for start, end in dropped for n in range(start, end + 1)}
        edits = []
        for part in self._parts(key):
            for node, there in (*part.names, *((hint, None) for hint in part.hints)):
                if there or read_module(key[0]).knows(node.id):
                    new = names.get(self._resolved(there or (key[0], node.id)), node.id)
                    edits += [(node.lineno, node.col_offset, node.id, new)] * (new != node.id)
            for node in part.imports:
                gone |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
                lines[node.lineno - 1] = " " * node.col_offset + "pass"
        for number, column, old, new in sorted(set(edits), reverse=True):
            line = lines[number - 1].encode()
            assert line[column:].startswith(old.encode()), (key, number, old)
            after = line[column + len(old.encode()) :]
            lines[number - 1] = (line[:column] + new.encode() + after).decode()
        kept = "\n".join(lines[n - 1] for n in range(first, last + 1) if n not in gone)
        if names[key] != key[1]:
            kept = re.sub(rf"^(def|class) {key[1]}\b", rf"\1 {names[key]}", kept, flags=re.M)
        return _one_blank(kept.rstrip())


def _one_blank(text: str) -> str:
    """Return a text without several empty lines in a row."""
    lines = text.split("\n")
    return "\n".join(
        line for empty, run in groupby(lines, lambda x: not x) for line in ([""] if empty else run)
    )
