"""Bytes that one rank of any mesh stores and sends in an optimizer step, without the ranks.

The step itself is run (parallel/simulate/fake.py), so these are facts about it, not estimates, but
for one thing: of many microbatches only two steps are run, of n and of n + s microbatches; every
further s send what the last s sent. tests/parallel/test_dry_run.py compares with real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacpp.config.schema import Config
from megacpp.model.hybrid import HybridLM
from megacpp.model.stages import as_scheduled
from megacpp.torch_extras import is_dtensor
from parallel.local_shapes import ShardBytes, own_shape, shard_bytes
from parallel.mesh import World
from parallel.plans import row_of
from parallel.simulate.collective_log import PREFERRED, Collective, CollectiveLog
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
    whole_model,
)
from parallel.stages import second_copies

Bytes = dict[str, int]  # by class


class Optimizer(Protocol):
    """Optimizer whose groups have `algorithm` and `param_names`, as optim/muon_adamw.py."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """State of each parameter, by name."""
        ...

    def step(self) -> Any:
        """Update the parameters."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...


@dataclass(frozen=True)
class Dependencies:
    """Functions of packages that this one doesn't import, which a step needs.

    Attributes:
        optimizers: of a materialised model, its configuration and `World.holders`.
        clip: scales its gradients by their norm over all ranks, in which some don't count; other
            numbers travel along with it.
        prepare: prepares the blocks of a model before they are sharded.
    """

    optimizers: Callable[[HybridLM, Config, Sequence[dist.ProcessGroup]], Optimizer]
    clip: Callable[[HybridLM, Config, Sequence[nn.Parameter], Tensor], Any]
    prepare: Callable[[Config], Callable[[HybridLM], object]]


class CollectiveKind(NamedTuple):
    """Calls that a report adds up."""

    axis: str
    kind: str
    dtype: torch.dtype


@dataclass(frozen=True)
class CollectiveTraffic:
    """Calls of a kind in a step, and the bytes of the larger side of each."""

    count: int
    bytes: int


