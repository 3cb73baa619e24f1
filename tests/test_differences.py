"""A comparison that fails on every value that isn't finite, and that no test goes around it."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megacpp.model.init import Slice
from tests.differences import largest, relative
from tests.parallel.parity import Slices, error

ROOT = Path(__file__).parents[1]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_value_that_is_not_finite_is_the_largest(bad: float, at: int) -> None:
    values = [0.0, 1e-16, 2.0]
    values[at] = bad
    assert largest(values) == INF
    with pytest.raises(ValueError):
        largest([])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["got", "want", "both"])
def test_tensors_with_a_value_that_is_not_finite_differ(bad: float, side: str) -> None:
    one = torch.tensor([1.0, 2.0])
    other = torch.tensor([1.0, bad])
    got, want = {"got": (other, one), "want": (one, other), "both": (other, other)}[side]
    assert relative(got, want) == INF


def test_differences_by_hand() -> None:
    zero, one = torch.zeros(2), torch.tensor([1.0, -4.0])
    assert relative(one, one) == relative(zero, zero) == relative(one[:0], one[:0]) == 0
    assert relative(one + torch.tensor([0.0, 1.0]), one) == 0.25
    assert relative(one[:1] + 1, one[:1], one) == 0.25
    assert relative(one, zero) == INF
    with pytest.raises(AssertionError):
        relative(one, one[:1])


@pytest.mark.parametrize("first", ["sound", "bad"])
def test_parity_of_meshes_sees_a_nan_in_any_tensor(first: str) -> None:
    """The worst of several tensors, wherever the NaN is among them."""

    def slices(values: dict[str, list[float]]) -> Slices:
        return {n: Slice(torch.tensor(v), (2,), (0,)) for n, v in values.items()}

    names = ["sound", "bad"] if first == "sound" else ["bad", "sound"]
    found = slices({n: [1.0, NAN] if n == "bad" else [1.0, 2.5] for n in names})
    expected = slices({n: [1.0, 2.0] for n in names})
    assert error(found, expected) == (INF, "bad")
    assert error(expected, expected) == (0.0, "")


def test_no_program_takes_a_maximum_that_may_lose_a_nan() -> None:
    """`max` over differences of tensors; `largest` and `Tensor.max` keep NaN."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for room in ("tests", "bench", "megacpp", "parallel", "optim", "checkpointing")
        for path in sorted((ROOT / room).rglob("*.py"))
        for line in maxima_of_differences(ast.parse(path.read_text()))
    ]
    assert not found


def test_the_search_finds_what_it_is_for() -> None:
    for text in (
        "max((a - b).abs().max().item() for a, b in pairs)",
        "max([float((a - b).norm()) for a, b in pairs], default=0.0)",
        "worst = max(worst, (a - b).abs().max().item())",
    ):
        assert list(maxima_of_differences(ast.parse(text))) == [1], text
    for text in ("(a - b).abs().max()", "max(map(len, x))", "2 * max(1.0, b.abs().max().item())"):
        assert not list(maxima_of_differences(ast.parse(text))), text


def maxima_of_differences(tree: ast.AST) -> Iterator[int]:
    """Yield the line of every call of Python's `max` over a difference's size."""
    for node in ast.walk(tree):
        of_max = isinstance(node, ast.Call) and ast.unparse(node.func) == "max"
        if of_max and any(map(is_size_of_difference, ast.walk(node))):
            yield node.lineno


def is_size_of_difference(node: ast.AST) -> bool:
    """Whether this is `(... - ...).abs()` or `.norm()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("abs", "norm")
        and isinstance(node.func.value, ast.BinOp)
        and isinstance(node.func.value.op, ast.Sub)
    )
