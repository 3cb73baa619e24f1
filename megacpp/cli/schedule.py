"""Actions of every rank of a pipeline; torch says those that we have no rule for."""

from __future__ import annotations

from functools import lru_cache

from megacpp.config.schema import Config
from megacpp.model.stage_actions import Actions, from_torch
from megacpp.model.stages import BOTH_WAYS, as_scheduled, stage_parts, stages_per_rank, walks_once
from megacpp.speed.pipeline import KNOWN, schedule


def pipeline_actions(config: Config) -> Actions:
    """Return the actions of each rank of `pp`; both ways: of the first half of the ranks.

    Ranks r and P - 1 - r of a pipeline that goes both ways do the same at the same time.

    Args:
        config: resolved, with a pipeline.
    """
    config = as_scheduled(config)
    mesh, micro = config.mesh, config.train.grad_accum
    if mesh.pp_schedule in KNOWN:
        return schedule(mesh.pp_schedule, mesh.pp, micro, stages_per_rank(mesh.pp_schedule))
    parts = [part for rank in range(mesh.pp) for part in stage_parts(config.model, mesh, rank)]
    whole = frozenset(part.index for part in parts if walks_once(config.model, mesh, part))
    if mesh.pp_schedule in BOTH_WAYS:
        return _of_torch("dualpipev", mesh.pp // 2, micro // 2, whole)
    return _of_torch(mesh.pp_schedule, mesh.pp, micro, whole)


@lru_cache(maxsize=256)
def _of_torch(name: str, ranks: int, microbatches: int, whole: frozenset[int]) -> Actions:
    from parallel.simulate.schedule import torch_order  # imports torch

    return from_torch(torch_order(name, ranks, microbatches), whole)
