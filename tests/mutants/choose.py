"""Tests that could find a fault: those that name what is changed, those of a table, importers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

TOP = ("tests", "megacpp", "parallel", "optim", "checkpointing", "bench")
WIRING = "tests/wiring/test_wiring.py"
# Tests that come first, by the beginning of a file's path; the longest that fits counts. They find
# most faults in seconds, and some are of modules that no test imports. Those of a file itself come
# before the test file that has its name.
FIRST = {
    "train.py": f"{WIRING} tests/run/test_rewind.py tests/test_run.py tests/run/test_tasks.py",
    "parallel/": f"{WIRING}",
    "parallel/context/": "tests/parallel/test_context_mamba3.py"
    f" tests/parallel/test_context_m2rnn.py tests/parallel/test_context_attention.py {WIRING}",
    "parallel/notation.py": "tests/parallel/test_explain.py",
    "parallel/plans.py": f"tests/parallel/test_explain.py tests/parallel/test_tensor.py {WIRING}",
    "parallel/simulate/": "tests/parallel/test_dry_run.py tests/memory/test_gpu_kernels.py"
    " tests/memory/test_trace.py tests/parallel/test_result_shapes.py",
    "parallel/simulate/library_stand_ins.py": "tests/parallel/test_stand_ins.py",
    "parallel/fsdp.py": "tests/parallel/test_collective_counts.py"
    f" tests/parallel/test_expert_units.py {WIRING}",
    "optim/": f"{WIRING}",
    "megacpp/state/": "tests/state/test_sound.py tests/state/test_damage.py"
    " tests/state/test_training.py tests/state/test_checkpoint.py tests/state/test_sparse_stages.py"
    f" {WIRING} tests/run/test_adamw_state.py tests/state/test_crash.py",
    "megacpp/state/remote.py": "tests/run/test_remote_run.py",
    "megacpp/launch/": f"{WIRING}",
    "megacpp/launch/trial.py": "tests/run/test_fit.py",
    "megacpp/launch/auto_fit.py": "tests/run/test_fit.py",
    "megacpp/launch/start.py": f"{WIRING} tests/test_run.py tests/run/test_remote_run.py",
    "megacpp/run/": f"{WIRING}",
    "megacpp/run/evaluate.py": f"{WIRING} tests/run/test_mixture.py",
    "megacpp/run/flight.py": "tests/run/test_hang.py",
    "megacpp/run/oom.py": "tests/run/test_forensics.py",
    "megacpp/run/harness.py": "tests/interop/test_eval.py tests/run/test_tasks.py",
    "megacpp/run/likelihood.py": "tests/run/test_tasks.py",
    "megacpp/run/records.py": f"{WIRING} tests/test_run.py",
    "megacpp/memory/": "",
    "megacpp/data/": f"{WIRING}",
    "checkpointing/": "",
    "megacpp/model/": f"{WIRING}",
    "megacpp/blocks/": f"{WIRING}",
}
# Files that run last, whatever they import: minutes, or a GPU.
NEVER = ("tests/gpu/", "tests/torture/", "tests/mutants/", "tests/docs/", "tests/test_house.py")
UNKNOWN_S = 15.0
MOST = 8
NAMING = 3  # files that name what is changed
COMMON = 12  # a name that more files have says nothing


class FileChoice:
    """Which test files run for a changed file, the cheapest first.

    Args:
        root: top folder of the checkout.
        costs: seconds of test files, as far as they are known.
    """

    def __init__(self, root: Path, costs: Mapping[str, float]) -> None:
        self.root, self.costs = root, costs

    def files(self, changed: str, line: int = 0) -> list[str]:
        """Return the test files for a changed line, in the order in which they should run.

        Args:
            changed: path below the top folder.
            line: number of the line; 0 is in no function.
        """
        prefix = max((p for p in FIRST if changed.startswith(p)), key=len, default="")
        first = FIRST.get(prefix, "").split()
        direct = sorted(self.importers(_module(Path(changed))), key=lambda f: (self.cost(f), f))
        own = self._own(changed)
        near = self._naming(changed, line)
        named = [*first, *own, *near] if prefix == changed else [*own, *near, *first]
        return list(dict.fromkeys([*named, *direct]))[:MOST]

    def cost(self, file: str) -> float:
        """Return the seconds of a test file; a guess until it has run."""
        return self.costs.get(file, UNKNOWN_S)

    def importers(self, module: str) -> set[str]:
        """Return the test files that import a module, themselves or by a helper of theirs."""
        found, new = {module}, [module]
        while new:
            for user in self._users[new.pop()] - found:
                if user.startswith("tests."):
                    found.add(user)
                    new.append(user)
        files = {str(self._files[name]) for name in found if ".test_" in name}
        return {file for file in files if not file.startswith(NEVER)}

    def _own(self, changed: str) -> list[str]:
        """Return the test file that has the name of the changed one, if there is one."""
        name = f"test_{Path(changed).stem}.py"
        rooms = [Path(changed).parent.name, Path(changed).parts[0], ""]
        paths = [Path("tests", room, name) for room in dict.fromkeys(rooms)]
        return [str(path) for path in paths if (self.root / path).exists()][:1]

    def _naming(self, changed: str, line: int) -> list[str]:
        """Return test files that name a function or class around a line; rare names count most."""
        names = around(self._text(changed), line)
        users = {
            name: [f for f, text in self._tests.items() if re.search(rf"\b{name}\b", text)]
            for name in names
        }
        weight: dict[str, float] = defaultdict(float)
        for files in users.values():
            for file in files if len(files) <= COMMON else ():
                weight[file] += 1 / len(files)
        return sorted(weight, key=lambda f: (-weight[f], self.cost(f), f))[:NAMING]

    def _text(self, changed: str) -> str:
        return (self.root / changed).read_text()

    @cached_property
    def _tests(self) -> dict[str, str]:
        """Texts of test files that may run."""
        paths = (str(p.relative_to(self.root)) for p in (self.root / "tests").rglob("test_*.py"))
        return {path: self._text(path) for path in sorted(paths) if not path.startswith(NEVER)}

    @cached_property
    def _files(self) -> dict[str, Path]:
        paths = [p for top in TOP for p in (self.root / top).rglob("*.py")]
        paths = [p.relative_to(self.root) for p in [*paths, self.root / "train.py"]]
        return {_module(path): path for path in paths}

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        """Return who imports a module, by its name."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, path in self._files.items():
            for node in ast.walk(ast.parse((self.root / path).read_text())):
                for used in _imports(node):
                    users[used].add(name)
        return users


def around(text: str, line: int) -> set[str]:
    """Return names of the functions and classes around a line that a test can use.

    A private function stands for the public ones of its file that use it.
    """
    blocks = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    new = [b for b in blocks if b.lineno <= line <= (b.end_lineno or b.lineno)]
    found = set(new)
    while new:
        block = new.pop()
        if block.name.startswith("_"):
            users = {b for b in blocks if b not in found and _uses(b, block.name)}
            found |= users
            new += users
    return {block.name for block in found if not block.name.startswith("_")}


def _uses(block: ast.AST, name: str) -> bool:
    """Whether a function or class reads a name, or an attribute of this name."""
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.Attribute) and node.attr == name)
        for node in ast.walk(block)
    )


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []
