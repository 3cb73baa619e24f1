"""Predicted time of an optimizer step of one rank, by part.

    predict(step, gpu("H100"), Rates()).step_s

A step is a list of blocks with the operators and collectives of one microbatch on one rank, and the
policy by which parameters and gradients travel. bench/published.py predicts other people's runs by
these functions, megacpp/cli/speed.py our own.

What isn't modelled is named in `NOT_MODELLED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from megacpp.model.stage_actions import Actions
from megacpp.speed import collectives
from megacpp.speed.collectives import AxisSpread
from megacpp.speed.hardware import GpuSpec, Rates
from megacpp.speed.operators import Attend, Operator, Passes, Product, SerialWork, seconds
from megacpp.speed.pipeline import StageTime, pipeline_seconds, simulate
from megacpp.speed.streams import UnitTime, fsdp_seconds
from megacpp.speed.travel import Travel, added_seconds, slowed_by, travel_times

STEP_OPERATORS = 3  # of a token of a recurrence where no kernel runs it whole
BESIDE = 0.9  # of the time of products, in which a collective can hide

# Measured over predicted steps: four of five of the torchtitan and MosaicML rows that no constant
# was fitted to lie between (python -m bench.published).
MEASURED = (0.96, 1.12)
NOT_MODELLED = (
    "clocks that fall during a step, ranks of unequal speed, experts of unequal load, rows of "
    "documents, host synchronisation in routers, what is kept on the host or in 4 bits, data "
    "loading, checkpoints, evaluation"
)


class Transfer(NamedTuple):
    """Collective inside a block.

    Attributes:
        axis: mesh axis.
        kind: see `collectives.seconds`.
        bytes: of the larger side.
        hidden: what it runs beside in the same pass, as far as that lasts: `products`; `attend`,
            attention with the keys that the rank has before any other's arrive; or `all`, a pass of
            another microbatch.
        share: part of these that it can run beside.
    """

    axis: str
    kind: str
    bytes: float
    hidden: str = ""
    share: float = 1.0


class BlockWork(NamedTuple):
    """Operators and collectives of one block for one microbatch on one rank.

    Attributes:
        kind: name in the budget.
        forward: operators.
        backward: operators, with those of recomputation.
        sent_forward: collectives of the forward.
        sent_backward: collectives of the backward, with those of recomputation.
        dense: parameters that the data axes share.
        experts: parameters that the axes of experts share.
        launches: operators that the host issues in forward and backward; 0: a graph is replayed.
    """

    kind: str
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    sent_forward: tuple[Transfer, ...] = ()
    sent_backward: tuple[Transfer, ...] = ()
    dense: float = 0.0
    experts: float = 0.0
    launches: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class StepWork:
    """Optimizer step of one rank.

    Attributes:
        blocks: all blocks of the model, in order.
        axes: spread of each axis over nodes; `data` and `expert_data` carry parameters.
        microbatches: of a step.
        data: `fsdp` gathers and reduces by block, `zero1` gathers once and reduces once a step,
            `ddp` reduces once, `none`.
        gather_bytes: of a parameter that is gathered.
        reduce_bytes: of a gradient that is reduced.
        copied: gathered parameters are copied to their places, gradients to a buffer, and those of
            microbatches are added up apart, as FSDP2 does.
        overlapped: communication of the data axes runs beside compute.
        reshard: see `fsdp_tasks`.
        resident: see `fsdp_tasks`.
        prefetch: see `fsdp_tasks`.
        reduce_each: see `fsdp_tasks`.
        stages: blocks of each pipeline stage, by number; empty: one stage.
        schedule: of the pipeline.
        actions: of a schedule that `pipeline.schedule` doesn't know.
        stage_bytes: of an activation that stages hand on.
        stage_gathers: how often a pipeline gathers its weights in a step.
        optimizer: operators of the optimizer's step.
        optimizer_sent: collectives of it.
        tokens: of a step on one GPU, for the speed.
        flops: of a step on one GPU, forward and backward once, for MFU.
    """

    blocks: Sequence[BlockWork]
    axes: Mapping[str, AxisSpread] = field(default_factory=dict)
    microbatches: int = 1
    data: Literal["fsdp", "zero1", "ddp", "none"] = "none"
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    copied: bool = False
    overlapped: bool = True
    reshard: bool = True
    resident: bool = False
    prefetch: int | None = 1
    reduce_each: bool = False
    stages: Sequence[Sequence[int]] = ()
    schedule: str = "1f1b"
    actions: Actions = ()
    stage_bytes: float = 0.0
    stage_gathers: int = 1
    optimizer: tuple[Operator, ...] = ()
    optimizer_sent: tuple[Transfer, ...] = ()
    tokens: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Predicted step.

    Attributes:
        step_s: seconds.
        parts: seconds by part, which sum to `step_s`.
        blocks: compute by kind of block, in seconds of a step on one rank.
        tokens_per_s: of one GPU; 0: not asked for.
        mfu: model FLOPs a second over the peak of bf16; 0: not asked for.
        launches: operators that the host sends, by kind of block, for a step on one rank.
    """

    step_s: float
    parts: dict[str, float]
    blocks: dict[str, float]
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    launches: dict[str, int] = field(default_factory=dict)


