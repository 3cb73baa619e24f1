"""Run a compiler's graph operator by operator, as its kernels allocate.

Under a meter, a graph of inductor allocates what its kernels read and write: the result of an
element-wise operator that only such operators and reductions read stays on chip, and what it was
computed from lives until they have run. A kernel may write over its input, which isn't modelled.
What one kernel computes beside another result isn't a launch. (Activation memory.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from checkpointing.tracing.operators import kind_of

# Beside operators that torch tags as element-wise: what a kernel of inductor computes on its way.
ON_CHIP = frozenset(
    "convert_element_type clone _to_copy full full_like iota where constant_pad_nd fill cat "
    "scalar_tensor embedding index gather slice_scatter select_scatter lift_fresh_copy".split()
)
REDUCTIONS = frozenset("sum mean amax amin var var_mean prod any all argmax argmin".split())
PLACED = frozenset("cat slice_scatter select_scatter constant_pad_nd".split())  # of several sizes
# An operator runs whose result is another one's of the same kernel.
WITH_ANOTHER: ContextVar[bool] = ContextVar("with another", default=False)


def run_graph(graph: fx.GraphModule, args: list[Any], fused: bool) -> list[Any]:
    """Return the outputs of a graph; a value is freed behind its last reader.

    Args:
        graph: of ATen operators.
        args: arguments; the list is emptied.
        fused: results of operators that `_stays_on_chip` are computed without a meter.
    """
    values: dict[fx.Node, _Value] = {}
    nodes = list(graph.graph.nodes)
    last = {read: node for node in nodes for read in node.all_input_nodes}
    beside = results_beside(nodes) if fused else set()
    args.reverse()
    for node in nodes:
        if node.op == "placeholder":
            values[node] = _Value(args.pop())
        elif node.op == "output":
            return [values[x].value if isinstance(x, fx.Node) else x for x in node.args[0]]
        elif node.op == "get_attr":
            values[node] = _Value(getattr(graph, node.target))
        else:
            token = WITH_ANOTHER.set(node in beside)
            values[node] = _computed(node, values, fused)
            WITH_ANOTHER.reset(token)
        for read in node.all_input_nodes:
            if last[read] is node:
                del values[read]
        if not node.users:
            values.pop(node, None)
    raise AssertionError("a graph has an output")


@dataclass(frozen=True, eq=False)
class _Value:
    """Value of a node; if it has no memory, with those that are read in its place."""

    value: Any
    of: tuple[_Value, ...] = ()


def _computed(node: fx.Node, values: dict[fx.Node, _Value], fused: bool) -> _Value:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n].value)
    of = tuple(values[n] for n in node.all_input_nodes)
    run: Any = node.target
    if not (fused and _stays_on_chip(node)):
        # An operator of ours, by its name: whoever traces may run what it does inside.
        schema = getattr(run, "_schema", None)
        run = run if schema is None else OPDEFS.get(schema.name, run)
        passed = of if _is_view(node) else ()
        return _Value(run(*args, **kwargs), passed)
    with WithoutModes([v.value for v in (of or values.values())]):
        return _Value(run(*args, **kwargs), of)


def results_beside(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes whose results a kernel of inductor writes beside another one's.

    Between two operators that aren't its own it fuses what reads the same numbers, or another
    result, row by row, and it launches as one what is element-wise alone (`combo_kernels`). A sum
    over rows stays a launch: it ends with what the programs of its kernel leave apart.

    Args:
        nodes: of a graph, in order.
    """
    level: dict[fx.Node, int] = {}  # operators of others in front of a node
    size: dict[fx.Node, int] = {}  # numbers that a kernel goes through
    seen, found = set[object](), set[fx.Node]()
    for node in (n for n in nodes if n.op == "call_function"):
        level[node] = max((level.get(x, 0) for x in node.all_input_nodes), default=0)
        reduces = operator_of(node) in REDUCTIONS
        if not (reduces or _element_wise(node)):
            level[node] += not _is_view(node)
        elif not _stays_on_chip(node):
            read = [*_read_by(node)]
            inside = [size.get(x, 0) for x in read if level.get(x) == level[node]]
            size[node] = max([*inside, *map(_numel, (node, *node.all_input_nodes))])
            if reduces and _over_rows(node):
                continue
            keys: set[object] = {(level[node], size[node], x) for x in (node, *read)}
            if not (seen & keys or reduces or operator_of(node) in PLACED):
                keys.add(level[node])
            if seen & keys:
                found.add(node)
            seen |= keys
    return found


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield nodes with memory that a node reads, also through views and what stays on chip."""
    for read in node.all_input_nodes:
        if _is_view(read) or (read.op == "call_function" and _stays_on_chip(read)):
            yield from _read_by(read)
        else:
            yield read


def _over_rows(node: fx.Node) -> bool:
    """Return whether a reduction leaves the last dim as it is."""
    ndim, dims = node.args[0].meta["val"].ndim, node.args[1:2]  # type: ignore[union-attr]
    return bool(dims) and all(d % ndim != ndim - 1 for d in dims[0])  # type: ignore[union-attr]


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _stays_on_chip(node: fx.Node) -> bool:
    """Return whether a node is element-wise and only kernels of such operators read it."""
    return _element_wise(node) and _read_on_chip(node)


def _read_on_chip(node: fx.Node) -> bool:
    """Return whether element-wise operators and reductions alone read a node, or views of it."""
    return all(
        user.op != "output"
        and (
            _read_on_chip(user)
            if _is_view(user)
            else _element_wise(user) or operator_of(user) in REDUCTIONS
        )
        for user in node.users
    )


def _element_wise(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_view(node):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or operator_of(node) in ON_CHIP


def operator_of(node: fx.Node) -> str:
    """Return the name of a node's operator; empty: it has none."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2]


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # an item of a tuple
        return node.op == "call_function"
    return kind_of(node.target).view


class WithoutModes(ExitStack):
    """Context without a meter, in which only the mode of fake tensors is active."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__()
        self.modes = [m for m in (getattr(v, "fake_mode", None) for v in values) if m is not None]

    def __enter__(self) -> WithoutModes:
        super().__enter__()
        self.enter_context(_disable_current_modes())
        if self.modes:
            self.enter_context(self.modes[0])
        return self
