"""Remembered shapes of results: those that torch works out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from parallel.simulate.shapes import ResultShapes

aten = torch.ops.aten


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return operators with arguments; the same names take other tensors at each call."""
    x, y, whole = given(4, 6), given(6), given(4, 6, dtype=torch.int64)
    turned, wide = given(6, 4).t(), given(4, 1).expand(4, 6)
    half = given(4, 6, dtype=torch.bfloat16)
    return {
        "add": (aten.add.Tensor, (x, y), {}),
        "add, turned": (aten.add.Tensor, (turned, turned), {}),
        "add, turned and not": (aten.add.Tensor, (turned, x), {}),
        "add, of two types": (aten.add.Tensor, (half, x), {"alpha": 2}),
        "multiply by a whole number": (aten.mul.Tensor, (whole, 1), {}),
        "multiply by a fraction": (aten.mul.Tensor, (whole, 1.0), {}),
        "multiply by a truth value": (aten.mul.Tensor, (whole, True), {}),
        "like an expanded one": (aten.empty_like.default, (wide,), {}),
        "clone of a part": (aten.clone.default, (x[1:3],), {}),
        "clone, contiguous": (
            aten.clone.default,
            (turned,),
            {"memory_format": torch.contiguous_format},
        ),
        "to bf16": (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
        "in place": (aten.add_.Tensor, (x, y), {}),
        "to a result": (aten.mul.out, (x, y), {"out": given(4, 6)}),
        "in a part": (aten.copy_.default, (x[:, 2:], half[:, 2:]), {}),
        "two results": (aten.topk.default, (x, 2), {}),
        "list": (aten.unbind_copy.int, (x,), {}),
        "cat": (aten.cat.default, ([x, turned], 1), {}),
        "view": (aten.view.default, (x, [24]), {}),
        "turn in place": (aten.t_.default, (given(3, 4),), {}),
        "grow in place": (aten.resize_.default, (given(3), [5, 2]), {}),
        "without tensors": (aten.arange.default, (7,), {"device": torch.device("meta")}),
        "of real values": (aten.add.Tensor, (torch.ones(2), 1), {}),
        "product": (aten.mm.default, (x, given(6, 5)), {}),
    }


def look(one: Any, arguments: list[Tensor]) -> Any:
    """Return all that a trace sees of a result; its storage's number among the arguments."""
    if not isinstance(one, Tensor):
        return one
    storage = one.untyped_storage()
    owners = [a.untyped_storage()._cdata for a in arguments]
    shared = owners.index(storage._cdata) if storage._cdata in owners else None
    same = next((i for i, a in enumerate(arguments) if a is one), None)
    layout = one.shape, one.stride(), one.storage_offset(), storage.nbytes()
    return layout, one.dtype, one.device, shared, same


@pytest.mark.parametrize("name", [*operands()])
def test_a_remembered_result_is_that_of_torch(name: str) -> None:
    shapes, seen = ResultShapes(), []
    results: list[Tensor] = []
    for run in (lambda op, args, kwargs: op(*args, **kwargs), shapes.run, shapes.run, shapes.run):
        op, args, kwargs = operands()[name]
        out = run(op, args, kwargs)
        arguments = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        found = pytree.tree_map(lambda one, arguments=arguments: look(one, arguments), out)
        seen.append((type(out), found, look(arguments[0], []) if arguments else None))
        results += [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    assert all(one == seen[0] for one in seen), seen
    assert len({t.untyped_storage()._cdata for t in results}) == len(results), "shared results"


def test_what_is_remembered_does_not_run_again() -> None:
    shapes, calls = ResultShapes(), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return aten.add.Tensor(*args, **kwargs)

    counted.namespace, counted.tags = "aten", aten.add.Tensor.tags  # type: ignore[attr-defined]
    counted._schema = aten.add.Tensor._schema  # type: ignore[attr-defined]
    for rows in (2, 2, 3, 3, 2):
        assert shapes.run(counted, (given(rows, 6), given(6)), {}).shape == (rows, 6)
    assert len(calls) == 2
    torch.set_default_dtype(torch.float64)
    try:
        assert shapes.run(counted, (given(2, dtype=torch.int64), 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert shapes.run(counted, (given(2, dtype=torch.int64), 1.0), {}).dtype == torch.float32
