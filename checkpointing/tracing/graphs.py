"""Graphs of compiled blocks, run operator by operator on tensors without values.

    ac = ActivationCheckpointing(config)
    ac.graphs = TracedGraphs    # before ac(model), in place of torch.compile

Forward and backward of a block are traced together and split as the compiler splits them: by
AOTAutograd, the backend's decompositions, and the min-cut partitioner at the run's memory budget.
What the forward returns for the backward is what the compiled block saves. No code is generated.

Under a meter the graphs allocate what their kernels do (graph_run.py). (Activation memory.)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.fx.node import map_arg
from torch.nn.utils import stateless

from checkpointing.compile import CompiledBlock, Compiler, Graphs
from checkpointing.tracing.graph_run import WithoutModes, operator_of, run_graph
from megacpp.model.documents import Documents
from megacpp.torch_extras import is_dtensor


class TracedGraphs(Graphs):
    """Graphs of a model, made without values; modules of the same classes share them."""

    def make(self, compiler: Compiler, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function as the graphs that `compiler` would make of it."""
        return TracedGraph(compiler, function)


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """Replacement of a compiled function: one pair of graphs per kind of arguments."""

    compiler: Compiler
    function: Callable[..., Tensor]
    pairs: dict[Hashable, Pair] = field(default_factory=dict)

    def __call__(self, module: nn.Module, x_BTD: Tensor, *read: Documents | None) -> Tensor:
        """Return the function's output `[B, T, D]`.

        Args:
            module: whose parameters the function reads.
            x_BTD: input.
            read: further arguments: documents, and what was computed of them before.
        """
        named = dict(module.named_parameters())
        shared = list({id(t): t for t in _tensors(read, set())}.values())
        inputs = [*named.values(), x_BTD, *shared]
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        like = [
            (t.shape, t.stride(), t.dtype, x.requires_grad) for x in inputs for t in [_local(x)]
        ]
        if not any(x[3] for x in like):
            return self.function(module, x_BTD, *read)
        if (key := (cast, *like)) not in self.pairs:
            with WithoutModes(inputs[len(named) :]):
                local = [torch.empty_strided(*x[:2], dtype=x[2], requires_grad=x[3]) for x in like]
            layouts = [getattr(p, "_spec", None) for p in named.values()]
            numbered = _with(read, {id(t): n for n, t in enumerate(shared)}, {})
            body = _Body(self.function, module, list(named), layouts, numbered)
            self.pairs[key] = split(self.compiler, body, local)
        return _Run.apply(self.pairs[key], *inputs)  # type: ignore[return-value]


@dataclass(eq=False)
class Pair:
    """Forward and backward graph of a function.

    Attributes:
        forward: returns the output, then what is saved.
        backward: takes what is saved and the gradient of the output.
        used: places of the inputs that the forward takes.
        fused: results may stay on chip.
        specs: of the gradients that are DTensors, by place.
        replayed: FLOPs of the forward's products that the backward runs again.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    used: tuple[int, ...]
    fused: bool
    specs: dict[int, Any]
    replayed: int


@dataclass(frozen=True, eq=False)
class _Body:
    """Function of local tensors alone, as AOTAutograd traces it.

    Attributes:
        function: of the module, an input and `read`.
        module: whose parameters it reads.
        names: of its parameters.
        layouts: of the parameters that are DTensors, else None.
        read: further arguments, with a `_Place` for each tensor.
        specs: of gradients that are DTensors, by place; filled by the trace.
    """

    function: Callable[..., Tensor]
    module: nn.Module
    names: list[str]
    layouts: list[Any]
    read: tuple[Documents | None, ...]
    specs: dict[int, Any] = field(default_factory=dict)

    def __call__(self, *local: Tensor) -> tuple[Tensor]:
        number = len(self.names)
        leaves = [
            t if layout is None else _Leaf.apply(t, self.specs, n, layout)
            for n, (t, layout) in enumerate(zip(local[:number], self.layouts, strict=True))
        ]
        read = _with(self.read, dict(enumerate(local[number + 1 :])), {})
        given = dict(zip(self.names, leaves, strict=True))
        # What attention records for QK-clip, a few numbers a head, isn't a result of the graph.
        cores: list[Any] = [m for m in self.module.modules() if hasattr(m, "recorder")]
        recorders = [(core, core.recorder) for core in cores]
        for core in cores:
            core.recorder = None
        try:
            with stateless._reparametrize_module(self.module, given):  # type: ignore[arg-type]
                return (self.function(self.module, local[number], *read),)
        finally:
            for core, recorder in recorders:
                core.recorder = recorder


class _Leaf(torch.autograd.Function):
    """DTensor made of its local tensor, whose gradient is the local part of the DTensor's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, specs: dict[int, Any], place: int, spec: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        ctx.specs, ctx.place = specs, place
        return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[call-arg]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        ctx.specs[ctx.place] = grad._spec
        return grad._local_tensor, None, None, None


