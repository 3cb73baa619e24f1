"""Pipeline stages: their layers and the rank of each; no torch import here.

A schedule gives every rank of the `pp` axis one stage or two. Stages are numbered in the order in
which a token meets them:

    1f1b, gpipe        rank r owns stage r
    interleaved        rank r owns stages r and r + pp              (arXiv 2104.04473)
    interleaved_zb     the same, gradients of weights later         (arXiv 2401.10241)
    looped_bfs         the same, one stage after the other          (arXiv 2211.05953)
    zbv, dualpipev     rank r owns stages r and 2 pp - 1 - r: a V   (arXiv 2401.10241, 2412.19437)
    dualpipe           rank r owns stages r and pp - 1 - r          (arXiv 2412.19437)

In `dualpipe` two ranks own each stage. Half of the microbatches goes through the ranks from the
first to the last, half from the last to the first, and the two copies add up their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add

from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config, MeshConfig, ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import choice_across, expand_pattern, layer_kinds
from megacpp.model.primes import nearest_divisor
from megacpp.model.sizes import (
    copied_parameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)

V_SHAPED = ("zbv", "dualpipev")  # the first rank also owns the last stage
LOOPED = ("interleaved", "interleaved_zb", "looped_bfs", *V_SHAPED)  # two stages a rank
BOTH_WAYS = ("dualpipe",)  # two stages a rank, each of which another rank has, too
SPLIT_BACKWARD = (*V_SHAPED, "interleaved_zb", *BOTH_WAYS)  # of inputs and of weights, apart


@dataclass(frozen=True)
class StagePart:
    """Part of the model that one pipeline stage runs.

    Attributes:
        index: number of the stage.
        layers: its blocks.
        first: it has the embedding.
        last: it has the last norm, the head and the loss.
        takes: layer of an earlier stage whose choice of keys it receives from the stage before.
        reads: layers of its own attend to that choice; else it only passes it on.
        hands: layer, of this stage or an earlier one, whose choice it sends to the next.
        back: it runs the microbatches that go from the last rank to the first.
    """

    index: int
    layers: range
    first: bool
    last: bool
    takes: int | None = None
    reads: bool = False
    hands: int | None = None
    back: bool = False


def stages_per_rank(schedule: str) -> int:
    """Stages that a schedule gives to each rank."""
    return 2 if schedule in (*LOOPED, *BOTH_WAYS) else 1


def num_stages(schedule: str, pp: int) -> int:
    """Stages of the model on `pp` ranks."""
    return pp * (2 if schedule in LOOPED else 1)


def microbatches_through(schedule: str, microbatches: int) -> int:
    """Microbatches of a step that each stage of a rank runs."""
    return microbatches // 2 if schedule in BOTH_WAYS else microbatches


def stage_ids(schedule: str, pp: int, rank: int) -> tuple[int, ...]:
    """Stages of a rank, in the order in which a token meets them; both ways: that of either way."""
    if schedule in V_SHAPED:
        return rank, 2 * pp - 1 - rank
    if schedule in BOTH_WAYS:
        return rank, pp - 1 - rank
    return tuple(range(rank, num_stages(schedule, pp), pp))


def owners(schedule: str, pp: int) -> list[int]:
    """Return the rank of every stage; both ways: of the microbatches from the first to the last."""
    if schedule in BOTH_WAYS:
        return list(range(pp))
    of_stage = {stage: rank for rank in range(pp) for stage in stage_ids(schedule, pp, rank)}
    return [of_stage[stage] for stage in sorted(of_stage)]


def stage_parts(model: ModelConfig, mesh: MeshConfig, rank: int) -> list[StagePart]:
    """Return the parts that a rank of the `pp` axis runs, one for each of its stages.

    Raises:
        ConfigError: the layers can't be split so (see `split_layers`).
    """
    return [*_stage_parts(model, mesh.pp_schedule, mesh.pp, rank)]


@lru_cache(maxsize=1024)
def _stage_parts(model: ModelConfig, schedule: str, pp: int, rank: int) -> tuple[StagePart, ...]:
    ranges = split_layers(model, num_stages(schedule, pp))
    last = len(ranges) - 1
    kinds, parts = layer_kinds(model), []
    for i in stage_ids(schedule, pp, rank):
        back = schedule in BOTH_WAYS and len(parts) == 1
        takes, hands = (choice_across(model, at) for at in (ranges[i].start, ranges[i].stop))
        sparse = any(kinds[layer].startswith("A.") for layer in ranges[i])
        reads = takes is not None and sparse
        parts.append(StagePart(i, ranges[i], i == 0, i == last, takes, reads, hands, back))
    return tuple(parts)


def walks_once(model: ModelConfig, mesh: MeshConfig, part: StagePart) -> bool:
    """Whether a stage makes both gradients in one walk, though its schedule splits the backward.

    The last one, whose loss makes its gradients in the forward, and one with an exchange over `cp`
    that two walks over a graph would make twice.
    """
    kinds = layer_kinds(model)
    exchanges = [KINDS[letter].context for letter in {kinds[layer][0] for layer in part.layers}]
    return part.last or (
        mesh.cp > 1 and any(x is not None and x.once(model, mesh) for x in exchanges)
    )


def key_bytes(row: int) -> int:
    """Bytes of the number of a key, or of -1, in which it travels between stages."""
    return 2 if row <= 2**15 else 4


def choice_bytes(model: ModelConfig, row: int) -> int:
    """Bytes in which the choice of one token of a row travels between stages."""
    return min(model.attention.sparse.top_k, row) * key_bytes(row)


def split_layers(config: ModelConfig, num_stages: int) -> list[range]:
    """Return the layers of every stage: at the cuts of the pattern, or balanced by weight.

    Balanced means: the heaviest stage is as light as it can be, then the sum of squares is
    smallest. The embedding weighs on the first stage, the head on the last, and multi-token
    prediction adds a copy of the embedding to the last, which counts where ranks share one, too.

    Raises:
        ConfigError: fewer layers than stages, or a pattern with cuts into another number of them.
    """
    written = expand_pattern(config.pattern, config.depth)
    if num_stages == 1:
        return [range(config.depth)]
    if len(written) == num_stages:
        ends = accumulate(len(stage) for stage in written)
        return [range(end - len(stage), end) for stage, end in zip(written, ends, strict=True)]
    if len(written) > 1:
        raise config_error(
            "model.pattern",
            config.pattern,
            f"its cuts make {len(written)} stages, the pipeline has {num_stages}",
            f"cut it into {num_stages}, or leave the cuts out to have them chosen",
        )
    if config.depth < num_stages:
        raise config_error(
            "model.depth",
            config.depth,
            f"every one of the {num_stages} pipeline stages needs a layer",
            f"use model.depth={num_stages} or fewer stages",
        )
    weights = layer_parameters(config)
    weights[0] += embedding_parameters(config)
    weights[-1] += head_parameters(config) + copied_parameters(config)
    return list(_balanced(tuple(weights), num_stages))


def pipeline_rules(config: Config, microbatches: int) -> Iterator[ConfigError]:
    """Every broken rule of a pipeline; none without one (`mesh.pp` 1).

    Args:
        microbatches: of one optimizer step, as derived or given; the schedule runs
            `train.num_chunks` times as many.
    """
    mesh = config.mesh
    if mesh.pp < 1:
        yield config_error("mesh.pp", mesh.pp, "must be at least 1", "use mesh.pp=1")
    if mesh.pp <= 1:
        return
    if mesh.pp_schedule in BOTH_WAYS and mesh.pp % 2:
        yield config_error(
            "mesh.pp",
            mesh.pp,
            f"{mesh.pp_schedule} needs an even number: two ranks hold the same two stages",
            f"use mesh.pp={mesh.pp + 1} or mesh.pp_schedule=dualpipev",
        )
        return
    yield from _layer_rules(config)
    yield from _microbatch_rules(config, microbatches)
    if mesh.reshard == "always" and mesh.pp_schedule in SPLIT_BACKWARD:
        yield config_error(
            "mesh.reshard",
            mesh.reshard,
            f"{mesh.pp_schedule} needs gathered weights from the forward to both backwards",
            "use mesh.reshard=auto",
        )


def as_scheduled(config: Config) -> Config:
    """Return the configuration whose microbatches are what a pipeline's schedule runs at once.

    A microbatch of B rows in `train.num_chunks` parts is so many microbatches of B / num_chunks.
    """
    train, chunks = config.train, config.train.num_chunks
    if chunks == 1:
        return config
    rows, accum = train.device_batch_size // chunks, train.grad_accum * chunks
    train = replace(train, device_batch_size=rows, grad_accum=accum, num_chunks=1)
    return replace(config, train=train)


def chunk_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `train.num_chunks`."""
    rows, chunks = config.train.device_batch_size, config.train.num_chunks
    if chunks > 1 and config.mesh.pp == 1:
        rule = "only a pipeline cuts its microbatches on (mesh.pp=1)"
        yield config_error("train.num_chunks", chunks, rule, "use train.num_chunks=1")
    elif rows % chunks:
        near = nearest_divisor(rows, chunks)
        yield config_error(
            "train.num_chunks",
            chunks,
            f"must divide train.device_batch_size ({rows}), so that all parts have one shape",
            f"use train.num_chunks={near} or train.device_batch_size={-(-rows // chunks) * chunks}",
        )


