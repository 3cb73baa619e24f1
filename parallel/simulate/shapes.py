"""Shapes of results without values, worked out once for each shape of the arguments.

Torch works them out in Python, in 100 to 900 microseconds an operator; a trace asks for the same
ones hundreds of times, and a remembered one takes about 10 on the meta device, 40 as a fake tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree

# Size, strides, dtype and device of a new tensor, alone in its storage.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
# One result; several, in a tuple or list; true: the first argument; false: the operator must run.
Known = Layout | tuple[type, list[Layout | None]] | bool
_PLAIN = {type(None), int, float, bool, str, torch.dtype, torch.device, torch.layout}
_PLAIN.add(torch.memory_format)
_WIDE_SUM = torch.ops.aten.addmm.dtype_out  # torch 2.11 can't work out what it returns: its `out`


class ResultShapes:
    """Memory of what operators return for arguments of given shapes."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}
        # Size, strides and offset of views of fake tensors; false: the operator must run.
        self._views: dict[Any, Any] = {}

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fake: FakeTensorMode | None = None,
    ) -> Any:
        """Return what an operator returns; run it where that isn't known.

        Args:
            func: operator; without values none returns shapes that depend on them.
            args: of it, on the meta device, or fake.
            kwargs: of it.
            fake: mode in which tensors are fake.
        """
        if not _told_by_shapes(func):
            if fake is None or not _is_view(func):
                return func(*args, **kwargs)
            return self._view(func, args, kwargs, fake)
        try:
            words = _key(tuple(kwargs.items())) if kwargs else ()
            key = func, _key(args), words, torch.get_default_dtype()
        except TypeError:
            return func(*args, **kwargs)
        known = func is _WIDE_SUM or self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            self._known[key] = _known(out, args, kwargs, key[1:3])
            return out
        if known is True:
            return kwargs["out"] if "out" in kwargs else args[0]
        if known is False:
            return func(*args, **kwargs)
        if len(known) == 2:
            kind, layouts = known
            return kind(None if one is None else _made(one, fake) for one in layouts)
        return _made(known, fake)

    def _view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake: FakeTensorMode
    ) -> Any:
        """Return a view of a fake tensor; the meta device makes its own as fast as any other."""
        given = args[0]
        try:
            key = func, _key(args), _key(tuple(kwargs.items())), given.storage_offset()
        except TypeError:
            return func(*args, **kwargs)
        known = False if given.is_conj() or given.is_neg() else self._views.get(key)
        if known is None:
            out = func(*args, **kwargs)
            known = False
            if out.dtype == given.dtype and not (out.is_conj() or out.is_neg()):
                known = out.shape, out.stride(), out.storage_offset()
            self._views[key] = known
            return out
        if known is False:
            return func(*args, **kwargs)
        with in_kernel_invocation_manager(fake):
            elem = given.as_strided(*known)
        return FakeTensor(fake, elem, given.fake_device)


@cache
def _is_view(func: Any) -> bool:
    """Return whether the result is one tensor in the memory of the first argument."""
    if func.namespace != "aten" or len(func._schema.returns) != 1:
        return False
    result, aliases = func._schema.returns[0], [a.alias_info for a in func._schema.arguments]
    shared = [number for number, alias in enumerate(aliases) if alias is not None]
    read = result.alias_info is not None and not result.alias_info.is_write
    return str(result.type) == "Tensor" and read and shared == [0]


@cache
def _told_by_shapes(func: Any) -> bool:
    """Return whether results are new tensors, or the one argument that is written."""
    if func.namespace != "aten":
        return False
    schema = func._schema
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    if not aliases:
        return bool(schema.returns) and all(r.alias_info is None for r in schema.returns)
    return len(aliases) == len(schema.returns) == 1 and bool(aliases[0].is_write)


def _key(value: Any) -> Any:
    """Return what a result's shape depends on; `TypeError` if this isn't known."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if kind is FakeTensor:
        if value.constant is not None:
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.fake_device
    if kind is tuple or kind is list:
        return tuple(map(_key, value))
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal
    raise TypeError


def _known(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Any) -> Known:
    """Return what is known of results.

    Args:
        out: results of an operator.
        args: of it.
        kwargs: of it.
        before: keys of `args`, and of `kwargs`, before it ran.
    """
    if "out" in kwargs or (args and out is args[0]):
        given = kwargs["out"] if "out" in kwargs else args[0]
        return out is given and before == (_key(args), _key(tuple(kwargs.items())))
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    taken = {t.untyped_storage()._cdata for t in tensors}
    if isinstance(out, Tensor):
        return _layout(out, taken) or False
    if type(out) not in (tuple, list):
        return False
    layouts = [None if one is None else _layout(one, taken) for one in out]
    if any(one is not None and found is None for one, found in zip(out, layouts, strict=True)):
        return False
    return type(out), layouts


def _layout(out: Any, taken: set[int]) -> Layout | None:
    """Return the layout of a new tensor; None: it isn't new, or not all of its storage."""
    faked = type(out) is FakeTensor and out.constant is None
    if not faked and (type(out) is not Tensor or not out.is_meta):
        return None
    storage = out.untyped_storage()
    layout = out.shape, out.stride(), out.dtype, out.device
    with unset_fake_temporarily():
        plain = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    if storage._cdata in taken or storage.nbytes() != plain.untyped_storage().nbytes():
        return None
    taken.add(storage._cdata)
    return layout


def _made(layout: Layout, fake: FakeTensorMode | None) -> Tensor:
    size, strides, dtype, device = layout
    if fake is None:
        return torch.empty_strided(size, strides, dtype=dtype, device=device)
    with unset_fake_temporarily():
        elem = torch.empty_strided(size, strides, dtype=dtype, device="meta")
    return FakeTensor(fake, elem, device)
