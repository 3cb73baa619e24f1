"""Traces of blocks, made by running them on the trainer's own model without values.

    trace_blocks([request])     # megacpp/memory/block_trace.py

The block is built, cut over tp and cp and given its recompute policy by the functions that build
every run. FSDP2 is left out: its gathered weights are weights of the compute dtype. Tensors are on
the meta device, where an operator takes microseconds; where autocast is to cast they are fake ones
of a CPU, since the meta device has no autocast.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.block import BlockMeter, as_unit
from checkpointing.tracing.graphs import TracedGraphs, replayed_flops
from checkpointing.tracing.host_ledger import HostLedger
from megacpp.blocks.attention.sparse import freeze_all_but_indexers
from megacpp.blocks.engram.module import look_ahead
from megacpp.blocks.hyper_connections.groups import InGroup
from megacpp.data.batches import Batch
from megacpp.kernels.backend import set_kernels
from megacpp.memory.block_trace import BlockRequest, BlockTrace
from megacpp.memory.forms.units import UPCASTS
from megacpp.model.head import LossSum
from megacpp.model.hybrid import HybridLM, begin, collapsed, finish
from megacpp.model.pattern import ENTRANCE
from megacpp.model.precision import compute_dtype
from megacpp.model.regions import NOTHING
from megacpp.outcome import end_with
from parallel.context.layout import ContextLayout
from parallel.mesh import World
from parallel.simulate.fake import (
    fake_batch,
    fake_tensors,
    fake_world,
    meta_mode_left,
    meta_tensors,
    run_on_meta,
)
from parallel.simulate.stand_ins import given_batch
from parallel.simulate.traced_kernels import traced_kernels

UNITS = (
    "ngram",
    "blocks",
    "mtp",
    "top",
    "head",
)  # parts that FSDP2 gathers; as in parallel/fsdp.py
TOLD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CPU, META = torch.device("cpu"), torch.device("meta")


def trace_blocks(requests: Sequence[BlockRequest]) -> list[BlockTrace]:
    """Run every block that is asked for, in order.

    A rank of a run has a process group, and can't be a rank of another mesh: a process of its own
    runs the blocks there.

    Raises:
        RuntimeError: that process died.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return list(map(_trace_block, requests))
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_traces, args=(theirs, requests, os.getpid()))
    resource_tracker.ensure_running()  # which unblocks signals when it starts
    # Schedulers and terminals signal every process; one that inherits a mask hears nothing.
    own = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, own)
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        raise RuntimeError("the process that traces blocks died") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _send_traces(to: Connection, requests: Sequence[BlockRequest], parent: int) -> None:
    end_with(parent)
    try:
        to.send(list(map(_trace_block, requests)))
    except Exception as error:
        to.send(error)


