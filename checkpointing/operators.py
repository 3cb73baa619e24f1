"""What there is to know of an operator, and of the tensors that go in and come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# They give memory, not values: what fills it says what it is.
ALLOCATORS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "new_full"),
}


@dataclass(frozen=True)
class Kind:
    """What is to know of an operator."""

    name: str
    view: bool
    allocates: bool
    writes: tuple[tuple[int, str], ...]  # arguments written to: place and name


@cache
def kind_of(func: Any) -> Kind:
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
    """A subclass around other tensors; a fake tensor is one by itself."""
    return not issubclass(kind, FakeTensor) and is_traceable_wrapper_subclass_type(kind)


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for item in found:
            yield from tensors_in(item)
    elif isinstance(found, dict):
        yield from tensors_in(list(found.values()))


def storages_of(found: Any, seen: set[int]) -> Iterator[int]:
    """Storages of all tensors that hang on an object: documents remember what they made."""
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


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The fused kernels."""
    return sdpa_flop_count(q.shape, *_for_all_heads(q, k, v))


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, *_for_all_heads(q, k, v))


def _for_all_heads(q: Any, k: Any, v: Any) -> Iterator[Sequence[int]]:
    """Shapes of keys and values as every query head reads them: torch 2.11 counts no groups."""
    return ((x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v))


def _added_product_flops(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """In place: total += left @ right, of matrices or of batches of them."""
    return 2 * left.numel() * right.shape[-1]


_aten = torch.ops.aten
_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
# That torch.utils.flop_counter lacks, or has for as many heads of keys as of queries.
OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.addmm_: _added_product_flops,
    _aten.baddbmm_: _added_product_flops,
    **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention_flops for name in _ATTENTION},
    **{
        getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flops
        for name in _ATTENTION
    },
}


def formula_of(func: Any) -> Callable[..., int] | None:
    """FLOPs of an operator from its arguments and `out_val`; None: it has none to speak of."""
    packet = func._overloadpacket
    return OWN_FORMULAS.get(packet) or flop_registry.get(packet)
