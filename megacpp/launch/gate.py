"""Launch gate: estimate the memory of a run first, and reject the run if it doesn't fit.

Nothing is written and no process group exists yet. The first rank of each machine decides for all
of its ranks: a host's free memory changes while the others start, and ranks must not disagree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacpp.config.arguments import Resolved
from megacpp.config.schema import Config
from megacpp.kernels.chosen import as_chosen
from megacpp.launch.record import all_versions, device_name
from megacpp.memory.budget import (
    BRIEF,
    GIB,
    EstimateFunction,
    as_run,
    fullest,
    host_available_bytes,
    words,
)
from megacpp.memory.calibration import Margin, Situation, margin, read_records, situation
from megacpp.memory.components import RESTING
from megacpp.memory.estimate import MemoryEstimate, estimate
from megacpp.model.precision import compute_dtype
from megacpp.run.rank_store import RankStore

VERDICTS = {
    "fits": "fits",
    "at_risk": "fits, unless routers or the allocator do their worst",
    "does_not_fit": "DOES NOT FIT",
    "unknown": "the memory of this device is unknown",
}

# Versions that memory depends on: of kernels, the driver, and NCCL with its buffers.
VERSIONS = (
    *("megacpp", "torch", "triton", "torchao", "tilelang", "mamba-ssm", "flash-linear-attention"),
    *("transformer-engine", "cuda driver", "nccl"),
)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that one rank may use.

    Attributes:
        device_bytes: memory of its device, or its part of the host; None: unknown.
        source: origin of that figure.
        headroom: fraction of it that stays free.
    """

    device_bytes: int | None
    source: str
    headroom: float

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that the rank may use; None: unknown."""
        if self.device_bytes is None:
            return None
        return int(self.device_bytes * (1 - self.headroom))

    def __str__(self) -> str:
        if self.device_bytes is None:
            return self.source
        return f"{words(self.device_bytes)} {self.source}, {self.headroom:.0%} headroom"


@dataclass(frozen=True)
class Admission:
    """Memory estimate of a launch, with everything that the decision rests on.

    Attributes:
        estimate: estimate of the fullest rank, against the budget less the calibration's margin.
        rank: that rank.
        gate: `on`, or `off`: nothing is rejected.
        room: memory of a rank.
        margin: correction learned from measured runs.
        situation: key of comparable runs.
        settled: configuration with `auto` resolved for this device.
        calibration: folder of records, or nothing.
        plan, attempts: plan and attempts of a fitted run, for launch.json.
    """

    estimate: MemoryEstimate
    rank: int
    gate: str
    room: MemoryBudget
    margin: Margin
    situation: Situation
    settled: Config
    calibration: str
    plan: dict[str, Any] | None = None
    attempts: tuple[dict[str, Any], ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """Bytes that a measurement is compared with."""
        return comparable_bytes(self.estimate, self.settled.train.device)

    def lines(self) -> list[str]:
        """Return lines for the header of a run."""
        e = self.estimate
        at = f" in {e.moment}" if e.moment else ""
        may_use = "no budget" if e.budget is None else f"{words(e.budget)} may be used"
        largest = sorted(e.components.items(), key=lambda one: -one[1])[:5]
        off = "; memory.gate=off: it starts whatever the estimate says" * (self.gate == "off")
        number = next((a["attempt"] for a in self.attempts if a["chosen"]), None)
        whole = ", of tensors: a step's line has the whole process"
        whole *= self.settled.train.device == "cpu"
        return [
            f"{words(e.point)} expected{at} on rank {self.rank}, {words(e.upper)} at most{whole}",
            ", ".join(f"{name} {words(n)}" for name, n in largest if n),
            f"{may_use} ({self.room}): {VERDICTS[e.verdict]}{off}",
            self.margin.line(),
            *self._copy_line(),
            *([f"chosen by attempt {number} of memory.fit=auto"] if number else []),
        ]

    def _copy_line(self) -> list[str]:
        """Return a line about the host copy of `checkpoint.async`: a save's, not a step's."""
        if not self.settled.checkpoint.async_:
            return []
        copied = sum(self.estimate.components.get(name, 0) for name in RESTING)
        free, ranks = host_available_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        left = "" if free is None else f", {words(free)} are left now for {ranks} of them"
        return [f"checkpoint.async: {words(copied)} more on the host of each rank, not above{left}"]

    def as_dict(self) -> dict[str, Any]:
        """Return the admission for launch.json."""
        m = self.margin
        return {
            "estimate": self.estimate.as_json(),
            "rank": self.rank,
            "gate": self.gate,
            "budget": self.estimate.budget,
            "device_bytes": self.room.device_bytes,
            "device_bytes_from": self.room.source,
            "headroom": self.room.headroom,
            "calibration": {
                "key": self.situation.key,
                "source": m.source,
                "rows": m.rows,
                "residual": m.residual,
                "trusted": m.trusted,
                "off": dict(m.off),
                "extra_bytes": m.extra_bytes,
                "unreadable": list(m.unreadable),
            },
        }


class Estimator:
    """Memory estimates of one launch's configurations, each with the margin learned for it.

    Args:
        config: configuration of the run.
        size: number of ranks.
        device: device of this rank.
        estimator: function that estimates one rank.
    """

    def __init__(
        self,
        config: Config,
        size: int,
        device: torch.device,
        estimator: EstimateFunction = estimate,
    ) -> None:
        self.size, self.device, self.estimator = size, device, estimator
        self.room = memory_budget(config, device)
        found = all_versions()
        self.versions = {name: found.get(name) for name in VERSIONS}

    def settled(self, config: Config) -> Config:
        """Return the configuration with `auto` resolved for this device."""
        narrow = compute_dtype(config.precision, self.device) == torch.bfloat16
        return as_run(as_chosen(config, self.device), self.device.type, narrow)

    def price(self, config: Config, extra_bytes: int = 0) -> MemoryEstimate:
        """Return the fullest rank's needs, against the budget less `extra_bytes`."""
        budget = self.room.budget_bytes
        left = None if budget is None else max(0, budget - extra_bytes)
        brief = BRIEF if self.estimator is estimate else self.estimator
        return fullest(self.settled(config), self.size, left, brief)[1]

    def admission(self, config: Config) -> Admission:
        """Return the estimate of a configuration with everything that its verdict rests on."""
        settled = self.settled(config)
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        allocator = " ".join(f"{n}={os.environ[n]}" for n in names if os.environ.get(n))
        name = device_name(self.device)
        where = situation(settled, self.size, name, self.versions, allocator)
        rank, plain = fullest(settled, self.size, self.room.budget_bytes, self.estimator)
        folder = config.memory.calibration
        records, unreadable = read_records(Path(folder)) if folder else ([], ())
        point = comparable_bytes(plain, self.device.type)
        learned = margin(point, where, records, plain.components)
        learned = replace(learned, unreadable=unreadable)
        left = None if plain.budget is None else max(0, plain.budget - learned.extra_bytes)
        return Admission(
            replace(plain, budget=left),
            rank,
            config.memory.gate,
            self.room,
            learned,
            where,
            settled,
            config.memory.calibration,
        )

    def check(self, found: Admission) -> None:
        """Reject a run that doesn't fit, on a machine's first rank, unless `memory.gate` is off.

        Raises:
            ConfigError: the run doesn't fit; the error names the three cheapest changes that help.
        """
        if found.gate == "off" or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if found.estimate.verdict != "does_not_fit":
            return
        from megacpp.memory.fixes import memory_error  # imports the planner

        extra = found.margin.extra_bytes
        room = f"{self.room}{f', {words(extra)} for what was misjudged before' if extra else ''}"
        price = lambda other: self.price(other, extra)  # noqa: E731
        raise memory_error(found.settled, self.size, found.rank, price, found.estimate, room)


