"""Ranks without peers and models without memory: fake process groups, fake tensors.

The process group is fake (peers answer at once, with anything), the model is built on the meta
device by the functions that build every run, and its tensors are fake: they have shapes and types,
no values. So the effects of a mesh on a model can be seen, for any number of ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from megacpp.config.mix import source_folders
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.boundary import AccumulationBoundary
from parallel.build import plan_model
from parallel.mesh import World
from parallel.simulate.cpu_attention import cpu_attention
from parallel.simulate.gpu_stand_ins import on_gpu
from parallel.simulate.shapes import ResultShapes
from parallel.simulate.stand_ins import memory_stand_ins, stand_ins
from parallel.start import join

CPU = torch.device("cpu")
_SHAPES = ResultShapes()  # for all traces of a process


@contextmanager
def fake_world(config: Config, size: int, rank: int = 0, meshes: bool = False) -> Iterator[World]:
    """Yield the world of rank `rank` of `size` without other processes.

    No process group may exist.

    Args:
        config: its `mesh` must be resolved.
        size: number of ranks.
        rank: of this process.
        meshes: make them for one rank as well, as a pipeline's stage of one rank has them.
    """
    if size == 1 and not meshes:
        yield World(0, 1, CPU)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    # "2 sequential all_gather ...": DTensor about layouts that FSDP2 chose.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    hook = sys.excepthook  # of each group torch wraps it in another, which prefixes every line
    if "meta" not in (devices := dist.Backend.backend_capability["fake"]):
        devices.append("meta")  # point to point looks for the backend of a tensor's device
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    sys.excepthook = hook
    try:
        yield join(config.mesh, CPU)
    finally:
        dist.destroy_process_group()
        # DTensor remembers results by meshes that compare equal to those of another rank.
        _clear_sharding_prop_cache()


@contextmanager
def fake_tensors(
    memory: bool = False, every_chunk: bool = True, gpu: bool = False
) -> Iterator[None]:
    """Make tensors without values inside of the block; local work is replaced by its shape.

    Args:
        memory: replace only what keeps and computes the same (parallel/simulate/stand_ins.py).
        every_chunk: see there.
        gpu: allocate as on a GPU (parallel/simulate/gpu_stand_ins.py).
    """
    instead = memory_stand_ins(every_chunk) if memory else stand_ins()
    device = on_gpu() if gpu else nullcontext()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _RealStaysReal(fake), _real_offsets(), instead, device:
        yield


@contextmanager
def meta_tensors(gpu: bool = False) -> Iterator[None]:
    """Run on the meta device as `fake_tensors` does, at a tenth of the time.

    The meta device has no autocast. Peers take what is sent, and send memory.

    Args:
        gpu: allocate as on a GPU (parallel/simulate/gpu_stand_ins.py).
    """
    device = on_gpu() if gpu else nullcontext()
    few = memory_stand_ins(every_chunk=False)
    with _OnMeta(), _no_autocast_on_meta(), cpu_attention(), few, device:
        yield


@contextmanager
def _no_autocast_on_meta() -> Iterator[None]:
    """Let kernels turn autocast off on a device that has none, which torch refuses."""
    original = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else original(device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]


@contextmanager
def _real_offsets() -> Iterator[None]:
    """Let a DTensor read the offsets of its strided shards, from tensors that would be fake.

    Shapes alone are asked for, and torch 2.13 makes no more than these (pytorch#184945).
    """
    plain = _StridedShard.local_shard_size_and_offset

    def with_values(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return plain(*args, **kwargs)

    _StridedShard.local_shard_size_and_offset = with_values
    try:
        yield
    finally:
        _StridedShard.local_shard_size_and_offset = plain


def as_trained(config: Config, compiled: bool = False) -> Config:
    """Return the configuration with `auto` as bf16, as on a GPU, unless the run is on a CPU.

    Args:
        config: configuration of the run.
        compiled: leave compiled blocks as they are: the caller has graphs of tensors without values
            (checkpointing/tracing/graphs.py), which torch.compile doesn't take.
    """
    if not compiled:
        config = replace(config, train=replace(config.train, compile="off"))
    if config.train.device == "cpu":
        return config
    precision, optim = config.precision, config.optim
    if precision.dtype == "auto":
        precision = replace(precision, dtype="bf16")
    if optim.muon_dtype == "auto" and precision.dtype != "fp64":
        optim = replace(optim, muon_dtype="bf16")
    return replace(config, precision=precision, optim=optim)


def whole_model(config: Config) -> HybridLM:
    """Return the model on the meta device, without a mesh."""
    return plan_model(config, World(0, 1, CPU))


def planned_model(
    config: Config, world: World, prepare: Callable[[HybridLM], object] | None = None
) -> HybridLM:
    """Return the model on the meta device, parallelized: `build_model` then materialises it.

    Where experts lie on several ranks they are chosen evenly: sizes can't depend on values here.
    """
    return plan_model(config, world, prepare, balanced=config.mesh.ep > 1)


def fake_batch(config: Config) -> Batch:
    """Return the rows of a rank's microbatch; make it where tensors are fake."""
    shape = config.train.device_batch_size, config.data.seq_len
    ids_BT = torch.zeros(shape, dtype=torch.int64)
    numel, docs, rows = ids_BT.numel(), Documents.from_ids(ids_BT), tuple(range(shape[0]))
    mixed = len(source_folders(config.data))  # losses by source are summed beside the whole one
    sources_SB = torch.zeros(mixed, shape[0], dtype=torch.float64) if mixed else None
    return Batch(ids_BT, ids_BT, docs, numel, numel, rows, sources_SB)


class FakeBoundary(AccumulationBoundary):
    """Accumulation boundary without peers to agree with."""

    def __init__(self, model: HybridLM, world: World, config: Config) -> None:
        super().__init__(model, world, config)
        if self.pipeline is not None:
            self.pipeline.dry = True


class _OnMeta(TorchDispatchMode):
    """Operators on the meta device, by `run_on_meta`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs as much as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if DTensor in types else run_on_meta(func, args, kwargs or {})


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the meta device: shapes are remembered, collectives return at once.

    Args:
        func: operator.
        args: of it.
        kwargs: of it.
    """
    if func is torch.ops._c10d_functional.wait_tensor.default:
        return args[0]
    if func.namespace == "c10d":  # point to point: memory is the caller's
        from torch._C._distributed_c10d import FakeWork

        return FakeWork().boxed()
    return _SHAPES.run(func, args, kwargs)


@contextmanager
def meta_mode_left() -> Iterator[None]:
    """Leave the mode of `meta_tensors` for another one, which runs operators by `run_on_meta`."""
    with _pop_mode_temporarily() as popped:
        assert isinstance(popped, _OnMeta), popped
        yield


class _RealStaysReal(TorchDispatchMode):
    """Real tensors (ranks of a mesh) keep their values; values read of others are made up.

    A fraction is 1.0 and a truth value true: the host looks at a scale or a norm to see whether
    there is something to do. A whole number must be real: it could be a size.

    Args:
        fake: mode in which other tensors are fake.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `_OnMeta`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let DTensor turn into local operators first
        if FakeTensor in types:
            if func is torch.ops.prim.device.default:
                return args[0].fake_device  # more than half of all calls, so the short way
            if func is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]  # as of real tensors: no memory of its own
            if func is torch.ops.aten._local_scalar_dense.default:
                if args[0].is_floating_point():
                    return 1.0
                if args[0].dtype == torch.bool:
                    return True
            return _SHAPES.run(func, args, kwargs or {}, self._fake)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not tensors or any(t.is_meta for t in tensors):
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))
