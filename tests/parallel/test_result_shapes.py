"""Remembered shapes of results: those that torch works out."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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
        "add, straight": (aten.add.Tensor, (x, x), {}),
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
        "at indices": (aten.index.Tensor, (x, [None, whole[0]]), {}),
        "view that the schema hides": (aten._unsafe_view.default, (x, [24]), {}),
        "view": (aten.view.default, (x, [24]), {}),
        "turn in place": (aten.t_.default, (given(3, 4),), {}),
        "grow in place": (aten.resize_.default, (given(3), [5, 2]), {}),
        "without tensors": (aten.arange.default, (7,), {"device": torch.device("meta")}),
        "of no values": (aten.add.Tensor, (given(2), 1), {}),
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
    layout = one.shape, one.stride(), one.storage_offset(), storage.nbytes(), one.is_conj()
    return layout, one.dtype, one.device, shared, same


def seen(run: Any, name: str) -> tuple[Any, list[Tensor]]:
    """Return all that a trace sees after an operator ran, and the results."""
    op, args, kwargs = operands()[name]
    out = run(op, args, kwargs)
    arguments = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    found = pytree.tree_map(lambda one: look(one, arguments), out)
    after = [look(one, []) for one in arguments]
    return (type(out), found, after), [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]


@pytest.mark.parametrize("order", [1, -1])
def test_remembered_results_are_those_of_torch(order: int) -> None:
    """One memory for all of them, in two orders: none takes another's result."""
    shapes, results = ResultShapes(), []
    for _ in range(3):
        for name in [*operands()][::order]:
            wanted, _ = seen(lambda op, args, kwargs: op(*args, **kwargs), name)
            found, tensors = seen(shapes.run, name)
            assert found == wanted, name
            results += tensors
    assert len({t.untyped_storage()._cdata for t in results}) == len(results), "shared results"


def operator(call: Any) -> Any:
    """Return a function as an operator that claims to return new tensors."""
    call.namespace, call._schema = "aten", aten.add.Tensor._schema
    return call


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.empty(9, device="meta")[3:],
        lambda x: torch.empty(9, device="meta")[:6],
        lambda x: torch.empty(8, device="meta").split(8) * 2,
        lambda x: (x, x.new_empty(3)),
    ],
    ids=["a later part", "a first part", "one twice", "an argument"],
)
def test_what_is_no_tensor_of_its_own_is_run_again(call: Any) -> None:
    calls: list[int] = []
    counted = operator(lambda x: (calls.append(1), call(x))[1])
    shapes = ResultShapes()
    for _ in range(3):
        shapes.run(counted, (given(4),), {})
    assert len(calls) == 3


def fake_calls(device: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Return operators with arguments, in an order in which one could take another's result."""
    x, turning = torch.empty(4, 6, dtype=dtype, device=device), torch.empty(2, 3).to(torch.cfloat)
    three, unknown = torch.tensor(3.0), torch.empty(())
    return [
        (aten.add.Tensor, x.t(), x.t()),
        (aten.topk.default, x, 2),
        (aten.add_.Tensor, x, x),
        (aten.view.default, x, [24]),
        (aten.slice.Tensor, x.narrow(1, 0, 5), 1, 2, 5),
        (aten.slice.Tensor, x.narrow(1, 1, 5), 1, 2, 5),
        (aten.t.default, x),
        (aten.detach.default, three),
        (aten.view.dtype, x, torch.int16),
        (aten._conj.default, turning.conj()),
        (aten._conj.default, turning),
        (aten.t.default, turning.conj()),
        (aten.mul.Tensor, unknown, unknown),
        (aten.mul.Tensor, three, three),
    ]


def test_remembered_fake_tensors_are_those_of_torch() -> None:
    """A fake tensor reports the device that it stands for; one that is known to be 3.0 is run."""
    shapes, fake = ResultShapes(), FakeTensorMode()
    for device, dtype in 3 * [*product(("cpu", "cuda"), (torch.float32, torch.bfloat16))]:
        with fake:
            for op, *args in fake_calls(device, dtype):
                arguments: list[Any] = args[:1]
                wanted = pytree.tree_leaves(op(*args))
                found = pytree.tree_leaves(shapes.run(op, tuple(args), {}, fake))
                for one, other in zip(found, wanted, strict=True):
                    assert look(one, arguments) == look(other, arguments), op
                    assert (one.constant is None) == (other.constant is None), op


def test_what_is_remembered_does_not_run_again() -> None:
    shapes, calls = ResultShapes(), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return aten.add.Tensor(*args, **kwargs)

    operator(counted)
    for rows in (2, 2, 3, 3, 2):
        assert shapes.run(counted, (given(rows, 6), given(6)), {}).shape == (rows, 6)
    assert len(calls) == 2
    torch.set_default_dtype(torch.float64)
    try:
        assert shapes.run(counted, (given(2, dtype=torch.int64), 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert shapes.run(counted, (given(2, dtype=torch.int64), 1.0), {}).dtype == torch.float32