def _trace_block(request: BlockRequest) -> BlockTrace:
    mesh = request.config.mesh
    size = mesh.tp * mesh.cp * mesh.dp_shard
    with _uncollected(), fake_world(request.config, size, request.context * mesh.tp) as world:
        return _traced(request, world)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: a trace makes many objects, which have no memory of a device."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _traced(request: BlockRequest, world: World) -> BlockTrace:
    config, mesh = request.config, request.config.mesh
    dtype = compute_dtype(config.precision, CPU)
    casts = not request.sharded and dtype in (torch.bfloat16, torch.float16)
    faked = casts or config.precision.fp8 != "off"
    faked |= config.train.compile != "off"  # AOTAutograd takes fake tensors alone
    device, gpu = CPU if faked else META, config.train.device == "cuda"
    with META:
        model = HybridLM(config.model).to(torch.float32 if casts else dtype)
    if request.frozen:
        freeze_all_but_indexers(model)
    if world.parallel:
        from parallel.apply import parallelize_blocks  # imports FSDP2

        parallelize_blocks(model, config, world, balanced=mesh.ep > 1)
    set_kernels(model, traced_kernels(config))
    ac = _recompute(request, device)
    HostLedger.instead(ac)
    ac.graphs = TracedGraphs
    ac(model)
    ledger = ac.offloader if isinstance(ac.offloader, HostLedger) else None
    values = meta_tensors(gpu)
    if faked:
        values = fake_tensors(memory=True, every_chunk=False, gpu=gpu)
    with values, given_batch(model, dict(request.counts), request.document):
        if faked:
            model.to_empty(device=device)
        with device:
            batch = _batch(request, world)
        B, T = batch.ids_BT.shape
        before = request.kinds[0] == ENTRANCE[0]  # of the streams
        dims = (config.model.dim,) if before else config.model.stream_dims
        x_BTD = torch.empty(
            (B, T // mesh.tp, *dims),
            dtype=dtype,
            device=device,
            requires_grad=request.reached,
        )
        cast = torch.autocast("cpu", dtype) if casts else nullcontext()
        names, forward = _parts(request, model.train(), batch, x_BTD, cast)
        for name in names if request.sharded else ():
            if name.partition(".")[0] in UNITS:
                as_unit(model.get_submodule(name))
        if request.sharded and UPCASTS:
            _upcast_replicated(model)
        own = nullcontext() if faked else meta_mode_left()
        with own, BlockMeter(model, names, ledger, None if faked else run_on_meta) as meter:
            meter.run(forward, x_BTD, cast, request.split)
        return replace(meter.trace(), replayed=_replayed(model, names))


def _replayed(model: HybridLM, names: Sequence[str]) -> int | None:
    """Return `BlockTrace.replayed` of parts that were traced together."""
    found = [replayed_flops(model.get_submodule(name)) for name in names]
    return sum(found) if all(found_one is not None for found_one in found) else None  # type: ignore[arg-type]


def _recompute(request: BlockRequest, device: torch.device) -> ActivationCheckpointing:
    """Return the policy of the request: regions by layer, and layers that are one group."""
    number, first = len(request.pieces), _first(request)
    behind = request.config.model.depth - first - number
    regions = [*[NOTHING] * first, *request.pieces, *[NOTHING] * behind]
    ac = ActivationCheckpointing(request.config, device, regions)
    if request.config.recompute.mhc_group_size > 0:
        group = [InGroup(place, place + 1 == number) for place in range(number)]
        ac.groups = [*[None] * first, *group, *[None] * behind]
    return ac


def _first(request: BlockRequest) -> int:
    """Return the number of the first traced layer; the last layer of the model isn't traced."""
    return request.config.model.depth - 1 - len(request.pieces)


def _upcast_replicated(model: HybridLM) -> None:
    """Take gradients of parameters that tp replicates in fp32, as FSDP2 does since torch 2.15."""
    for p in model.parameters():
        if isinstance(p, DTensor) and any(x.is_replicate() for x in p.placements):
            p.grad_dtype = torch.promote_types(p.dtype, torch.float32)


def _parts(
    request: BlockRequest,
    model: HybridLM,
    batch: Batch,
    x_BTD: Tensor,
    autocast: AbstractContextManager[object],
) -> tuple[list[str], Callable[[Tensor], Tensor | LossSum]]:
    """Return the names of the traced parts, and their forward.

    Args:
        request: names the parts.
        model: whose parts run.
        batch: of the rank.
        x_BTD: input of layers in front, whose choice of keys the traced ones share.
        autocast: under which they run.
    """
    docs = model.documents(batch.ids_BT, batch.labels_BT, batch.docs)
    if request.kinds[0] == ENTRANCE[0]:
        return [*request.kinds], lambda _: begin(model, batch.ids_BT, docs)
    if not request.pieces:

        def ends(x_BTD: Tensor) -> LossSum:
            return finish(model, collapsed(model, x_BTD), batch.labels_BT, docs)

        return [*request.kinds], ends
    look_ahead(model.blocks.values(), docs)
    first = _first(request)
    with torch.no_grad(), autocast:
        for i in range(first):
            model.blocks[str(i)](x_BTD, docs)
    numbers = [str(first + place) for place in range(len(request.pieces))]

    def forward(x_BTD: Tensor) -> Tensor:
        for number in numbers:
            x_BTD = model.blocks[number](x_BTD, docs)
        return x_BTD

    return [f"blocks.{number}" for number in numbers], forward


def _batch(request: BlockRequest, world: World) -> Batch:
    """Return a rank's tokens; rows are packed."""
    config, mesh = request.config, request.config.mesh
    batch = fake_batch(config)
    if config.model.needs_full_row:
        batch = batch.with_tokens()
    if mesh.cp == 1:
        return batch
    layout = ContextLayout.for_rank(mesh.cp_order, world.coordinate("cp"), mesh.cp)
    return batch.take(layout.index(config.data.seq_len), layout.per_rank)
