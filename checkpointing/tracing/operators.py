"""Properties of an operator's schema, and of the tensors that go in and come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

# They return memory, not values; the operator that writes it names the allocation.
ALLOCATORS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "new_full"),
}
# They launch no kernel. Zeros and the like do.
NO_KERNEL = {name for name in ALLOCATORS if "empty" in name} | {"_unsafe_view"}


@dataclass(frozen=True)
class Kind:
    """Properties of an operator: whether it returns views, allocates without values, or writes."""

    name: str
    view: bool
    allocates: bool
    writes: tuple[tuple[int, str], ...]  # arguments written to: place and name

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments of a call that it writes to."""
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]


@cache
def kind_of(func: Any) -> Kind:
    """Return the properties of an ATen operator, from its schema."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    writes = tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info and a.alias_info.is_write
    )
    views = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    tensorless = not any("Tensor" in str(r.type) for r in schema.returns) and not writes
    return Kind(name, (views and not writes) or tensorless, name in ALLOCATORS, writes)


@cache
def wraps(kind: type) -> bool:
    """Return whether a tensor class wraps other tensors; a fake tensor does not."""
    return not issubclass(kind, FakeTensor) and is_traceable_wrapper_subclass_type(kind)


def tensors_in(found: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(found, Tensor):
        return [found]
    tensors: list[Tensor] = []
    if isinstance(found, tuple | list | dict):
        for item in list(found.values()) if isinstance(found, dict) else found:
            if isinstance(item, Tensor):
                tensors.append(item)
            elif isinstance(item, tuple | list | dict):
                tensors += tensors_in(item)
    return tensors


def storages_of(found: Any, seen: set[int]) -> Iterator[int]:
    """Yield the storages of all tensors that an object refers to, memos of documents included."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, Tensor):
        yield id(found.untyped_storage())
    elif isinstance(found, tuple | list):
        for item in found:
            yield from storages_of(item, seen)
    elif isinstance(found, dict) or dataclasses.is_dataclass(found):
        values = found if isinstance(found, dict) else vars(found)
        for item in list(values.values()):
            yield from storages_of(item, seen)