def check_memory(resolved: Resolved, peers: RankStore, device: torch.device) -> Admission:
    """Estimate a run before it starts; every rank calls it.

    Raises:
        ConfigError: it doesn't fit, and `memory.gate` is on.
    """
    estimator = Estimator(resolved.config, peers.size, device)
    found: Admission | None = None
    with peers.agree("estimate"):  # the others read from disk what the first one traces
        if os.environ.get("LOCAL_RANK", "0") == "0":
            found = estimator.admission(resolved.config)
    found = found or estimator.admission(resolved.config)
    estimator.check(found)
    return found


def set_allocator(config: Config, device: torch.device) -> None:
    """Make a GPU the current one, with `memory.expandable_segments`, before the first tensor.

    Other settings of `PYTORCH_ALLOC_CONF` stay. Libraries launch on the current GPU, wherever their
    tensors are, and what they ask of it takes memory there: of the first one, for every rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        grow = config.memory.expandable_segments
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{grow}")


def memory_budget(config: Config, device: torch.device) -> MemoryBudget:
    """Return the configured memory, or that of the smallest GPU, or a share of the host's."""
    memory, ranks = config.memory, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if memory.device_gib:
        return MemoryBudget(int(memory.device_gib * GIB), "given", memory.headroom)
    if device.type == "cuda":
        found = range(min(ranks, torch.cuda.device_count()))
        least = min(torch.cuda.get_device_properties(i).total_memory for i in found)
        return MemoryBudget(least, f"of {device_name(device)}", memory.headroom)
    host = host_available_bytes()
    if host is None:
        return MemoryBudget(None, "the free memory of this machine is unknown", memory.headroom)
    share = f"of {words(host)} left for {ranks} ranks" if ranks > 1 else "left on this machine"
    return MemoryBudget(host // ranks, share, memory.headroom)


def comparable_bytes(estimate: MemoryEstimate, device: str) -> int:
    """Return the part of an estimate that can be measured; on a CPU without loaded libraries."""
    loaded = estimate.components.get("runtime_reserved", 0) if device == "cpu" else 0
    return estimate.point - loaded