class PassTime(NamedTuple):
    """Seconds of a block's pass: in all, and by part."""

    total: float
    parts: tuple[tuple[str, float], ...]


@lru_cache(maxsize=1 << 14)
def pass_seconds(
    operators: tuple[Operator, ...],
    sent: tuple[Transfer, ...],
    spreads: tuple[tuple[str, AxisSpread], ...],
    launches: int,
    gpu: GpuSpec,
    rates: Rates,
) -> PassTime:
    """Return the time of a block's forward or backward, with the collectives inside it.

    Args:
        operators: in order.
        sent: collectives; their axes have to be among `spreads`, or have one rank.
        spreads: axes.
        launches: operators that the host issues; it may take longer than the GPU.
        gpu: which runs them.
        rates: constants.
    """
    parts: dict[str, float] = defaultdict(float)
    for op in operators:
        parts[part_of(op)] += seconds(op, gpu, rates)
    if launches:
        parts["memory-bound"] += gpu.pass_us * 1e-6 * sum(isinstance(o, Passes) for o in operators)
    compute = sum(parts.values())
    if gpu.on_host:  # which has no kernel of several products
        launches += sum(o.count - 1 for o in operators if isinstance(o, Product))
        launches += sum(
            STEP_OPERATORS * int(o.steps) for o in operators if isinstance(o, SerialWork)
        )
    wait = launches * gpu.launch_us * 1e-6
    if not gpu.on_host:
        wait = max(0.0, wait - compute)
    if wait:
        parts["host"] += wait
    axes = dict(spreads)
    beside = {"products": BESIDE * parts["products"], "attend": parts["attention"]}
    beside["all"] = BESIDE * compute
    for axis, kind, count, hidden, share in sent:
        group = axes.get(axis)
        if group is None or group.size == 1:
            continue
        time = collectives.seconds(kind, count, group, gpu)
        if hidden:
            room = share * beside[hidden] / (group.size if hidden == "attend" else 1)
            open_ = max(time / group.size, time - room)
            beside[hidden] -= time - open_
            parts[f"slowed by {axis}"] += (time - open_) * slowed_by(kind, count, group, gpu)
            time = open_
        parts[f"exposed {axis}"] += time
    return PassTime(sum(parts.values()), tuple(parts.items()))


def part_of(op: Operator) -> str:
    """Return the part of the budget that an operator belongs to."""
    if isinstance(op, Attend):
        return "attention"
    if isinstance(op, SerialWork):
        return "recurrences"
    assert isinstance(op, Product | Passes)
    return op.what


