"""Every launch of a Triton kernel has the tensors' device current: Triton launches there."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unguarded(text: str) -> list[int]:
    """Lines of launches `kernel[grid](...)` outside of `with torch.cuda.device_of(...)`.

    A `with` of a function of the file counts if the function returns such a context.
    """
    tree = ast.parse(text)
    guards = {"device_of"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(n, ast.Return) and _calls(n.value, {"device_of"}) for n in node.body)
    }
    return _launches(tree, guards, False)


def _launches(node: ast.AST, guards: set[str], inside: bool) -> list[int]:
    if isinstance(node, ast.With):
        inside = inside or any(_calls(item.context_expr, guards) for item in node.items)
    found = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and not inside:
        found = [node.lineno] * ("kernel" in ast.unparse(node.func.value))
    for child in ast.iter_child_nodes(node):
        found += _launches(child, guards, inside)
    return found


def _calls(node: ast.AST | None, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names


def test_every_launcher_makes_the_device_current() -> None:
    files = [p for room in ("megacpp", "optim", "parallel") for p in (ROOT / room).glob("**/*.py")]
    with_kernels = [p for p in files if "triton.jit" in p.read_text()]
    assert len(with_kernels) >= 3
    for path in files:
        lines = unguarded(path.read_text())
        assert not lines, f"{path.relative_to(ROOT)}: lines {lines} launch on the current device"


def test_a_launch_without_is_seen() -> None:
    plain = "def f(x):\n    _kernel[(1,)](x)\n"
    assert unguarded(plain) == [2]
    assert not unguarded("with torch.cuda.device_of(x):\n    _kernel[(1,)](x)\n")
    function = "def dev(t):\n    return torch.cuda.device_of(t)\n"
    assert not unguarded(function + "with dev(x):\n    _kernel[(1,)](x)\n")
    assert unguarded(function + "with other(x):\n    _kernel[(1,)](x)\n") == [4]