def split(compiler: Compiler, body: _Body, local: Sequence[Tensor]) -> Pair:
    """Return the graphs that the compiler splits a function into.

    Args:
        compiler: backend, and budget.
        body: function.
        local: its arguments.
    """
    from torch._export.utils import _compiling_state_context
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    fused = compiler.backend == "inductor"
    table, partition = None, min_cut_rematerialization_partition
    if fused:
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.decomposition import select_decomp_table

        table, partition = select_decomp_table(), partition_fn
    settings = config.patch(compiler.settings())  # type: ignore[attr-defined]
    with WithoutModes(local), settings, _compiling_state_context():
        joint: Any = aot_export_joint_simple(
            body, tuple(local), trace_joint=True, decompositions=table
        )
        for node in list(joint.graph.nodes):  # of an export alone
            if operator_of(node) == "_assert_tensor_metadata":
                joint.graph.erase_node(node)
        places = [n for n in joint.graph.nodes if n.op == "placeholder"]
        # Dynamo passes a graph what it reads, and the budget is a part of what isn't an input.
        used = tuple(n for n in range(len(local)) if places[n].users)
        for n, node in enumerate(places[: len(local)]):
            if n not in used:
                joint.graph.erase_node(node)
        inputs = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
        weights = [place for place, n in enumerate(used) if n < len(body.names)]
        forward, backward = partition(
            joint, inputs, num_fwd_outputs=1, static_lifetime_input_indices=weights
        )
    return Pair(forward, backward, used, fused, body.specs, _replayed(forward, backward))


def replayed_flops(block: nn.Module) -> int | None:
    """Return FLOPs of products that the backward of a block runs again; None: it is no graph."""
    instead = vars(block).get("_forward")
    if not isinstance(instead, CompiledBlock) or not isinstance(instead.graph, TracedGraph):
        return None
    return sum(pair.replayed for pair in instead.graph.pairs.values())


def _replayed(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    from checkpointing.tracing.flops import formula_of

    ahead, total = {node.name for node in forward.graph.nodes}, 0
    for node in backward.graph.nodes:
        if node.name not in ahead or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if (formula := formula_of(node.target)) is not None:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += formula(*args, **kwargs, out_val=node.meta["val"])
    return total


class _Run(torch.autograd.Function):
    """Forward graph, and backward graph, of a pair."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, *inputs: Tensor) -> Tensor:
        local = [_local(inputs[n]).detach() for n in pair.used]
        found = run_graph(pair.forward, local, pair.fused)
        outputs = pair.forward.graph.output_node().args[0]
        names = [node.name for node in outputs]  # type: ignore[union-attr]
        ctx.pair, ctx.names = pair, names[1:]
        ctx.kinds = [getattr(t, "_spec", None) for t in inputs]
        ctx.save_for_backward(*found[1:])
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()
        graph = ctx.pair.backward
        places = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        args = [given.pop(name) if name in given else grad for name in places]
        del given, grad
        grads = run_graph(graph, args, ctx.pair.fused)
        return None, *(
            _as_dtensor(g, ctx.pair.specs.get(n)) if kind is not None else g
            for n, (g, kind) in enumerate(zip(grads, ctx.kinds, strict=True))
        )


# ---- tensors of documents, and of a rank --------------------------------------------------------


def _local(t: Tensor) -> Tensor:
    return t._local_tensor if is_dtensor(t) else t


def _as_dtensor(grad: Tensor | None, spec: Any) -> Tensor | None:
    from torch.distributed.tensor import DTensor

    if grad is None or spec is None:
        return grad
    return DTensor(grad, spec, requires_grad=False)  # type: ignore[call-arg]


def _tensors(found: Any, seen: set[int]) -> list[Tensor]:
    """Return the tensors that documents refer to, memos included."""
    if isinstance(found, Tensor):
        return [found]
    if id(found) in seen:
        return []
    seen.add(id(found))
    return [t for item in _items(found) for t in _tensors(item, seen)]


def _items(found: Any) -> list[Any]:
    if isinstance(found, tuple | list):
        return list(found)
    if isinstance(found, dict):
        return list(found.values())
    return list(vars(found).values()) if dataclasses.is_dataclass(found) else []


def _with(found: Any, instead: dict[int, Any], done: dict[int, Any]) -> Any:
    """Return a copy of documents with something else for each tensor.

    A copy that holds numbers keeps no tensor of a batch alive, whoever holds it.

    Args:
        found: documents, or a value in them.
        instead: by identity of a tensor, or by the number that is there for it.
        done: copies so far, by identity.
    """
    if isinstance(found, Tensor):
        return _Place(instead[id(found)])
    if isinstance(found, _Place):
        return instead[found.number]
    if id(found) in done:
        return done[id(found)]
    if isinstance(found, tuple | list):
        items = [_with(item, instead, done) for item in found]
        return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)
    if isinstance(found, dict):
        new = done[id(found)] = {}
        new |= {key: _with(item, instead, done) for key, item in found.items()}
        return new
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        new = done[id(found)] = copy.copy(found)
        for name, item in vars(found).items():
            object.__setattr__(new, name, _with(item, instead, done))
        return new
    return found


@dataclass(frozen=True)
class _Place:
    """Number of a tensor among those of documents."""

    number: int