def predict(step: StepWork, gpu: GpuSpec, rates: Rates) -> StepTime:
    """Return the predicted time of a step."""
    passes = passes_of(step, gpu, rates)
    if len(step.stages) > 1:
        parts, mine = _pipelined(step, passes, gpu, rates)
    else:
        parts, mine = _one_stage(step, passes, gpu, rates), range(len(passes))
    blocks: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for number in mine:
        block, time = step.blocks[number], sum(found.total for found in passes[number])
        blocks[block.kind] += time * step.microbatches
        launches[block.kind] += sum(block.launches) * step.microbatches
    if added := added_seconds(step, mine, gpu, rates):
        parts["copied data"] = parts.get("copied data", 0.0) + added
    parts["optimizer"] = optimizer_seconds(step, gpu, rates)
    total = sum(parts.values())
    mfu = step.flops / total / (gpu.bf16_tflops * 1e12) if total else 0.0
    parts = {name: time for name, time in parts.items() if time > 1e-12 * total}
    speed = step.tokens / total if total else 0.0
    return StepTime(total, parts, dict(blocks), speed, mfu, dict(launches))


def least_seconds(step: StepWork, gpu: GpuSpec, rates: Rates) -> float:
    """Return seconds that no step is shorter than: nothing is exposed or waits for other ranks."""
    times = [forward.total + backward.total for forward, backward in passes_of(step, gpu, rates)]
    stages = [sum(times[block] for block in stage) for stage in step.stages] or [sum(times)]
    ranks = step.axes["pp"].size if step.stages else 1
    owned = (sum(stages) / ranks, *(stages if len(stages) == ranks else ()))
    return step.microbatches * max(owned) + optimizer_seconds(step, gpu, rates)


def passes_of(step: StepWork, gpu: GpuSpec, rates: Rates) -> list[tuple[PassTime, PassTime]]:
    """Return the time of each block's forward and backward."""
    spreads = tuple((axis, step.axes[axis]) for axis in ("tp", "cp", "ep") if axis in step.axes)
    made: dict[int, tuple[PassTime, PassTime]] = {}
    found = []
    for b in step.blocks:
        if id(b) not in made:
            made[id(b)] = (
                pass_seconds(b.forward, b.sent_forward, spreads, b.launches[0], gpu, rates),
                pass_seconds(b.backward, b.sent_backward, spreads, b.launches[1], gpu, rates),
            )
        found.append(made[id(b)])
    return found


def optimizer_seconds(step: StepWork, gpu: GpuSpec, rates: Rates) -> float:
    """Return the time of the optimizer's step with its collectives."""
    sent = [t for t in step.optimizer_sent if t.axis in step.axes]
    return sum(seconds(op, gpu, rates) for op in step.optimizer) + sum(
        collectives.seconds(t.kind, t.bytes, step.axes[t.axis], gpu) for t in sent
    )


def _one_stage(
    step: StepWork, passes: Sequence[tuple[PassTime, PassTime]], gpu: GpuSpec, rates: Rates
) -> dict[str, float]:
    """Return the time of all microbatches by part, without a pipeline."""
    parts: dict[str, float] = defaultdict(float)
    for pair in passes:
        for found in pair:
            for name, time in found.parts:
                parts[name] += time * step.microbatches
    travels = travel_times(step, range(len(step.blocks)), gpu, rates)
    units = unit_times(step, passes, gpu, rates)
    if not step.overlapped or step.data in ("ddp", "zero1"):
        _add_data(parts, step, travels, units)
        return parts
    _, exposed = fsdp_seconds(
        units, step.microbatches, step.prefetch, step.reshard, step.reduce_each, step.resident
    )
    first = 1 if step.resident else step.microbatches
    again = step.microbatches if step.reshard and not step.resident else 0  # for the backward
    reductions = step.microbatches if step.reduce_each else 1
    often = [(first + again, reductions)] * (len(travels) - 1) + [(first, reductions)]
    moved = sum(a * t.gather + b * t.reduce for t, (a, b) in zip(travels, often, strict=True))
    exposed = moved if gpu.on_host else exposed
    slowed, copied = (
        sum(a * one[0] + b * one[1] for one, (a, b) in zip(each, often, strict=True))
        for each in ([t.slows for t in travels], [t.copies for t in travels])
    )
    parts["copied data"] += copied
    parts["exposed data"] += exposed
    if moved:
        parts["slowed by data"] += slowed * max(0.0, 1 - exposed / moved)
    return parts


