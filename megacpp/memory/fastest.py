"""Find the fastest configurations that fit, of all that are legal.

Every candidate has a bound of its time, and meshes are estimated in the order of their bounds until
no other can be faster. The caller brings the seconds: nothing here knows a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.budget import BRIEF, EstimateFunction
from megacpp.memory.plan_space import meshes
from megacpp.memory.planner import FITS, Candidate, Plan, _Search


def fastest(
    config: Config,
    world: int,
    budget_bytes: int,
    tokens_per_step: int,
    least: Callable[[Config], float],
    seconds: Callable[[Config], float],
    few: int,
    fixed: Collection[str] = (),
    estimator: EstimateFunction = BRIEF,
    watch: Callable[[Sequence[MeshConfig]], Iterable[MeshConfig]] = iter,
) -> Plan:
    """Return the plan of the `few` fastest configurations that fit.

    Args:
        config: as for `plan`.
        world: number of ranks.
        budget_bytes: memory of a device less the headroom.
        tokens_per_step: tokens of an optimizer step.
        least: returns seconds that a configuration's step is never shorter than; cheap.
        seconds: returns seconds of a step.
        few: number of candidates to return; one at risk is returned only after those that fit.
        fixed: dotted settings that aren't varied.
        estimator: estimates one rank.
        watch: wraps the meshes while their bounds are computed.

    Raises:
        ConfigError: `tokens_per_step` isn't a whole number of rows.
    """
    search = _Search(config, world, budget_bytes, tokens_per_step, fixed, estimator)
    bounds: dict[MeshConfig, dict[tuple[int, int], float]] = {}
    queue: list[tuple[float, int, MeshConfig | Candidate]] = []
    for mesh in watch(tuple(meshes(config, world, fixed))):
        rows, allowed = search.choices(mesh)
        if rows and allowed:
            bounds[mesh] = {
                (r, i): least(search.config_of(mesh, r, i)) for i in allowed for r in rows
            }
            queue.append((min(bounds[mesh].values()), len(queue), mesh))
    heapq.heapify(queue)
    found: list[tuple[int, float, int, Candidate]] = []
    limit, number = float("inf"), len(queue)  # limit: seconds of the last of `few` that fit
    while queue and queue[0][0] < limit:
        *_, one = heapq.heappop(queue)
        if isinstance(one, Candidate):
            found.append((one.score.misfit, seconds(one.config), len(found), one))
            sure = sorted(time for misfit, time, _, _ in found if misfit == FITS)
            limit = sure[few - 1] if len(sure) >= few else limit
            continue
        left: dict[int, list[int]] = {}
        of_mesh = bounds.pop(one)
        for rows, policy in of_mesh:
            left.setdefault(policy, []).append(rows)
        for fits in chain.from_iterable(search.fitting(one, left)):
            bound = of_mesh[fits.config.train.device_batch_size, fits.score.policy]
            number += 1
            heapq.heappush(queue, (bound, number, fits))
    unfound = len(found[few:]) + sum(isinstance(one, Candidate) for *_, one in queue)
    search.out["slower"] += unfound + sum(map(len, bounds.values()))
    found.sort()
    for n, (_, time, number, one) in enumerate(found[:few]):
        other = search.without_waits(one)
        if other is not one and (shorter := seconds(other.config)) < time:
            found[n] = other.score.misfit, shorter, number, other
    found[:few] = sorted(found[:few])
    return search.plan(tuple(one for *_, one in found[:few]))
