"""What the CPU allocator hands out in a real step: what a traced step must come to.

The profiler sees every allocation of the process, whoever makes it; what was there before it
started doesn't count. So the model gets its memory inside of it.

Gloo's threads hold the buffers of a collective until they look up from it, which is any time after
its result is there. So every collective is waited for, and for the thread to be done with it.
Experts are chosen evenly, as a trace without values takes them to be.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.operators import wraps
from megacpp.blocks.experts.module import MixtureOfExperts
from megacpp.cli.trace import Trainee, microbatches
from megacpp.config.schema import Config
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, initialise, whole
from parallel.boundary import AccumulationBoundary
from parallel.expert.even_routing import EvenRouting
from parallel.mesh import World
from parallel.simulate.fake import as_trained, planned_model
from parallel.start import join

CPU = torch.device("cpu")
MARK = "the step that counts"


class Settled(TorchDispatchMode):
    """After each collective another one, of a number: its group's one thread has left the first."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.zeros(1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(wraps, types)):
            return NotImplemented  # a DTensor turns into local operators first
        out = func(*args, **(kwargs or {}))
        collective = func.namespace in ("c10d", "_c10d_functional")
        if collective and func.overloadpacket.__name__ not in ("send", "recv_"):  # of two alone
            for group in filter(None, map(_group, args)):
                dist.all_reduce(self.number, group=group)
        return out


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective is, or is the name of."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None  # a reduction
    if isinstance(argument, str) and argument in dist.distributed_c10d._world.pg_names.values():
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(argument)
    return None


def allocator_peak(config: Config, size: int, rank: int = 0, watched: int = 0) -> int:
    """Most bytes of the second of two steps on rank `watched`; 0 on others, who play along.

    The process group of `size` ranks exists.
    """
    config = as_trained(config)
    if size == 1:
        return _watched(config, World(0, 1, CPU), whole)
    from parallel.fsdp import shard_slice

    with Settled():
        world = join(config.mesh, CPU)
        if rank == watched:
            return _watched(config, world, shard_slice)
        _steps(_planned(config, world), config, world, shard_slice)
        return 0


def _watched(config: Config, world: World, part: Callable[[Tensor], Slice]) -> int:
    model = _planned(config, world)
    gc.collect()  # the end of what was there before would count as less of what is to come
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(model, config, world, part)
    return _peak(profiler)


def _planned(config: Config, world: World) -> HybridLM:
    model = planned_model(config, world, ActivationCheckpointing(config))
    if config.mesh.ep == 1:
        _choose_evenly(model)
    return model


def _steps(model: HybridLM, config: Config, world: World, part: Callable[[Tensor], Slice]) -> None:
    """A short step, in which FSDP2 makes what stays, and one that counts."""
    model.to_empty(device=CPU)
    initialise(model, model.init_rules(), config.run.seed, part)
    model.train()
    trainee = Trainee.build(model, world, config, AccumulationBoundary)
    trainee.first_step(config)
    with record_function(MARK):
        pass
    trainee.step(config, microbatches(config))


def _choose_evenly(model: HybridLM) -> None:
    """In the place of what routers chose."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.dispatch = EvenDispatch(module.dispatch, EvenRouting.from_config(module.moe))


class EvenDispatch(nn.Module):
    """`Dispatch` of choices that are even."""

    def __init__(self, dispatch: nn.Module, choice: EvenRouting) -> None:
        super().__init__()
        self.dispatch, self.choice = dispatch, choice

    def forward(self, x_TD: Tensor, indices_TK: Tensor, *rest: Any) -> Any:
        return self.dispatch(x_TD, self.choice.indices(len(x_TD), x_TD.device), *rest)


def _peak(profiler: profile) -> int:
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events: list[Any] = results.events()
    began, changes = 0, []
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name() == MARK:
            began = event.start_ns()
    now = most = 0
    for when, change in sorted(changes, key=lambda x: x[0]):
        now += change
        if when > began:
            most = max(most, now)
    return most
