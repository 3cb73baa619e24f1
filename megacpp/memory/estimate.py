"""Memory of a training step on one rank, known before anything is built.

    found = estimate(config, 8)         # of rank 0 of 8
    found.point, found.moment           # bytes at the fullest moment of a step, and its name
    found.components                    # bytes by component, which sum to the point
    found.upper                         # bytes at most, for any choice of the routers

It takes milliseconds of pure Python: megacpp/memory/forms/step.py composes a step of parts that
were traced once (megacpp/memory/forms/traced.py). A part is traced at its first use, which needs
torch and a tenth of a second. bench/estimate.py
compares estimates with traces of the trainer's own model; `estimate_memory` takes plain numbers
instead of a configuration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megacpp.blocks.descriptor import AllocationSettings
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from megacpp.errors import config_error
from megacpp.memory.block_trace import DOCUMENT
from megacpp.memory.components import RESTING
from megacpp.memory.device import on_gpu, overhead_bytes, runtime_bytes
from megacpp.memory.forms.detail import detail_of
from megacpp.memory.forms.step import step_bytes
from megacpp.memory.forms.units import stored_of
from megacpp.model.count import count_parameters
from megacpp.model.pattern import warmed_up, warms_up
from megacpp.model.stages import as_scheduled

Fit = Literal["fits", "at_risk", "does_not_fit", "unknown"]
NO_TENSOR = ("runtime_reserved", "allocator_overhead")
TASKS = "evaluation of tasks"  # a moment between two steps
# Bounds of its work: bytes a token of a row for each of `dim`, and a scored token for each id.
TASK_TOKENS, TASK_BYTES, SCORED, SCORED_BYTES = 4096, 96, 1024, 12


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the fullest moment of a step.

    Attributes:
        components: bytes by name (components.py) at that moment; they sum to `point`.
        detail: for some components, their bytes by content.
        moment: name of the fullest moment (`backward of layer 50 (E)`, `optimizer step`, ...).
        moments: bytes of tensors at each moment that was examined.
        resting: bytes of tensors between two steps.
        point: expected bytes.
        upper: bytes at most, for any choice of the routers and any behaviour of the allocator.
        budget: bytes that may be used: the device's memory less the headroom; None: not known.
        assumptions: assumptions behind the figures, in words.
    """

    components: dict[str, int]
    detail: dict[str, dict[str, int]]
    moment: str
    moments: dict[str, int]
    resting: int
    point: int
    upper: int
    budget: int | None
    assumptions: tuple[str, ...]

    @property
    def verdict(self) -> Fit:
        """Fit in the budget; `at_risk`: the point fits, the upper bound doesn't."""
        if self.budget is None:
            return "unknown"
        if self.upper <= self.budget:
            return "fits"
        return "at_risk" if self.point <= self.budget else "does_not_fit"

    @property
    def tensors(self) -> int:
        """Bytes of tensors: the point without context, libraries and allocator."""
        return self.point - sum(self.components.get(name, 0) for name in NO_TENSOR)

    def as_dict(self) -> dict[str, float]:
        """Return components, point and upper bound in GiB, for people."""
        found = {**self.components, "point": self.point, "upper": self.upper}
        return {name: size / 2**30 for name, size in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return everything in bytes, for machines."""
        return {
            "point": self.point,
            "upper": self.upper,
            "budget": self.budget,
            "verdict": self.verdict,
            "moment": self.moment,
            "resting": self.resting,
            "components": dict(self.components),
            "detail": {name: dict(parts) for name, parts in self.detail.items()},
            "moments": dict(self.moments),
            "assumptions": list(self.assumptions),
        }


def estimate(
    config: Config, size: int, rank: int = 0, budget: int | None = None, detail: bool = True
) -> MemoryEstimate:
    """Return the memory that rank `rank` of `size` needs.

    A warm-up of sparse attention is estimated with the phase behind it, in which everything is
    trained: the fuller one decides.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: rank whose memory is estimated.
        budget: bytes that may be used.
        detail: fill in `detail`, which takes longer than all the rest.
    """
    found = _of_phase(config, size, rank, budget, detail)
    if config.run.tasks:
        found = _with_tasks(found, config)
    if not warms_up(config.model):
        return found
    after = _of_phase(replace(config, model=warmed_up(config.model)), size, rank, budget, detail)
    fuller, other = (found, after) if found.point >= after.point else (after, found)
    phase = "the warm-up" if fuller is found else "the sparse phase behind the warm-up"
    said = f"{phase} decides: the other phase takes {other.point / fuller.point:.0%} of its memory"
    upper = max(found.upper, after.upper)
    return replace(fuller, upper=upper, assumptions=(*fuller.assumptions, said))


def _of_phase(
    config: Config, size: int, rank: int, budget: int | None, detail: bool
) -> MemoryEstimate:
    """Return the memory of one phase of a run; see `estimate`."""
    config = as_scheduled(config)
    found = step_bytes(config, size, rank)
    most = max(found.most, found.optimizer + stored_of(config, size, rank).transient[1])
    one_layer = found.one_layer
    if uneven(config) or cut_by_documents(config):
        fullest = step_bytes(config, size, rank, most=True)
        most, one_layer = max(most, fullest.most), max(one_layer, fullest.one_layer)
    most += margin(config, most)
    runtime = runtime_bytes(config, size)
    overhead, _ = overhead_bytes(config, found.most, found.beside)
    components = {**found.components, "runtime_reserved": runtime, "allocator_overhead": overhead}
    upper = most + runtime + overhead_bytes(config, most, found.beside, one_layer)[1]
    return MemoryEstimate(
        {name: size for name, size in components.items() if size},
        detail_of(config, size, rank) if detail else {},
        found.moment,
        found.moments,
        found.resting,
        found.most + runtime + overhead,
        upper,
        budget,
        assumptions(config),
    )


def _with_tasks(found: MemoryEstimate, config: Config) -> MemoryEstimate:
    """Return the estimate with the evaluation of `run.tasks`, if that is the fullest moment.

    A whole fp32 copy of the model answers on one rank, between two steps.
    """
    model = config.model
    copy = 4 * count_parameters(model).total
    work = TASK_TOKENS * model.dim * TASK_BYTES + SCORED * model.vocab_size * SCORED_BYTES
    tensors = found.resting + copy + work
    outside = {name: found.components.get(name, 0) for name in NO_TENSOR}
    rest = {name: found.components.get(name, 0) for name in RESTING}
    moments = {**found.moments, TASKS: tensors}
    said = (
        *found.assumptions,
        "tasks: a whole copy on one rank; the caches of answers not counted",
    )
    upper = max(found.upper, tensors + margin(config, tensors) + sum(outside.values()))
    found = replace(found, moments=moments, assumptions=said, upper=upper)
    if tensors <= found.tensors:
        return found
    rest["parameters"] += copy
    parts = {
        **rest,
        "batch": found.resting + copy - sum(rest.values()),
        "workspace": work,
        **outside,
    }
    point = tensors + sum(outside.values())
    kept = {name: size for name, size in parts.items() if size}
    return replace(found, components=kept, detail={}, moment=TASKS, point=point)


def uneven(config: Config) -> bool:
    """Return whether one rank may get more rows than others: dropless experts have no capacity."""
    return any(one.uneven(config.model) for one in _allocations(config))


def cut_by_documents(config: Config) -> bool:
    """Return whether saved activations of a scan grow with the number of documents in a row."""
    return any(one.document(config) for one in _allocations(config))


def _allocations(config: Config) -> list[AllocationSettings]:
    """Return what the allocations of each kind in the pattern depend on."""
    return [KINDS[letter].allocations for letter in KINDS if letter in config.model.pattern.upper()]


def margin(config: Config, tensors: int) -> int:
    """Return the error bound of estimates: 0.5 % (3 % in a pipeline) and 1 MiB, in bytes."""
    return tensors * (6 if config.mesh.pp > 1 else 1) // 200 + (1 << 20)


def assumptions(config: Config) -> tuple[str, ...]:
    """Return the assumptions behind the figures, in words."""
    named = ", ".join(f"{k} {v}" for k, v in asdict(config.kernels).items() if v != "auto")
    found = [f"kernels ({named or 'torch'}): what they keep and allocate, as a trace shows"]
    if cut_by_documents(config):
        found.append(
            f"M blocks: one document of {DOCUMENT:,} tokens; the upper bound: one for each chunk"
        )
    if uneven(config):
        found.append("every expert gets as many tokens; the upper bound: one rank gets all it can")
    attends = config.kernels.attention
    if config.data.seq_len and "A" in config.model.pattern.upper() and attends in ("auto", "torch"):
        found.append("rows hold several documents: attention has one mask a microbatch")
    if on_gpu(config):
        found.append("context, libraries and allocator by constants, until a run is calibrated")
        grow = config.memory.expandable_segments
        kind = "expandable segments" if grow else "segments that don't grow"
        found.append(f"the allocator's share as in replays of steps, with {kind}")
    if config.precision.fp8 != "off":
        found.append("FP8: as without its hardware, where rounded operands are widened once more")
    if config.train.compile != "off":
        found.append("compiled blocks: what the min-cut partitioner keeps, and no kernel in place")
    return tuple(found)


def estimate_memory(
    model_config: ModelConfig,
    world_size: int,
    tp_degree: int = 1,
    ep_degree: int = 1,
    dp_degree: int | None = None,
    cp_degree: int = 1,
    pp_degree: int = 1,
    batch_size: int = 1,
    seq_len: int = 4096,
    grad_checkpoint: bool | CheckpointingPolicy = True,
    optimizer: Literal["muon+adamw", "adamw"] = "muon+adamw",
    grad_accum: int | None = None,
    budget: int | None = None,
) -> MemoryEstimate:
    """Return the estimate of rank 0 from plain numbers: a bf16 run on GPUs, sharded by FSDP2.

    Experts lie on ranks that also share the data: the expert axis is no separate factor of the
    world. `dp_degree` counts all ranks with rows of their own if dp * cp * tp * pp is the world. If
    dp * ep * cp * tp * pp is, it excludes the expert axis (so 8 = tp 2 * ep 4 * dp 1 has 4 ranks
    with rows of their own).

    Args:
        model_config: the model.
        world_size: number of ranks.
        tp_degree: ranks that share each layer's matrices.
        ep_degree: ranks that share the experts.
        dp_degree: ranks with rows of their own; None: derived from the world.
        cp_degree: ranks that share each row's tokens.
        pp_degree: pipeline stages.
        batch_size: rows of a rank's microbatch.
        seq_len: tokens of a row.
        grad_checkpoint: `True` is the recompute policy of the large presets, by kind of block;
            `False` keeps everything.
        optimizer: which optimizer moves the matrices.
        grad_accum: microbatches of a step; None: one, or two for each stage of a pipeline.
        budget: bytes that may be used, for the verdict.

    Raises:
        ConfigError: degrees that don't make the world, or a setting that the trainer would refuse.
    """
    from megacpp.config.checks.every import check, resolve
    from megacpp.config.presets import PER_BLOCK

    policy = grad_checkpoint
    if isinstance(policy, bool):
        policy = PER_BLOCK if policy else KEEP
    if optimizer not in ("muon+adamw", "adamw"):
        raise config_error(
            "optimizer", optimizer, "must be muon+adamw or adamw", "use optimizer=muon+adamw"
        )
    shards = data_degree(world_size, tp_degree, ep_degree, dp_degree, cp_degree, pp_degree)
    config = Config(
        preset="estimate",
        model=model_config,
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(
            device_batch_size=batch_size,
            grad_accum=grad_accum or (2 * pp_degree if pp_degree > 1 else 1),
            device="auto",
        ),
        mesh=MeshConfig(pp=pp_degree, dp_shard=shards, cp=cp_degree, tp=tp_degree, ep=ep_degree),
        optim=OptimConfig(name="adamw" if optimizer == "adamw" else "muon_adamw"),
        recompute=policy,
    )
    check(config, world_size)
    return estimate(resolve(config, world_size), world_size, 0, budget)


def data_degree(world: int, tp: int, ep: int, dp: int | None, cp: int, pp: int) -> int:
    """Return the number of ranks with rows of their own.

    Args:
        world: number of ranks.
        tp: degree of tensor parallelism.
        ep: degree of expert parallelism.
        dp: degree that the caller asks for; None: any.
        cp: degree of context parallelism.
        pp: pipeline stages.

    Raises:
        ConfigError: the degrees don't make the world.
    """
    others = tp * cp * pp
    product = f"dp * cp {cp} * tp {tp} * pp {pp}"
    if others < 1 or world < 1 or world % others:
        raise config_error(
            "world_size",
            world,
            f"must be a multiple of cp {cp} * tp {tp} * pp {pp}",
            f"use world_size={max(1, others)}",
        )
    shards = world // others
    if dp is not None and dp not in (shards, shards / ep):
        raise config_error(
            "dp_degree",
            dp,
            f"{product} must be world_size ({world}), or with an expert axis beside them, "
            f"times ep {ep}",
            f"use dp_degree={shards}",
        )
    return shards