def enough_microbatches(schedule: str, pp: int, microbatches: int) -> bool:
    """Whether a schedule can run that many microbatches a step on `pp` ranks."""
    if schedule == "1f1b":
        return microbatches >= pp
    if schedule == "dualpipev":
        return microbatches >= 2 * pp
    if schedule == "dualpipe":
        return pp % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * pp
    if schedule in ("interleaved", "interleaved_zb"):  # equal rounds of about pp microbatches
        return microbatches >= 1 and microbatches % max(1, microbatches // pp) == 0
    return microbatches >= 1


def _layer_rules(config: Config) -> Iterator[ConfigError]:
    mesh, model = config.mesh, config.model
    per_rank = num_stages(mesh.pp_schedule, 1)
    try:
        written = len(expand_pattern(model.pattern, model.depth))
    except ConfigError:
        return  # a rule of the pattern, which reports it
    if written > 1 and written != mesh.pp * per_rank:
        near = f"mesh.pp={written // per_rank}"
        yield config_error(
            "mesh.pp",
            mesh.pp,
            f"{mesh.pp_schedule} makes {mesh.pp * per_rank} stages of it, "
            f"the cuts of model.pattern make {written}",
            f"cut it into {mesh.pp * per_rank}, or leave the cuts out"
            + (f", or use {near}" if written % per_rank == 0 else ""),
        )
    elif model.depth < mesh.pp * per_rank:
        yield config_error(
            "mesh.pp",
            mesh.pp,
            f"{mesh.pp_schedule} makes {mesh.pp * per_rank} stages of it, "
            f"each needs a layer (model.depth={model.depth})",
            f"use mesh.pp={max(1, model.depth // per_rank)}",
        )


def _microbatch_rules(config: Config, accum: int) -> Iterator[ConfigError]:
    train, chunks = config.train, config.train.num_chunks
    schedule, pp = config.mesh.pp_schedule, config.mesh.pp
    microbatches = accum * chunks
    if enough_microbatches(schedule, pp, microbatches):
        return
    needs = {
        "1f1b": f"needs mesh.pp ({pp}) or more",
        "dualpipev": f"needs 2 * mesh.pp ({2 * pp}) or more",
        "dualpipe": f"needs 2 * mesh.pp ({2 * pp}) or more, and an even number",
        "interleaved": f"runs them in {max(1, microbatches // pp)} equal rounds",
        "interleaved_zb": f"runs them in {max(1, microbatches // pp)} equal rounds",
    }.get(schedule, "needs one")
    around = (n for i in range(2 * pp + 1) for n in (accum - i, accum + i) if n > 0)
    number = next(n for n in around if enough_microbatches(schedule, pp, n * chunks))
    if train.tokens_per_step and not train.grad_accum:  # fewer stages would make more data ranks
        fix = f"use train.tokens_per_step={train.tokens_per_step // accum * number}"
    else:
        degrees = sorted(range(1, 2 * pp), key=lambda p: abs(p - pp))
        degree = next(
            p for p in degrees if p == 1 or enough_microbatches(schedule, p, microbatches)
        )
        fix = f"use train.grad_accum={number} or mesh.pp={degree}"
    yield config_error(
        "train.grad_accum",
        accum,
        f"microbatches a step{f' in {chunks} parts each' if chunks > 1 else ''}: "
        f"{schedule} {needs}",
        fix,
    )


@lru_cache(maxsize=256)  # a plan asks for every mesh
def _balanced(weights: tuple[int, ...], num_stages: int) -> tuple[range, ...]:
    """Return contiguous ranges, none empty: least heaviest stage, then least sum of squares."""
    heaviest, _ = _cut(weights, num_stages, lambda own: own, max)
    _, starts = _cut(
        weights, num_stages, lambda own: own * own if own <= heaviest else math.inf, add
    )
    return tuple(range(a, b) for a, b in zip(starts, (*starts[1:], len(weights)), strict=True))


def _cut(
    weights: Sequence[int],
    num_stages: int,
    cost: Callable[[int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the cheapest cut by dynamic programming: joint cost, and the start of each stage.

    `best[i]` is that of the first i layers in as many stages as the loop has reached.
    """
    before = list(accumulate(weights, initial=0))
    best: list[tuple[float, tuple[int, ...]]] = [(cost(w), (0,)) for w in before]
    for stage in range(2, num_stages + 1):
        for i in range(len(weights), stage - 1, -1):  # downwards: below i nothing has changed yet
            best[i] = min(
                (join(best[j][0], cost(before[i] - before[j])), (*best[j][1], j))
                for j in range(stage - 1, i)
            )
    return best[-1]