@dataclass(frozen=True)
class DryRun:
    """Bytes that a rank stores and sends.

    Classes of parameters: routed `experts`; `replicated`, which every rank of `tp` has whole (only
    the data axes cut them); `dense`, all others.

    Attributes:
        degrees, coordinates: of each axis, and this rank's place on it.
        parameters, gradients: bytes by class.
        state: bytes of optimizer state by algorithm and class.
        shard_bytes: parameter bytes of all ranks.
        model_bytes: parameter bytes of the model before any mesh.
        traffic: of one optimizer step.
        traced: microbatches of the steps that were run.
    """

    degrees: dict[str, int]
    coordinates: dict[str, int]
    parameters: Bytes
    gradients: Bytes
    state: dict[str, Bytes]
    shard_bytes: ShardBytes
    model_bytes: int
    traffic: dict[CollectiveKind, CollectiveTraffic]
    traced: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether all ranks together store the model, each element counted once."""
        return self.shard_bytes.once == self.model_bytes


def dry_run(
    config: Config, size: int, rank: int, dependencies: Dependencies, full: bool = False
) -> DryRun:
    """Return the bytes that rank `rank` of `size` stores, and its collectives in one step.

    Args:
        config: resolved for `size` ranks.
        size: ranks of the run.
        rank: the one that is simulated.
        dependencies: functions of other packages.
        full: run every microbatch, instead of two steps of few.
    """
    config = as_scheduled(as_trained(config))
    total, compressed = config.train.grad_accum, bool(config.recompute.compress)
    few = (total,) if full else few_microbatches(config)
    with fake_world(config, size, rank) as world:
        model = planned_model(config, world, dependencies.prepare(config))
        for p in model.parameters():
            local = p.to_local() if is_dtensor(p) else p
            assert local.shape == own_shape(p), f"{local.shape} of {p.shape}"
        counted = _shard_bytes(model)
        with fake_tensors():
            step = _Step(config, world, model, dependencies)
            logs = [step.run(n) for n in few]
            state = step.state()
        parameters = _by_class(model, dict(model.named_parameters()))
        degrees = world.degrees
        coordinates = {axis: world.coordinate(axis) for axis in degrees}
    return DryRun(
        degrees,
        coordinates,
        parameters,
        step.gradients,
        state,
        counted if config.mesh.pp == 1 and not compressed else count_all(config, size),
        sum(p.numel() * p.itemsize for p in whole_model(config).parameters()),
        _sums(_extrapolate([Counter(map(_identity, log.calls)) for log in logs], few, total)),
        few,
    )


def count_all(config: Config, size: int) -> ShardBytes:
    """Parameter bytes of all ranks: every pipeline stage, every coordinate."""
    by_rank: dict[int, int] = {}
    once = 0
    for stage in range(config.mesh.pp):
        with fake_world(config, size, stage * (size // config.mesh.pp)) as world:
            found = _shard_bytes(planned_model(config, world))
        by_rank |= found.by_rank
        once += found.once
    return ShardBytes(by_rank, once)


def _shard_bytes(model: HybridLM) -> ShardBytes:
    return shard_bytes(model.parameters(), second_copies(model))


def class_of(model: HybridLM, name: str, parameter: Tensor) -> str:
    """Return the class of a parameter: `dense`, `experts` or `replicated`.

    Args:
        model: that has it.
        name: of the parameter.
        parameter: any shape.
    """
    if row_of(model, name).dim_on("ep") is not None:
        return "experts"
    if is_dtensor(parameter):
        names = parameter.device_mesh.mesh_dim_names or ()
        if "tp" in names and parameter.placements[names.index("tp")].is_replicate():
            return "replicated"
    return "dense"


def few_microbatches(config: Config) -> tuple[int, ...]:
    """Microbatches of the steps that stand for one of `train.grad_accum`.

    From the second on they are alike. Through a pipeline it takes rounds of `pp`, and the last
    ranks must have theirs before the first are done. A divisor of microbatches is counted by as
    many numbers, so that no step stands for another.
    """
    total, stride = config.train.grad_accum, config.mesh.pp
    if config.train.divisor == "microbatches":
        return (total,)
    first = 1 if stride == 1 else 2 * stride + total % stride
    return (total,) if total <= first + stride else (first, first + stride)


class _Step:
    """Model under fake tensors that takes optimizer steps as train.py does."""

    def __init__(
        self, config: Config, world: World, model: HybridLM, dependencies: Dependencies
    ) -> None:
        self.config, self.world, self.model, self.dependencies = config, world, model, dependencies
        model.to_empty(device=world.device)
        self.optimizer = dependencies.optimizers(model, config, world.holders)
        self.boundary = FakeBoundary(model, world, config)
        self.batch = fake_batch(config)
        self.gradients: Bytes = {}

    def run(self, microbatches: int) -> CollectiveLog:
        """Run one optimizer step and return its collectives."""
        with CollectiveLog(self.world.meshes) as log:
            sums = self.boundary.accumulate([self.batch] * microbatches)
            self.dependencies.clip(self.model, self.config, self.boundary.copies, sums.along)
            self.optimizer.step()
            grads = {name: p.grad for name, p in self.model.named_parameters()}
            self.optimizer.zero_grad()
            self.boundary.finish_step()
        self.gradients = _by_class(self.model, {n: g for n, g in grads.items() if g is not None})
        return log

    def state(self) -> dict[str, Bytes]:
        """Bytes of optimizer state by algorithm and class."""
        found: dict[str, Bytes] = {}
        for group in self.optimizer.param_groups:
            of_class = found.setdefault(group["algorithm"], {})
            for name, p in zip(group["param_names"], group["params"], strict=True):
                kind = class_of(self.model, name, p)
                held = sum(map(_local_bytes, self.optimizer.state[p].values()))
                of_class[kind] = of_class.get(kind, 0) + held
        return found


def _by_class(model: HybridLM, tensors: Mapping[str, Tensor]) -> Bytes:
    """Bytes that this rank stores of tensors by the name of their parameter."""
    found: Bytes = {}
    for name, t in tensors.items():
        kind = class_of(model, name, model.get_parameter(name))
        found[kind] = found.get(kind, 0) + _local_bytes(t)
    return found


def _local_bytes(t: Tensor) -> int:
    local = t.to_local() if is_dtensor(t) else t
    if is_traceable_wrapper_subclass(local):  # packed moments: codes and scales
        names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(_local_bytes(getattr(local, name)) for name in names)
    return local.numel() * local.itemsize


Identity = tuple[CollectiveKind, int]  # and the bytes of one call


def _identity(call: Collective) -> Identity:
    return CollectiveKind(call.axis, call.kind, call.dtype), call.bytes


def _extrapolate(
    logs: Sequence[Counter[Identity]], microbatches: Sequence[int], total: int
) -> dict[Identity, int]:
    """Return the calls of a step of `total` microbatches from those of steps of fewer."""
    if len(logs) == 1:
        return dict(logs[0])
    (first, second), (n, m) = logs, microbatches
    times, rest = divmod(total - n, m - n)
    assert rest == 0 and first.keys() <= second.keys(), f"{total} microbatches from {n} and {m}"
    found = {call: first[call] + times * (count - first[call]) for call, count in second.items()}
    assert all(count >= 0 for count in found.values()), "fewer calls for more microbatches"
    return found


def _sums(calls: Mapping[Identity, int]) -> dict[CollectiveKind, CollectiveTraffic]:
    """Sum calls by axis, kind and dtype, in the order of the axes."""
    found: dict[CollectiveKind, CollectiveTraffic] = {}
    for (kind, size), count in calls.items():
        before = found.get(kind, CollectiveTraffic(0, 0))
        found[kind] = CollectiveTraffic(before.count + count, before.bytes + count * size)
    order = sorted(found, key=lambda k: (_place(k.axis), k.kind, str(k.dtype)))
    return {kind: found[kind] for kind in order}


def _place(axis: str) -> int:
    return PREFERRED.index(axis) if axis in PREFERRED else len(PREFERRED)
