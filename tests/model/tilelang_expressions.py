"""Values and memory of a TileLang kernel, for tests/model/tilelang_interpreter.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Number = int | bool | Tensor
Expr = Callable[["Frame"], Any]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
}


@dataclass
class Frame:
    """Where a block of the grid stands.

    A parallel loop is one step: its variable is a vector along an axis of its own (the k-th loop's
    is the k-th from the right), an `if` in it narrows the lanes that are active.
    """

    values: dict[Any, Number] = field(default_factory=dict)
    memory: dict[Any, Tensor] = field(default_factory=dict)
    lanes: tuple[int, ...] = ()
    active: Tensor | None = None


class Expressions:
    """Turns expressions into functions of a frame.

    Attributes:
        given: memory that is an argument's, whose bounds are guarded.
        dtypes: what the names of dtypes stand for.
    """

    def __init__(self, given: set[Any], dtypes: dict[str, torch.dtype]) -> None:
        self.given, self.dtypes = given, dtypes

    def dtype(self, node: Any) -> torch.dtype:
        return self.dtypes[str(node.dtype)]

    def _unknown(self, node: Any) -> Any:
        raise NotImplementedError(f"{kind(node)}: {node}")

    # Memory

    def reader(self, buffer: Any, indices: list[Expr]) -> Expr:
        whole = self.dtype(buffer) == torch.int32

        def read(frame: Frame) -> Any:
            memory, at, inside = self.locate(frame, buffer, indices)
            found = memory[at]
            if inside is not True:
                found = torch.where(as_tensor(inside), found, torch.zeros_like(found))
            return int(found) if whole and found.ndim == 0 else found

        return read

    def writer(self, buffer: Any, indices: list[Expr]) -> Callable[[Frame, Any], None]:
        def write(frame: Frame, value: Any) -> None:
            memory, at, inside = self.locate(frame, buffer, indices)
            value = torch.as_tensor(value, dtype=memory.dtype if isinstance(value, int) else None)
            assert value.dtype == memory.dtype, f"{buffer.name}: {value.dtype}"
            chosen = both(inside, frame.active)
            if not isinstance(chosen, Tensor):
                if chosen:
                    check_apart(frame.lanes, at, memory)
                    memory[at] = value
                return
            lanes = [*(x for x in at if isinstance(x, Tensor)), value, chosen]
            shape = torch.broadcast_shapes(*(x.shape for x in lanes), frame.lanes)
            chosen = chosen.expand(shape)
            at = tuple(as_tensor(x).expand(shape)[chosen] for x in at)
            check_apart((), at, memory)
            memory[at] = value.expand(shape)[chosen]

        return write

    def locate(
        self, frame: Frame, buffer: Any, indices: list[Expr]
    ) -> tuple[Tensor, tuple[Number, ...], Number]:
        """A buffer's memory, indices into it, and which of them lie inside of it."""
        if buffer.data not in frame.memory:
            raise KeyError(f"{buffer.name} is missing, and is touched")
        memory = frame.memory[buffer.data]
        if buffer.data not in self.given:
            memory = memory.view(sizes(buffer))  # buffers may share memory in another shape
        at, inside = [], True
        for i, n in zip((i(frame) for i in indices), memory.shape, strict=True):
            if isinstance(i, Tensor):
                if int(i.min()) < 0 or int(i.max()) >= n:
                    inside, i = both(inside, (i >= 0) & (i < n)), i.clamp(0, n - 1)
            elif not 0 <= i < n:
                inside, i = both(inside, False), 0
            at.append(i)
        if buffer.data not in self.given and inside is not True:
            outside = both(negated(inside), frame.active)
            if outside.any() if isinstance(outside, Tensor) else outside:
                raise IndexError(f"{buffer.name} of {tuple(memory.shape)} is left")
        return memory, tuple(at), inside

    # Expressions

    def expr(self, e: Any) -> Expr:
        name = kind(e)
        if name in BINARY:
            a, b, f = self.expr(e.a), self.expr(e.b), BINARY[name]
            return lambda frame: f(a(frame), b(frame))
        return getattr(self, f"_{name}", self._unknown)(e)

    def _IntImm(self, e: Any) -> Expr:
        value = int(e.value)
        return lambda frame: value

    def _FloatImm(self, e: Any) -> Expr:
        value = torch.tensor(e.value, dtype=self.dtype(e))
        return lambda frame: value

    def _Var(self, e: Any) -> Expr:
        return lambda frame: frame.values[e]

    def _Cast(self, e: Any) -> Expr:
        value, dtype = self.expr(e.value), self.dtype(e)
        return lambda frame: torch.as_tensor(value(frame)).to(dtype)

    def _BufferLoad(self, e: Any) -> Expr:
        assert e.predicate is None
        return self.reader(e.buffer, [self.expr(i) for i in e.indices])

    def _Call(self, e: Any) -> Expr:
        name, args = e.op.name, [self.expr(a) for a in e.args]
        if name == "tir.if_then_else":
            return partial(choose, *args)
        if name not in FUNCTIONS:
            self._unknown(e)
        f, (x,) = FUNCTIONS[name], args
        return lambda frame: f(x(frame))


