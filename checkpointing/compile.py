"""Compilation of single blocks: the compiler saves what a budget allows and recomputes the rest.

    compiled = compile_blocks(model, "inductor", budget=0.5)

It is called after heads, tokens and experts are sharded, and before FSDP2 shards the rest. Only a
block's computation is compiled, so names, hooks and saved state stay as they are:

    A, F    the whole block, one graph without a break
    M, R, G the whole block, with every head on this rank, if its scan is one operator: by Triton,
            and of M by torch, too
    E       all behind the choice of experts, if by Triton or within a capacity, on one rank of ep
            and tp; else the shared expert, as sizes depend on values, which no graph knows
    A.*     nothing of a sparse block: its selection is kept for other layers and its backward

Blocks of the same classes share their graphs. Without gradients nothing is saved and blocks run
uncompiled. (Activation memory, not saved training state.)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megacpp.blocks.kinds import KINDS
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.recompute import PLAIN

LOOKED_UP = "what its memory looks up is hashed outside of graphs"
# Settings of torch._inductor.config on a GPU: element-wise kernels that don't depend on each other,
# as of queries and of keys, are one launch.
FEWER_LAUNCHES = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


@dataclass(frozen=True)
class Compiled:
    """Compiled parts of a model.

    Attributes:
        backend: backend of torch.compile.
        graphs: by layer "block", or the part of it that is one graph.
        budgets: by layer, budget of the compiled part.
        eager: by layer, reason why it, or the rest of it, isn't compiled.
    """

    backend: str
    graphs: dict[int, str] = field(default_factory=dict)
    budgets: dict[int, float] = field(default_factory=dict)
    eager: dict[int, str] = field(default_factory=dict)

    @property
    def whole(self) -> frozenset[int]:
        """Layers in which the compiler alone decides about recomputation."""
        return frozenset(layer for layer, part in self.graphs.items() if part == "block")

    def words(self, layer: int) -> str:
        """Return a description of a layer for the header of a run."""
        said = []
        if layer in self.graphs:
            said += [f"{self.graphs[layer]} by {self.backend}, budget {self.budgets[layer]:g}"]
        if layer in self.eager:
            said += [f"eager: {self.eager[layer]}"]
        return "; ".join(said)


def compile_blocks(
    model: HybridLM,
    backend: str,
    budget: float,
    halves: bool = False,
    say: Callable[[str], object] | None = None,
    make: type[Graphs] | None = None,
) -> Compiled:
    """Compile the blocks of `model` in place as far as possible.

    Recompute regions inside a compiled block are removed. The last layer of the whole model saves
    everything in any case: its backward comes immediately.

    Args:
        model: this rank's part of the model.
        backend: backend of torch.compile: "inductor", "aot_eager".
        budget: part of what the compiler would save by default: 1 all, 0 inputs only. Under tensor
            parallelism gathered tensors are saved at any budget but 0.
        halves: a backward runs in two parts (zero-bubble pipelines), each of which needs the saved
            tensors.
        say: called for each graph when it is compiled, which may take a minute.
        make: class of the graphs, in place of torch.compile's.
    """
    assert 0.0 <= budget <= 1.0, budget
    found, graphs = Compiled(backend), (make or Graphs)(backend, halves, say)
    for key, block in model.blocks.items():
        assert isinstance(block, Block)
        layer, mixer, reason = int(key), block.mixer, why_eager(block)
        own_budget = 1.0 if layer == len(model.letters) - 1 else budget
        if reason is not None:
            found.eager[layer] = reason
            part = KINDS[block.letter].graph_part(mixer)
            if part is None:
                continue
            function = getattr(type(part.module), part.method)
            graph = graphs.compiled(
                part.module, function, own_budget, f"{part.name} of {block.letter} blocks"
            )
            setattr(part.module, part.method, CompiledPart(part.module, function, graph))
            inside, name = part.inside, part.name
        else:
            graph = graphs.compiled(block, Block._forward, own_budget, f"{block.kind} blocks")
            block._forward = CompiledBlock(block, graph)  # type: ignore[method-assign]
            inside, name = (block,), "block"
        make_plain(*inside)
        found.graphs[layer], found.budgets[layer] = name, own_budget
    return found


class Graphs:
    """Graphs of a model; modules of the same classes share them."""

    def __init__(
        self, backend: str, halves: bool, say: Callable[[str], object] | None = None
    ) -> None:
        self.backend, self.halves, self.say = backend, halves, say
        self._made: dict[Hashable, Callable[..., Tensor]] = {}

    def compiled(
        self, module: nn.Module, function: Callable[..., Tensor], budget: float, name: str
    ) -> Callable[..., Tensor]:
        """Return `function(module, ...)`, compiled.

        Args:
            module: module to compile.
            function: its computation.
            budget: memory budget.
            name: name of the graph in messages.
        """
        # Under tensor parallelism every module has a class of its own.
        key = budget, name, tuple(type(m) for m in module.modules())
        if key not in self._made:
            compiler = Compiler(self.backend, budget, self.halves, name, self.say)
            self._made[key] = self.make(compiler, function)
        return self._made[key]

    def make(self, compiler: Compiler, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function as `compiler` compiles it."""
        return compiler.compile(function)


