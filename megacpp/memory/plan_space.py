"""Choices of a plan: meshes of a world, rows of a microbatch, recompute policies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megacpp.blocks.experts.rows import expert_rows
from megacpp.config.batch_schedule import BatchSchedule
from megacpp.config.checks.mesh import first_broken
from megacpp.config.checks.recompute import recompute_rules
from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig
from megacpp.errors import ConfigError, config_error
from megacpp.memory.device import on_gpu
from megacpp.memory.estimate import uneven
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import kinds_of
from megacpp.memory.replayed import replayed_flops_per_token
from megacpp.model.primes import divisors
from megacpp.model.regions import BLOCK, Region, compiled_budget, layer_regions
from megacpp.model.stages import chunk_rules, pipeline_rules

# Levers by kind of block; what else a policy says (offload, compression, ...) stays as it is.
LADDER: dict[str, dict[str, Any]] = {
    "none": {
        "ablock": "none",
        "eblock": "none",
        "mblock": "none",
        "rblock": "recurrence",
        "gblock": "none",
        "fblock": "none",
        "norms": False,
        "core_attn": False,
        "mlp": False,
        "mla_q_upproj": False,
        "mla_kv": False,
    },
    "experts": {"eblock": "expert_gemm_only"},
    "selective": {
        "ablock": "selective",
        "eblock": "expert_gemm_only",
        "mblock": "conv_bc_only",
        "rblock": "full_plus_norms",
        "gblock": "conv_gate",
        "norms": True,
        "mlp": True,
    },
    "full": {
        "ablock": "full",
        "eblock": "expert_gemm_only",  # as a whole it would send again (mesh.ep)
        "mblock": "conv_bc_only",
        "rblock": "full_plus_norms",
        "gblock": "full",
        "fblock": "full",
        "norms": True,
        "mlp": True,
    },
}
MORE_ROWS = 1.1  # travel where experts' rows are padded: the time of a few waits
MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class Policy:
    """Recompute policy of a plan's ladder (`LADDER`), or the preset's own.

    Attributes:
        name: of the ladder, or `preset`.
        recompute: its settings.
        checkpointing: at least one block is recomputed (the older `gradient_checkpointing`).
        replayed: FLOPs a token that backwards repeat.
        pieces: regions that each layer recomputes.
    """

    name: str
    recompute: CheckpointingPolicy
    checkpointing: bool
    replayed: float
    pieces: tuple[frozenset[Region], ...]

    def keeps_less(self, other: Policy) -> bool:
        """Return whether this policy recomputes at least the regions of `other`, in all layers."""
        both = zip(self.pieces, other.pieces, strict=True)
        return all(own >= BLOCK or own >= others for own, others in both)


def policies(config: Config, fixed: Collection[str] = ()) -> list[Policy]:
    """Return recompute policies, least repeated work first; the preset's own is among them.

    Only that one, if recompute settings are given or if the compiler decides.
    """
    found = {"preset": config.recompute}
    given = any(key.startswith("recompute.") for key in fixed)
    if not given and config.train.compile == "off":
        plain = replace(config.recompute, **LADDER["none"])
        found = {name: replace(plain, **levers) for name, levers in LADDER.items()}
        found["preset"] = config.recompute
    ladder: dict[Any, Policy] = {}
    for name, policy in found.items():
        pieces = tuple(layer_regions(policy, config.model))
        rung = replace(config, recompute=policy)
        busy = any(pieces) or compiled_budget(policy, config.model) < 1
        ladder.setdefault(
            (pieces, policy.rblock == "none"),
            Policy(name, policy, busy, replayed_flops_per_token(rung), pieces),
        )
    return sorted(ladder.values(), key=lambda p: (p.checkpointing, p.replayed))


def meshes(config: Config, world: int, fixed: Collection[str] = ()) -> Iterator[MeshConfig]:
    """Yield every factorisation of a world into axes, small model axes first; legal or not."""

    def degrees(axis: str, of: int) -> Sequence[int]:
        given = getattr(config.mesh, axis)
        if f"mesh.{axis}" in fixed and given != -1:
            return [given] if of % given == 0 else []
        return divisors(of)

    found = []
    for tp in degrees("tp", world):
        for cp in degrees("cp", world // tp):
            for pp in degrees("pp", world // tp // cp):
                for copies in degrees("dp_replicate", world // tp // cp // pp):
                    shards = world // tp // cp // pp // copies
                    if shards not in degrees("dp_shard", shards):
                        continue
                    if copies > 1 == shards * cp and "mesh.dp_replicate" not in fixed:
                        continue  # there are no shards to copy: the same as dp_shard
                    for ep in degrees("ep", shards * cp * tp):
                        found.append((tp * cp * pp * copies, copies, pp, cp, tp, ep, shards))
    for _, copies, pp, cp, tp, ep, shards in sorted(found):
        yield replace(config.mesh, pp=pp, dp_replicate=copies, dp_shard=shards, cp=cp, tp=tp, ep=ep)


def row_choices(
    config: Config, mesh: MeshConfig, tokens_per_step: int, fixed: Collection[str] = ()
) -> list[int]:
    """Return device batches in rows that make `tokens_per_step` tokens, smallest first, if any.

    Args:
        config: the run; gives the tokens of a row.
        mesh: its data ranks share the rows.
        tokens_per_step: tokens of an optimizer step.
        fixed: dotted settings that keep their value.
    """
    of_ranks = tokens_per_step // config.data.seq_len
    ranks = mesh.dp_replicate * mesh.dp_shard
    if of_ranks % ranks:
        return []
    rows = of_ranks // ranks
    train = config.train
    return [
        row
        for row in divisors(rows)
        if ("train.device_batch_size" not in fixed or row == train.device_batch_size)
        and ("train.grad_accum" not in fixed or rows // row == train.grad_accum)
    ]


def with_knobs(
    config: Config, mesh: MeshConfig, rows: int, tokens_per_step: int, policy: Policy
) -> Config:
    """Return the resolved configuration of one candidate.

    Args:
        config: the run.
        mesh: its degrees.
        rows: device batch.
        tokens_per_step: tokens of an optimizer step, from which the microbatches follow.
        policy: its recompute settings.
    """
    per_micro = rows * config.data.seq_len * mesh.dp_replicate * mesh.dp_shard
    train = replace(
        config.train,
        device_batch_size=rows,
        tokens_per_step=tokens_per_step,
        grad_accum=tokens_per_step // per_micro,
    )
    return replace(config, mesh=mesh, train=train, recompute=policy.recompute)


def padded_dispatch(config: Config, world: int, fixed: Collection[str] = ()) -> Config | None:
    """Return the configuration with every token sent to every rank of `ep`; None: no alternative.

    Then no layer waits for counts of rows, and experts need more memory. It is one where at most
    `MORE_ROWS` times the rows travel, so with few ranks.

    Args:
        config: resolved, of a candidate.
        world: number of ranks.
        fixed: dotted settings that keep their value.
    """
    mesh = config.mesh
    other = replace(config, mesh=replace(mesh, ep_dispatch="padded"))
    if (
        mesh.ep == 1
        or mesh.ep_dispatch != "per_rank"
        or not uneven(config)
        or "mesh.ep_dispatch" in fixed
        or not on_gpu(config)
    ):
        return None
    rows, all_rows = (
        expert_rows(LocalShapes.on_rank(c, world, 0)).leaving for c in (config, other)
    )
    return other if all_rows <= MORE_ROWS * rows else None


def policy_is_legal(config: Config, mesh: MeshConfig, policy: Policy) -> bool:
    """Return whether the policy breaks no rule on that mesh."""
    return not any(recompute_rules(replace(config, mesh=mesh, recompute=policy.recompute)))


def mesh_is_legal(config: Config, mesh: MeshConfig, world: int) -> bool:
    """Return whether the model fits the axes; the number of microbatches is checked later."""
    return first_broken(replace(config, mesh=mesh), world) is None


def pipeline_is_legal(config: Config, mesh: MeshConfig, rows: int, microbatches: int) -> bool:
    """Return whether the schedule can run all microbatches of a step, and a warmup's fewer ones.

    Args:
        config: the run.
        mesh: its degrees.
        rows: device batch.
        microbatches: of an optimizer step.
    """
    batch = replace(config.train, device_batch_size=rows)
    if any(chunk_rules(replace(config, mesh=mesh, train=batch))):
        return False
    if mesh.pp == 1:
        return True
    if config.train.gradient_sync == "each":
        return False
    one = replace(config, mesh=mesh)
    numbers = {microbatches}
    if config.train.batch_warmup_steps and not config.train.static_shapes:
        ramp = BatchSchedule(1, microbatches, config.train.batch_warmup_steps)
        numbers |= set(ramp.distinct_accums())
    return not any(error for n in numbers for error in pipeline_rules(one, n))


def stage_ranks(config: Config, world: int) -> list[int]:
    """Return one rank of every pipeline stage that may be the fullest.

    It is the first rank of a stage, whose shards are longest, or the one with the row's last
    tokens, which keeps most states of others. A stage of the same blocks as an earlier one never
    has more microbatches in flight.
    """
    mesh, pp = config.mesh, config.mesh.pp
    last = (mesh.cp - 1) * mesh.tp if mesh.cp_order == "contiguous" else 0
    ranks = [stage * (world // pp) + last for stage in range(pp)]
    if pp == 1 or config.mesh.pp_schedule not in ("1f1b", "gpipe"):
        return ranks
    seen: dict[tuple[str, ...], int] = {}
    for rank in ranks:
        (kinds,) = kinds_of(config, world, rank)
        seen.setdefault(tuple(sorted(kinds)), rank)
    return list(seen.values())


def no_rows(tokens: int, seq_len: int, world: int) -> ConfigError:
    """Return the error of tokens a step that aren't whole rows, with the nearest that are.

    Args:
        tokens: of a step.
        seq_len: tokens of a row.
        world: number of ranks.
    """
    unit = seq_len * world
    low = tokens // unit * unit
    near = low if low and tokens - low < low + unit - tokens else low + unit
    rule = f"must be a multiple of data.seq_len ({seq_len})"
    return config_error("tokens_per_step", tokens, rule, f"use {near}, rows for all {world} ranks")


def settings_of(config: Config, base: Config) -> Iterator[tuple[str, Any]]:
    """Yield mesh and batch, and the policy's settings that differ from the run's own."""
    for axis in MESH:
        yield f"mesh.{axis}", getattr(config.mesh, axis)
    yield "train.device_batch_size", config.train.device_batch_size
    yield "train.grad_accum", config.train.grad_accum
    for name, value in vars(config.recompute).items():
        if value != getattr(base.recompute, name):
            yield f"recompute.{name}", value
