"""Kernels that a GPU would be sent for each kind of block, and the bytes that they move.

    python -m bench.launches           # the table
    python -m bench.launches --write   # to docs/benchmarks.md
    python -m bench.launches --compiled [--write]    # of compiled blocks, as Inductor fuses them

Blocks run eagerly, forward and backward under autocast in bf16, on tensors without values that
take a GPU's paths, with weights as FSDP2 gathers them. An earlier layer has made what all layers
share of a batch. An operator that is no view and computes or copies is a launch, and so is each
Triton kernel; empty memory is none. Bytes are those of an operator's arguments and results, so
caches are not counted, nor what a kernel moves beyond them. An operator that a library answers with
several kernels counts as one. Groups of rows are made as on a GPU, where their number follows from
shapes. RMSNorms, short convolutions and gates are by Triton beside another backend than torch. Dims
are those of nam56r_base, rows are whole.

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._library.custom_ops import OPDEFS
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from bench import parser_of
from bench.gpu.tables import write_section
from bench.scheduled import scheduled
from checkpointing.compile import compile_blocks
from checkpointing.tracing.graphs import Pair, TracedGraphs
from checkpointing.tracing.operators import NO_KERNEL, kind_of, tensors_in
from megacpp.blocks.experts import module as experts
from megacpp.blocks.kinds import KINDS
from megacpp.config.presets import nam56r_base
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels, set_kernels
from megacpp.kernels.experts import rows as rows_of_experts
from megacpp.kernels.experts.rows import group_rows
from megacpp.kernels.experts.sizes import most_slots
from megacpp.kernels.m2rnn import chunks as m2rnn_chunks
from megacpp.launch.record import git_commit
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import LanguageModelHead
from parallel.simulate.fake import fake_tensors

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
HEADING = "## Launches of a block"
COMPILED_HEADING = "## Launches of a compiled block"
ROWS, TOKENS = 2, 4096
RECURRENCE = m2rnn_chunks._Chunk  # token after token; traces have all of a chunk at once
# Kind of block, operation, backend.
CASES = (
    ("A", "", ""),
    ("A", "rms_norm", "triton"),
    ("F", "", ""),
    ("F", "rms_norm", "triton"),
    ("E", "experts", "torch"),
    ("E", "experts", "triton"),
    ("M", "mamba3", "torch"),
    ("M", "mamba3", "mamba_ssm"),
    ("M", "mamba3", "triton"),
    ("R", "m2rnn", "torch"),
    ("R", "m2rnn", "triton"),
    ("G", "gated_delta_rule", "torch"),
    ("G", "gated_delta_rule", "triton"),
    ("head", "cross_entropy", "torch"),
    ("head", "cross_entropy", "triton"),
)
COMPILED = [(letter, dtype) for letter in "AFEMRG" for dtype in (torch.float32, torch.bfloat16)]
Schedule = tuple[list[str], int]  # launches in order, and their bytes
# Operations that compiled blocks do by Triton.
TRITON = "mamba3", "m2rnn", "gated_delta_rule", "short_conv", "gates", "experts", "rms_norm"


@dataclass
class Count:
    """Launches of one pass.

    Attributes:
        launches: operators and Triton kernels.
        triton: of these, Triton kernels of our own.
        bytes: that operators read and write.
    """

    launches: int = 0
    triton: int = 0
    bytes: int = 0


class LaunchCounter(TorchDispatchMode):
    """Counts launches into `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = kind_of(func)
        if not kind.view and kind.name not in NO_KERNEL:
            # A product whose `beta` is 0 overwrites its sum and doesn't read it.
            start = 1 if kwargs.get("beta") == 0 else 0
            read = args[start:], {name: given for name, given in kwargs.items() if name != "out"}
            self.now.launches += 1
            self.now.bytes += sum(t.nbytes for t in tensors_in((read, (out,))))
        return out

    def _rms_norm(self, x: Tensor, _: Any, weight_D: Tensor, eps: float) -> tuple[Tensor, ...]:
        """Return results of the operator, which is one kernel on a GPU and several on a CPU."""
        found = torch.empty_like(x), torch.empty_like(x[..., :1])
        self.now.launches += 1
        self.now.bytes += sum(t.nbytes for t in (x, weight_D, *found))
        return found

    def kernel(self, *given: Any, **__: Any) -> None:
        """Count a Triton kernel in place of its launch; its arguments are read or written once."""
        self.now.launches += 1
        self.now.triton += 1
        self.now.bytes += sum({id(t): t.nbytes for t in tensors_in(given)}.values())


@contextmanager
def counted() -> Iterator[LaunchCounter]:
    """Yield the counter of what runs inside, on tensors without values."""
    from triton.runtime.jit import KernelInterface

    counter = LaunchCounter()
    with fake_tensors(memory=True, gpu=True), counter, ExitStack() as stack:
        for owner, name, instead in (
            (KernelInterface, "__getitem__", lambda *_: counter.kernel),
            (torch, "_fused_rms_norm", counter._rms_norm),
            (experts, "group_rows", group_rows),
            (m2rnn_chunks, "_Chunk", RECURRENCE),
            (rows_of_experts, "slots_of", lambda sizes, *rest: most_slots(len(sizes), *rest)),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        yield counter


def count(letter: str, operation: str, backend: str) -> tuple[Count, Count]:
    """Return the launches of a forward and of a backward.

    Args:
        letter: kind of block, or `head`.
        operation: whose backend is chosen; empty: none.
        backend: name.
    """
    model = replace(nam56r_base().model, pattern=letter if letter != "head" else "A")
    with torch.device("meta"):
        module = LanguageModelHead(model) if letter == "head" else Block(letter, model)
        module = module.to(torch.bfloat16)  # as FSDP2 gathers it; the fp32 contract holds
    if operation:
        beside = "torch" if backend == "torch" else "triton"
        kernels = dict.fromkeys(("rms_norm", "short_conv", "gates"), beside) | {operation: backend}
        set_kernels(module, replace(PLAIN_KERNELS, **kernels))
    with counted() as counter:
        module.to_empty(device="cpu")
        x_BTD = torch.empty(ROWS, TOKENS, model.dim, dtype=torch.bfloat16, requires_grad=True)
        docs = Documents.rows(ROWS, TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            _run(module, x_BTD, docs)  # an earlier layer: what documents make once a batch is there
            counter.now = forward = Count()
            y = _run(module, x_BTD, docs)
        grad = torch.empty_like(y)
        counter.now = backward = Count()
        y.backward(grad)
    return forward, backward


def _run(module: nn.Module, x_BTD: Tensor, docs: Documents) -> Tensor:
    if isinstance(module, Block):
        return module(x_BTD, docs)
    return module(x_BTD, docs.ids_BT).loss_sum


def line(case: tuple[str, str, str]) -> str:
    """Return the line of a case of `CASES`."""
    there, back = count(*case)
    return (
        f"| {case[0]} | {case[2] or 'torch'} | {there.launches:,} | {back.launches:,} | "
        f"{there.triton + back.triton} | {there.bytes / 1e9:.2f} | {back.bytes / 1e9:.2f} |"
    )


def table() -> str:
    """Return the table of docs/benchmarks.md."""
    heads = "| block | backend | forward | backward | of these Triton | GB forward | GB backward |"
    return "\n".join([heads, "|---|---|---|---|---|---|---|", *map(line, CASES)])


@cache
def compiled(letter: str, dtype: torch.dtype) -> tuple[str, Pair, tuple[Schedule, Schedule]]:
    """Return what of a block is one graph, its graphs, and launches and bytes of each.

    Args:
        letter: kind of block.
        dtype: of its weights: fp32, which autocast casts, or bf16, as FSDP2 gathers them.
    """
    model = replace(nam56r_base().model, pattern=letter)
    with torch.device("meta"):
        block = Block(letter, model).to(dtype)
    set_kernels(block, Kernels(**dict.fromkeys(TRITON, "triton")))
    # Another layer is the last, which keeps everything.
    stack: Any = SimpleNamespace(blocks={"0": block}, letters=2 * letter)
    part = KINDS[letter].graph_part(block.mixer)
    name = compile_blocks(stack, "inductor", 1.0, make=TracedGraphs).graphs[0]
    with counted(), torch.autocast("cpu", torch.bfloat16):
        block.to_empty(device="cpu")
        x_BTD = torch.empty(ROWS, TOKENS, model.dim, dtype=torch.bfloat16, requires_grad=True)
        block(x_BTD, Documents.rows(ROWS, TOKENS))
        run: Any = block._forward if part is None else getattr(part.module, part.method)
        ((pair,),) = ([*run.graph.pairs.values()],)
    return name, pair, (scheduled(pair.forward), scheduled(pair.backward, backward=True))


def compiled_line(letter: str, dtype: torch.dtype) -> str:
    """Return the line of a compiled block, or of the part of it that is a graph.

    Args:
        letter: kind of block.
        dtype: of its weights.
    """
    name, pair, found = compiled(letter, dtype)
    ours = [_launches_of_ours(graph) for graph in (pair.forward, pair.backward)]
    products = sum(name.startswith("extern_kernels") for names, _ in found for name in names)
    width = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    there, back = (len(names) + more for (names, _), more in zip(found, ours, strict=True))
    named = letter if name == "block" else f"{letter}, {name}"
    return (
        f"| {named} | {width} | {there} | {back} | {products} | "
        f"{found[0][1] / 1e9:.2f} | {found[1][1] / 1e9:.2f} |"
    )


def _launches_of_ours(graph: fx.GraphModule) -> int:
    """Return what our own operators of a graph launch inside, beside one that is counted."""
    total = 0
    with counted() as counter:
        for node in graph.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.name in OPDEFS and schema.name.startswith("megacpp::"):
                given = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                counter.now = Count()
                OPDEFS[schema.name](*tree_map(_empty, given[0]), **given[1])
                total += counter.now.launches - 1
    return total


def _empty(value: Any) -> Any:
    """Return a tensor without values like another one; what isn't a tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def compiled_table() -> str:
    """Return the table of compiled blocks of docs/benchmarks.md."""
    heads = (
        "| block | weights | forward | backward | of these products | GB forward | GB backward |"
    )
    return "\n".join(
        [heads, "|---|---|---|---|---|---|---|", *(compiled_line(*c) for c in COMPILED)]
    )


def main() -> None:
    """Print or write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="to docs/benchmarks.md")
    parser.add_argument("--compiled", action="store_true", help="of compiled blocks")
    options = parser.parse_args()
    found = compiled_table() if options.compiled else table()
    if options.write:
        mark = f"Run {time.strftime('%Y-%m-%d')}, {(git_commit() or '')[:7]}:"
        write_section(PAGE, COMPILED_HEADING if options.compiled else HEADING, f"{mark}\n\n{found}")
    else:
        print(found)


if __name__ == "__main__":
    main()