def why_eager(block: Block) -> str | None:
    """Return the reason why a block can't be one graph, or None."""
    if block.engram is not None:
        return LOOKED_UP
    return KINDS[block.letter].why_eager(block.mixer)


def make_plain(*modules: nn.Module) -> None:
    """Remove recompute regions inside a graph, where the compiler decides about recomputation."""
    for inner in (inner for module in modules for inner in module.modules()):
        if hasattr(inner, "recompute"):
            inner.recompute = PLAIN  # type: ignore[assignment]


@dataclass(frozen=True)
class Compiler:
    """Backend of torch.compile with its own memory budget.

    The budget is set only while one of its graphs is compiled, so that other graphs in the process
    keep theirs.
    """

    backend: str
    budget: float
    halves: bool = False
    name: str = ""
    say: Callable[[str], object] | None = None

    def compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Compile `function` to one graph per kind of arguments."""
        if torch.__version__ < "2.12":
            _leave_out_what_outputs_share()
        # torch counts graphs, of which there may be 8, by code object (pytorch#177355: torch 2.13
        # has isolate_recompiles=True).
        assert isinstance(function, FunctionType)
        own = FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_compiled"),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph for Dynamo, within the budget."""
        from torch._dynamo.backends.registry import lookup_backend
        from torch._dynamo.exc import RestartAnalysis, SkipFrame
        from torch._functorch import config

        import megacpp.kernels.flop_formulas  # noqa: F401 - the budget goes by FLOPs

        say, began = self.say or (lambda _: None), time.perf_counter()
        say(f"compiling {self.name} by {self.backend}, with budget {self.budget:g} ...")
        try:
            with config.patch(self.settings()):  # type: ignore[attr-defined]
                made = lookup_backend(self.backend)(graph, inputs, **self.options(inputs))
            say(f"    {time.perf_counter() - began:.1f} s; their backward when it first runs")
            return made
        except (RestartAnalysis, SkipFrame):
            raise  # no errors: requests of the compiler to Dynamo
        except Exception as error:
            # Raised when the graph is run, a moment later. An error that goes through Dynamo itself
            # leaves its hook in the interpreter (no thread known): from then on a function's
            # arguments live until it returns, even if it deletes them earlier.
            return functools.partial(_fail, error)

    def settings(self) -> dict[str, Any]:
        """Return settings of torch._functorch.config for the partition of a graph."""
        from torch._functorch import config

        found: dict[str, Any] = {"activation_memory_budget": self.budget}
        # A DTensor brings its mesh into the graph, an object whose bytes torch 2.13 refuses to
        # guess below a budget of 1 (pytorch#186008 calls the flag an escape hatch). It has none
        # that matter. Older versions bring no mesh.
        if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
            found["unsafe_treat_script_objects_as_zero_size"] = True
        if self.halves:  # otherwise inductor's backward overwrites saved tensors
            found["donated_buffer"] = False
        return found

    def options(self, inputs: list[Any]) -> dict[str, Any]:
        """Return arguments of the backend for a graph of these inputs."""
        if self.backend != "inductor" or not any(getattr(x, "is_cuda", False) for x in inputs):
            return {}
        from torch._inductor import config

        known = all(hasattr(config, name) for name in FEWER_LAUNCHES)
        return {"config_patches": FEWER_LAUNCHES} if known else {}


def _fail(error: Exception, *_: Any) -> NoReturn:
    raise error


@functools.cache
def _leave_out_what_outputs_share() -> None:
    """Patch torch 2.11 for the whole process.

    A tensor that the forward of an autograd Function changed in place left its graph twice, and the
    gradient reached the wrong one: it was silently 0 (pytorch#180642).
    """
    from torch._dynamo.variables import higher_order_ops

    plain = higher_order_ops.collect_intermediate_outputs

    def without_aliases(tx: Any, tracer: Any, outputs: Any, _: bool = False) -> Any:
        return plain(tx, tracer, outputs, True)

    higher_order_ops.collect_intermediate_outputs = without_aliases


class CompiledBlock:
    """Replacement of `Block._forward`.

    Masks, rotary tables and chunks, which all layers share, are computed before the graph and are
    inputs of it.
    """

    def __init__(self, block: Block, graph: Callable[..., Tensor]) -> None:
        self.block, self.graph = block, graph

    def __call__(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return the block's output, `[B, T, D]`; without gradients uncompiled.

        Args:
            x_BTD: input of the block.
            docs: documents of the batch.
        """
        block = self.block
        if not torch.is_grad_enabled():
            return Block._forward(block, x_BTD, docs)
        assert block.recompute is PLAIN, "compiler and recompute regions both decide what is saved"
        read = KINDS[block.letter].graph_inputs(block.mixer, docs, x_BTD)
        return self.graph(block, x_BTD, read)


class CompiledPart:
    """Replacement of a method that processes tokens independently."""

    def __init__(
        self, module: nn.Module, function: Callable[..., Tensor], graph: Callable[..., Tensor]
    ) -> None:
        self.module, self.function, self.graph = module, function, graph

    def __call__(self, *given: Tensor, **named: Any) -> Tensor:
        """Return what the method returns of tensors; without gradients uncompiled."""
        run = self.graph if torch.is_grad_enabled() else self.function
        return run(self.module, *given, **named)
