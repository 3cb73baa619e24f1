"""Seconds in which parameters are gathered and gradients are reduced, block by block.

    travel_times(step, range(len(step.blocks)), gpu("H100"), Rates())[0].gather

Beside the time on the links there is that of FSDP2's copies, and what other kernels lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megacpp.speed import collectives
from megacpp.speed.collectives import AxisSpread
from megacpp.speed.hardware import GpuSpec, Rates
from megacpp.speed.operators import memory_seconds

if TYPE_CHECKING:
    from megacpp.speed.step import BlockWork, StepWork

# Seconds that kernels lose to a collective beside them, for each second that its bytes would take
# inside a node: it takes SMs and memory bandwidth. From runs of one model with and without
# recomputation (mpt-7b, mpt-13b on 8 to 64 H100): 0.4 to 0.7.
SLOWED = 0.5
# SMs that an exchange of experts' rows holds as long as it lasts, however slow its links are:
# Megatron-LM's default for DeepEP (moe_deepep_num_sms).
EXCHANGE_SMS = 20


class Travel(NamedTuple):
    """Seconds to gather a block's parameters and to reduce its gradients.

    `slows` are the seconds that each takes from kernels beside it, `copies` those of the copies
    behind a gather and before a reduction.
    """

    gather: float
    reduce: float
    slows: tuple[float, float]
    copies: tuple[float, float]


def slowed_by(kind: str, count: float, group: AxisSpread, gpu: GpuSpec) -> float:
    """Return the seconds that kernels lose for each second of a collective beside them.

    An all-to-all between nodes is slow for lack of links, and takes little of the memory's
    bandwidth: `SLOWED` counts as long as its bytes would take inside a node.

    Args:
        kind: see `collectives.seconds`.
        count: see `collectives.seconds`.
        group: its ranks.
        gpu: which runs the kernels.
    """
    if kind != "all_to_all" or group.nodes == 1:
        return SLOWED
    inside = count * (1 - 1 / group.size) / (gpu.nvlink_gbs * gpu.nvlink_reached * 1e9)
    share = inside / collectives.seconds(kind, count, group, gpu)
    return min(SLOWED, max(SLOWED * share, EXCHANGE_SMS / gpu.sms))


def travel_times(
    step: StepWork, numbers: Sequence[int], gpu: GpuSpec, rates: Rates
) -> list[Travel]:
    """Return the time of each numbered block's gather and reduction.

    Args:
        step: whose blocks they are.
        numbers: of the blocks.
        gpu: with the links.
        rates: constants.
    """
    found: dict[tuple[float, float], Travel] = {}
    for number in numbers:
        block = step.blocks[number]
        if (block.dense, block.experts) not in found:
            found[block.dense, block.experts] = _travel(step, block, gpu, rates)
    return [found[step.blocks[n].dense, step.blocks[n].experts] for n in numbers]


def added_seconds(step: StepWork, mine: Iterable[int], gpu: GpuSpec, rates: Rates) -> float:
    """Return the time in which gradients of microbatches are added up before they are reduced.

    FSDP2 casts those of the first one and adds the others to it. One process adds in the dtype of
    its parameters, whose gradients the backward has cast.

    Args:
        step: whose gradients they are.
        mine: numbers of the rank's blocks.
        gpu: which adds them.
        rates: constants.
    """
    if step.reduce_each or not step.copied or step.microbatches < 2:
        return 0.0
    wide = step.reduce_bytes
    own = wide if step.data == "none" else step.gather_bytes
    moved = (step.microbatches - 1) * (own + 2 * wide) + (own + wide) * (own != wide)
    count = sum(step.blocks[n].dense + step.blocks[n].experts for n in mine)
    return memory_seconds(count * moved, gpu, rates)


def _travel(step: StepWork, block: BlockWork, gpu: GpuSpec, rates: Rates) -> Travel:
    gather = reduce = out = back = held = 0.0
    kind = "all_reduce" if step.data == "ddp" else "reduce_scatter"
    for count, axis in ((block.dense, "data"), (block.experts, "expert_data")):
        group = step.axes.get(axis)
        if step.data == "none" or group is None or not count:
            continue
        inside = SLOWED * count * (1 - 1 / group.size) / (gpu.nvlink_gbs * gpu.nvlink_reached * 1e9)
        reduce += collectives.seconds(kind, count * step.reduce_bytes, group, gpu)
        copies, own = step.axes.get(f"{axis} copies"), count * step.reduce_bytes / group.size
        reduce += collectives.seconds("all_reduce", own, copies, gpu) if copies else 0.0
        back += inside * step.reduce_bytes * (2 if step.data == "ddp" else 1)
        if step.data != "ddp":
            gather += collectives.seconds("all_gather", count * step.gather_bytes, group, gpu)
            out += inside * step.gather_bytes
            held += count * (step.copied and group.size > 1)
    passed = 2 * step.gather_bytes, step.gather_bytes + step.reduce_bytes
    behind, before = (memory_seconds(held * size, gpu, rates) for size in passed)
    return Travel(gather, reduce, (out, back), (behind, before))