def unit_times(
    step: StepWork, passes: Sequence[tuple[PassTime, PassTime]], gpu: GpuSpec, rates: Rates
) -> list[UnitTime]:
    """Return the times of a microbatch's blocks as FSDP units.

    Args:
        step: whose blocks they are.
        passes: time of each block's forward and backward.
        gpu: which runs them.
        rates: constants.
    """
    travels = travel_times(step, range(len(step.blocks)), gpu, rates)
    return [
        UnitTime(forward.total, backward.total, travel.gather, travel.reduce, block.kind)
        for block, (forward, backward), travel in zip(step.blocks, passes, travels, strict=True)
    ]


def stage_times(step: StepWork, passes: Sequence[tuple[PassTime, PassTime]]) -> list[StageTime]:
    """Return the times of a microbatch in each pipeline stage; weights take half a backward."""
    found = []
    for stage in step.stages:
        backward = sum(passes[b][1].total for b in stage)
        found.append(StageTime(sum(passes[b][0].total for b in stage), backward, backward / 2))
    return found


def _add_data(
    parts: dict[str, float], step: StepWork, travels: Sequence[Travel], units: Sequence[UnitTime]
) -> None:
    """Add the exposed time of a step's gathers and of one reduction, and what they slow.

    Overlapped, a gather hides in a forward and the reduction in the last backward, but for one
    block's share.
    """
    times = step.stage_gathers
    gather, reduce = sum(t.gather for t in travels), sum(t.reduce for t in travels)
    parts["copied data"] += sum(times * t.copies[0] + t.copies[1] for t in travels)
    if not step.overlapped or not gather + reduce:
        parts["exposed data"] += times * gather + reduce
        return
    few = max(1, len(units))
    forward, backward = sum(u.forward for u in units), sum(u.backward for u in units)
    found = times * max(gather / few, gather - BESIDE * forward)
    found += max(reduce / few, reduce - BESIDE * backward)
    slowed = sum(times * t.slows[0] + t.slows[1] for t in travels)
    parts["exposed data"] += found
    parts["slowed by data"] += slowed * (1 - found / (times * gather + reduce))


def _pipelined(
    step: StepWork, passes: Sequence[tuple[PassTime, PassTime]], gpu: GpuSpec, rates: Rates
) -> tuple[dict[str, float], Sequence[int]]:
    """Return the time by part of the rank with most to do, and the blocks of its stages."""
    ranks = step.axes["pp"].size
    times = stage_times(step, passes)
    send = collectives.seconds("send", step.stage_bytes, step.axes["pp"], gpu)
    if step.actions:
        total = simulate(step.actions, times, send)
    else:
        total = pipeline_seconds(step.schedule, times, ranks, step.microbatches, send)
    owned = [list(range(rank, len(times), ranks)) for rank in range(ranks)]
    if step.actions:
        owned = [sorted({a.stage for a in actions}) for actions in step.actions]
    own = max(owned, key=lambda stages: sum(times[n].forward + times[n].backward for n in stages))
    mine = [block for stage in own for block in step.stages[stage]]
    parts: dict[str, float] = defaultdict(float)
    for block in mine:
        for found in passes[block]:
            for name, time in found.parts:
                parts[name] += time * step.microbatches
    parts["bubble"] = max(0.0, total - sum(parts.values()))
    units = [UnitTime(passes[b][0].total, passes[b][1].total) for b in mine]
    travels = travel_times(step, mine, gpu, rates)
    _add_data(parts, step, travels, units)
    return parts, mine
