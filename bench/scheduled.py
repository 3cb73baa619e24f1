"""Kernels that Inductor schedules for a graph on an H100, without one.

The graph's inputs become tensors without values on a CUDA device, Inductor lowers and fuses the
graph for sm_90, and the calls of its wrapper are counted. No kernel is compiled or run, so this
needs neither a GPU nor a build of torch for one.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from checkpointing.compile import FEWER_LAUNCHES

GPU = torch.device("cuda", 0)
# What Inductor asks of a device, as an H100 SXM answers.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
# A Triton kernel of Inductor's; a library's product; an operator that it doesn't lower; torch's sum
# of what the programs of a kernel left apart.
CALL = re.compile(
    r"\b(\w+\.run|extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(|\.(sum)\(dim="
)


SEEN = "eager_input_vals"  # Inductor's name of an operator's arguments, as the graph was traced


def scheduled(graph: fx.GraphModule, backward: bool = False) -> tuple[list[str], int]:
    """Return the launches of a graph in order, and the bytes that they read and write.

    Args:
        graph: of ATen operators on fake tensors, as AOTAutograd makes it.
        backward: it is the backward of a pair.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    graph, mode = copy.deepcopy(graph), FakeTensorMode()
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _on_gpu)  # type: ignore[assignment]
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_gpu)  # type: ignore[assignment]
    with as_on_h100() as made, torch.no_grad():
        with mode:
            inputs = [_like(n.meta["val"]) for n in places]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        for node in graph.graph.nodes:
            if SEEN in node.meta:
                node.meta[SEEN] = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            compile_fx_inner(graph, inputs, is_backward=backward)
        except InductorError:
            if not made:
                raise
        ((code, num_bytes),) = made
    return calls(code), num_bytes


def calls(code: str) -> list[str]:
    """Return what a wrapper launches, in order: `triton`, or a library's name of it."""
    body = code[code.index("def call(") :]
    lines = (x for x in map(str.strip, body.splitlines()) if not x.startswith(("#", "assert_")))
    found = (match[1] or match[2] for line in lines if (match := CALL.search(line)))
    return ["triton" if name.endswith(".run") else name for name in found]


@contextmanager
def as_on_h100() -> Iterator[list[tuple[str, int]]]:
    """Let Inductor schedule for an H100; yield the code and the bytes where it would load it."""
    import torch._inductor.config as inductor
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering
    from torch.utils._triton import has_triton, has_triton_package
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    made: list[tuple[str, int]] = []

    def stop(self: Any) -> NoReturn:
        made.append((self.codegen()[0].value, self.count_bytes()[0]))
        raise NotImplementedError

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", True),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "_exchange_device", 0),
        (torch.cuda, "_maybe_exchange_device", 0),
        (torch.cuda, "get_device_properties", H100),
        (torch.cuda, "get_device_capability", (H100.major, H100.minor)),
        (torch.cuda, "is_bf16_supported", True),
        (torch.cuda, "get_rng_state", torch.empty(0, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", None),
        (CudaInterface, "is_available", True),
        (CudaInterface, "get_compute_capability", 90),
        (CudaInterface, "is_triton_capable", True),
        (CudaInterface, "raise_if_triton_unavailable", None),
        (CudaInterface, "get_device_properties", H100),
        (CudaInterface.Worker, "get_device_properties", H100),
        (CudaInterface.Worker, "current_device", 0),
    ]
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, H100.warp_size))
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, staticmethod(lambda *_, a=answer: a)))
        stack.enter_context(patch.object(driver, "_active", target))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", stop))
        # The compiler's workers may write there yet while it is deleted.
        folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        stack.enter_context(patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder))
        for operator in (x for name, x in OPDEFS.items() if name.startswith("megacpp::")):
            form = functools.partial(_without_gpu, operator._abstract_fn)
            stack.enter_context(patch.object(operator, "_abstract_fn", form))
        for asked in (has_triton, has_triton_package):  # what they said before is kept
            asked.cache_clear()
            stack.callback(asked.cache_clear)
        stack.enter_context(inductor.patch({"fx_graph_cache": False, **FEWER_LAUNCHES}))
        yield made


def _on_gpu(item: Any) -> Any:
    return GPU if isinstance(item, torch.device) else item


def _without_gpu(form: Callable[..., Any], *given: Any) -> Any:
    """Return the results without values of an operator of ours, whose Python runs on a CPU's.

    Without a build of torch for GPUs, some of what it does to a GPU's tensors is an error.
    """
    found = form(*tree_map(functools.partial(_like, device=torch.device("cpu")), given))
    return tree_map(_like, found)


def _like(value: Any, device: torch.device = GPU) -> Any:
    """Return a tensor of the same shape, strides and dtype on a device; another value as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
