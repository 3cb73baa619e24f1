"""Traces of blocks, made by running them on the trainer's own model without values.

    trace_blocks([request])     # megacpp/memory/block_trace.py

The block is built, cut over tp and cp and given its recompute policy by the functions that build
every run. FSDP2 is left out: its gathered weights are weights of the compute dtype. Tensors are on
the meta device, where an operator takes microseconds; where autocast is to cast they are fake ones
of a CPU, since the meta device has no autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing import get_context

import torch
import torch.distributed as dist

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.block import BlockMeter
from megacpp.kernels.backend import set_kernels
from megacpp.memory.block_trace import BlockRequest, BlockTrace
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import layer_kinds
from megacpp.model.precision import compute_dtype
from megacpp.model.regions import NOTHING
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
from parallel.simulate.gpu_stand_ins import traced_kernels
from parallel.simulate.stand_ins import given_batch

CPU, META = torch.device("cpu"), torch.device("meta")


def trace_blocks(requests: Sequence[BlockRequest]) -> list[BlockTrace]:
    """Run every block that is asked for, in order.

    A rank of a run has a process group, and can't be a rank of another mesh: a process of its own
    runs the blocks there.
    """
    if dist.is_available() and dist.is_initialized():
        with get_context("spawn").Pool(1) as pool:
            return pool.map(_trace_block, requests)
    return list(map(_trace_block, requests))


def _trace_block(request: BlockRequest) -> BlockTrace:
    mesh = request.config.mesh
    size = mesh.tp * mesh.cp * mesh.dp_shard
    with fake_world(request.config, size, request.context * mesh.tp) as world:
        return _traced(request, world)


def _traced(request: BlockRequest, world: World) -> BlockTrace:
    config, mesh = request.config, request.config.mesh
    dtype = compute_dtype(config.precision, CPU)
    casts = not request.sharded and dtype in (torch.bfloat16, torch.float16)
    # SDPA on the meta device is another one, of plain products.
    faked = casts or _runs_sdpa(request)
    with META:
        model = HybridLM(config.model).to(torch.float32 if casts else dtype)
    if world.parallel:
        from parallel.apply import parallelize_blocks  # imports FSDP2

        parallelize_blocks(model, config, world, balanced=mesh.ep > 1)
    set_kernels(model, traced_kernels(config))
    layer = layer_kinds(config.model).index(request.kind)
    again = [request.pieces if i == layer else NOTHING for i in range(config.model.depth)]
    ActivationCheckpointing(config, regions=again)(model)
    device, gpu = CPU if faked else META, config.train.device == "cuda"
    values = meta_tensors(gpu)
    if faked:
        values = fake_tensors(memory=True, every_chunk=False, gpu=gpu)
    with values, given_batch(model, dict(request.counts), request.document):
        if faked:
            model.to_empty(device=device)
        with device:
            docs = _documents(request, world)
        B, T = docs.ids_BT.shape
        stream = torch.float32 if casts else dtype
        x_BTD = torch.empty(
            (B, T // mesh.tp, config.model.dim), dtype=stream, device=device, requires_grad=True
        )
        cast = torch.autocast("cpu", dtype) if casts else nullcontext()
        with torch.no_grad(), cast:
            for i in range(layer):  # whose choice of keys the block shares
                model.blocks[str(i)](x_BTD, docs)
        own = nullcontext() if faked else meta_mode_left()
        with own, BlockMeter(model.train(), None if faked else run_on_meta) as meter:
            meter.run(model.blocks[str(layer)], x_BTD, docs, cast)
        return meter.trace()


def _runs_sdpa(request: BlockRequest) -> bool:
    """Return whether the block attends to all keys by torch's own function."""
    if request.kind[0] != "A" or request.config.kernels.attention != "torch":
        return False
    return "." not in request.kind or request.config.model.attention.sparse.stage == "dense"


def _documents(request: BlockRequest, world: World) -> Documents:
    """Return the documents of a rank's tokens: rows are packed."""
    config, mesh = request.config, request.config.mesh
    batch = fake_batch(config)
    if mesh.cp == 1:
        return batch.docs
    layout = ContextLayout.for_rank(mesh.cp_order, world.coordinate("cp"), mesh.cp)
    return batch.take(layout.index(config.data.seq_len), layout.per_rank).docs