FUNCTIONS = {
    f"tir.{f.__name__}": f for f in (torch.sigmoid, torch.exp, torch.cos, torch.sin, torch.tanh)
}


def smaller(a: Number, b: Number) -> Number:
    return torch.minimum(*map(as_tensor, (a, b))) if is_vector(a, b) else min(a, b)


def larger(a: Number, b: Number) -> Number:
    return torch.maximum(*map(as_tensor, (a, b))) if is_vector(a, b) else max(a, b)


BINARY = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Min": smaller,
    "Max": larger,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "And": operator.and_,
    "Or": operator.or_,
}


def choose(condition: Expr, then: Expr, other: Expr, frame: Frame) -> Any:
    """Lanes of a branch that isn't taken don't touch memory."""
    truth, active = condition(frame), frame.active
    if not isinstance(truth, Tensor):
        return then(frame) if truth else other(frame)
    frame.active = both(active, truth)
    yes = then(frame)
    frame.active = both(active, ~truth)
    no = other(frame)
    frame.active = active
    return torch.where(truth, yes, no)


def offset(start: Expr, steps: Tensor, frame: Frame) -> Tensor:
    return start(frame) + steps


def check_apart(lanes: tuple[int, ...], at: tuple[Number, ...], memory: Tensor) -> None:
    """Lanes that write one place at once are a race."""
    shape = torch.broadcast_shapes(*(as_tensor(i).shape for i in at), lanes)
    places = torch.zeros(shape, dtype=torch.int64)
    for i, n in zip(at, memory.shape, strict=True):
        places = places * n + i
    if places.unique().numel() != places.numel():
        raise ValueError(f"lanes of a parallel loop write one place of {tuple(memory.shape)}")


def both(a: Any, b: Any) -> Any:
    """Of two sets of lanes, where None and True are all of them."""
    if a is None or a is True:
        return True if b is None else b
    return a if b is None or b is True else a & b


def negated(a: Number) -> Number:
    return ~a if isinstance(a, Tensor) else not a


def as_tensor(x: Number) -> Tensor:
    return torch.as_tensor(x)


def is_vector(*values: Number) -> bool:
    return any(isinstance(v, Tensor) for v in values)


def unknown(extent: Any, frame: Frame) -> set[Any]:
    """The sizes in an extent that no argument before has given."""
    if kind(extent) in BINARY:
        return unknown(extent.a, frame) | unknown(extent.b, frame)
    return {extent} - frame.values.keys() if kind(extent) == "Var" else set()


def sizes(buffer: Any) -> list[int]:
    return [int(n) for n in buffer.shape]


def kind(node: Any) -> str:
    return type(node).__name__
