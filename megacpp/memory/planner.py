"""Enumerate and rank the mesh, device batch and recompute policy that a run could have.

Candidates are not run: `estimate` gives the memory of each. The order, by contract S4-10: it fits;
a larger device batch; no recompute; fewer microbatches; less repeated work (the contract doesn't
distinguish policies); more headroom; smaller tp; smaller ep; then smaller cp, pp and dp_replicate,
so that no two candidates are equal.

A mesh that shares each row, or its layers, between many ranks has many rows to a microbatch for
that reason alone, so its candidates compete only if sharing has an advantage. A candidate is
dominated by another one that fits, has no larger axis (tp, cp, pp, dp_replicate) and a smaller one,
gives every device at least as many tokens in a microbatch, and repeats no more work.

More rows of a microbatch never need less memory, nor does a policy that recomputes less: so most
candidates are decided without an estimate of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.budget import BRIEF, EstimateFunction, as_planned
from megacpp.memory.estimate import MemoryEstimate
from megacpp.memory.plan_space import (
    Policy,
    mesh_is_legal,
    meshes,
    no_rows,
    padded_dispatch,
    pipeline_is_legal,
    policies,
    policy_is_legal,
    row_choices,
    settings_of,
    stage_ranks,
    with_knobs,
)

FITS, AT_RISK, TOO_LARGE = range(3)
SHOWN = 10  # first candidates, whose experts' exchange is chosen
MISFITS = {"fits": FITS, "unknown": FITS, "at_risk": AT_RISK, "does_not_fit": TOO_LARGE}
REASONS = {
    "indivisible": "tokens a step that their data ranks don't divide",
    "mesh": "axes that the model doesn't fit",
    "pipeline": "too few microbatches for the pipeline",
    "dominated": "another layout gives each device the same work, split less",
    "memory": "more memory than there is",
    "slower": "slower than those shown, whether they fit or not",
}


class Score(NamedTuple):
    """Sort key of candidates, smallest first; each field takes precedence over those after it."""

    misfit: int  # 0 fits, 1 at risk: only if routers and allocator are kind
    fewer_rows: int  # - device batch
    checkpointing: bool
    grad_accum: int
    policy: int  # place on the ladder: how much runs again
    less_headroom: int  # - free memory, in whole percent of the budget
    tp: int
    ep: int
    cp: int
    pp: int
    dp_replicate: int


CRITERIA = {
    "misfit": "fits whatever routers and allocator do",
    "fewer_rows": "a larger device batch",
    "checkpointing": "nothing runs again",
    "grad_accum": "fewer microbatches",
    "policy": "less work repeated",
    "less_headroom": "more headroom",
    "tp": "a smaller tp",
    "ep": "a smaller ep",
    "cp": "a smaller cp",
    "pp": "a smaller pp",
    "dp_replicate": "fewer replicas",
}


@dataclass(frozen=True)
class Candidate:
    """Configuration with its estimate and its score.

    Attributes:
        config: resolved.
        policy: its recompute policy.
        estimate: of the rank that needs most memory.
        rank: that rank.
        score: its place among all candidates.
        settings: see `knobs`.
    """

    config: Config
    policy: Policy
    estimate: MemoryEstimate
    rank: int
    score: Score
    settings: tuple[tuple[str, Any], ...] = field(repr=False)

    @property
    def checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward (the older `gradient_checkpointing`)."""
        return self.policy.checkpointing

    def knobs(self) -> dict[str, Any]:
        """Return the dotted settings that make the run this candidate."""
        return dict(self.settings)

    @property
    def device_tokens(self) -> float:
        """Tokens of a microbatch through all layers that equal one device's share of its work."""
        return device_tokens(self.config, self.config.mesh, self.config.train.device_batch_size)


@dataclass(frozen=True)
class Plan:
    """Candidates in the order in which they should be tried.

    Attributes:
        world: number of ranks.
        budget_bytes: bytes that a rank may use.
        tokens_per_step: tokens of an optimizer step.
        candidates: the best one first.
        considered: number of candidates and of configurations that were ruled out.
        out: how many were ruled out, by reason (`REASONS`).
        estimated: how many were estimated; bounds decided the others.
        nearest: the smallest of the estimated configurations that are too large.
    """

    world: int
    budget_bytes: int
    tokens_per_step: int
    candidates: tuple[Candidate, ...]
    considered: int
    out: dict[str, int]
    estimated: int
    nearest: Candidate | None = None

    @property
    def legal(self) -> int:
        """Number of configurations that could be run with enough memory."""
        return self.considered - sum(self.out[r] for r in ("indivisible", "mesh", "pipeline"))

    def instead_of(self, other: Candidate) -> Candidate | None:
        """Return the first candidate that dominates `other`; None: no candidate does.

        Both plans must have the same policies.
        """
        theirs = _cut_of(other)
        return next((one for one in self.candidates if _cut_of(one).beats(theirs)), None)


def plan(
    config: Config,
    world: int,
    budget_bytes: int,
    tokens_per_step: int,
    fixed: Collection[str] = (),
    estimator: EstimateFunction = BRIEF,
    watch: Callable[[Sequence[MeshConfig]], Iterable[MeshConfig]] = iter,
) -> Plan:
    """Rank the configurations that `world` ranks of `budget_bytes` each can run.

    Args:
        config: the run; settings other than its mesh, batch and recompute policy stay as they are.
        world: number of ranks.
        budget_bytes: memory of a device less the headroom.
        tokens_per_step: tokens of an optimizer step.
        fixed: dotted settings that aren't varied (`mesh.tp`, `train.device_batch_size`, ...).
        estimator: estimates one rank; by default without `detail`.
        watch: wraps the meshes while they are searched, for example in a progress bar.

    Raises:
        ConfigError: `tokens_per_step` isn't a whole number of rows.
    """
    search = _Search(config, world, budget_bytes, tokens_per_step, fixed, estimator)
    for mesh in watch(tuple(meshes(config, world, fixed))):
        search.look_at(mesh)
    found = sorted(search.found, key=lambda c: c.score)
    found[:SHOWN] = sorted(map(search.without_waits, found[:SHOWN]), key=lambda c: c.score)
    return search.plan(tuple(found))


def deciding(better: Score, worse: Score) -> str:
    """Return the first criterion in which two scores differ."""
    return next(name for name in Score._fields if getattr(better, name) != getattr(worse, name))


def device_tokens(config: Config, mesh: MeshConfig, rows: int) -> float:
    """Return a device's share of a microbatch, as tokens that pass through all layers."""
    return rows * config.data.seq_len / (mesh.tp * mesh.cp * mesh.pp)


class _Cut(NamedTuple):
    """Sort key of dominance: no number is larger and at least one of the axes is smaller."""

    tp: int
    cp: int
    pp: int
    dp_replicate: int
    fewer_tokens: float  # - `device_tokens`
    policy: int

    def beats(self, other: _Cut) -> bool:
        return self[:4] != other[:4] and all(a <= b for a, b in zip(self, other, strict=True))


def _cut(mesh: MeshConfig, tokens: float, policy: int) -> _Cut:
    return _Cut(mesh.tp, mesh.cp, mesh.pp, mesh.dp_replicate, -tokens, policy)


def _cut_of(one: Candidate) -> _Cut:
    return _cut(one.config.mesh, one.device_tokens, one.score.policy)


class _Search:
    """Search over meshes, those of small axes first."""

    def __init__(
        self,
        config: Config,
        world: int,
        budget: int,
        tokens: int,
        fixed: Collection[str],
        estimator: EstimateFunction,
    ) -> None:
        assert world > 0
        if tokens < 1 or tokens % config.data.seq_len:
            raise no_rows(tokens, config.data.seq_len, world)
        self.config, self.world, self.budget, self.tokens = config, world, budget, tokens
        self.fixed, self.estimator = fixed, estimator
        self.policies = policies(config, fixed)
        self.found: list[Candidate] = []
        self.out: Counter[str] = Counter()
        self.estimated = 0
        self.front: list[_Cut] = []
        self.nearest: Candidate | None = None

    def plan(self, found: tuple[Candidate, ...]) -> Plan:
        """Return the plan with those candidates."""
        out = {reason: self.out[reason] for reason in REASONS}
        asked, considered = (self.world, self.budget, self.tokens), len(found) + sum(out.values())
        return Plan(*asked, found, considered, out, self.estimated, self.nearest)

    def config_of(self, mesh: MeshConfig, rows: int, policy: int) -> Config:
        """Return the configuration with `rows` rows under the policy with that index."""
        return with_knobs(self.config, mesh, rows, self.tokens, self.policies[policy])

    def choices(self, mesh: MeshConfig) -> tuple[list[int], list[int]]:
        """Return legal rows of a mesh and indices of its legal policies; count what is illegal."""
        rows = row_choices(self.config, mesh, self.tokens, self.fixed)
        if not rows:
            self.out["indivisible"] += len(self.policies)
            return [], []
        if not mesh_is_legal(self.config, mesh, self.world):
            self.out["mesh"] += len(rows) * len(self.policies)
            return [], []
        ranks = mesh.dp_replicate * mesh.dp_shard
        of_ranks = self.tokens // self.config.data.seq_len // ranks
        legal = [r for r in rows if pipeline_is_legal(self.config, mesh, r, of_ranks // r)]
        self.out["pipeline"] += (len(rows) - len(legal)) * len(self.policies)
        allowed = [i for i, p in enumerate(self.policies) if policy_is_legal(self.config, mesh, p)]
        self.out["mesh"] += len(legal) * (len(self.policies) - len(allowed))
        return legal, allowed

    def look_at(self, mesh: MeshConfig) -> None:
        """Add the candidates of one mesh that fit and aren't dominated, and count the others."""
        legal, allowed = self.choices(mesh)
        left = {i: self._undominated(mesh, legal, i) for i in allowed}
        self.out["dominated"] += sum(len(legal) - len(some) for some in left.values())
        for found in self.fitting(mesh, left):
            self._add(found)

    def fitting(self, mesh: MeshConfig, left: dict[int, list[int]]) -> Iterator[list[Candidate]]:
        """Yield the candidates of one mesh that fit, by policy, that which keeps least first.

        Args:
            mesh: whose ranks are estimated.
            left: rows that may fit, by index of the policy in ascending order.
        """
        looks = _Looks(self, mesh)
        misfits: dict[int, int] = {}  # by policy: rows that don't fit
        for i in reversed(left):  # the policy that keeps least comes first
            bound = [
                rows for j, rows in misfits.items() if self.policies[j].keeps_less(self.policies[i])
            ]
            some = [r for r in left[i] if r < min(bound, default=r + 1)]
            fitting = _as_many_as_fit(some, lambda r, i=i: looks.at(r, i).score.misfit < TOO_LARGE)
            self.out["memory"] += len(left[i]) - len(fitting)
            if len(fitting) < len(some):
                misfits[i] = some[len(fitting)]
            yield [looks.at(r, i) for r in fitting]

    def without_waits(self, found: Candidate) -> Candidate:
        """Return the candidate with padded dispatch of experts' rows, if that fits as well."""
        config = padded_dispatch(found.config, self.world, self.fixed)
        if config is None:
            return found
        looks = _Looks(self, config.mesh)
        looks.ranks = stage_ranks(config, self.world)
        rank, needs, misfit = looks._fullest(config)
        if misfit > found.score.misfit:
            return found
        settings = (*found.settings, ("mesh.ep_dispatch", "padded"))
        free = (self.budget - needs.point) * 100 // max(1, self.budget)
        score = found.score._replace(misfit=misfit, less_headroom=-free)
        return Candidate(config, found.policy, needs, rank, score, settings)

    def _undominated(self, mesh: MeshConfig, rows: Sequence[int], policy: int) -> list[int]:
        cuts = {r: _cut(mesh, device_tokens(self.config, mesh, r), policy) for r in rows}
        return [r for r, cut in cuts.items() if not any(c.beats(cut) for c in self.front)]

    def _add(self, found: Sequence[Candidate]) -> None:
        self.found += found
        sure = [c for c in found if c.score.misfit == FITS]
        if sure:  # of those with the same policy, the one with the most rows beats what others beat
            cut = _cut_of(max(sure, key=lambda c: c.config.train.device_batch_size))
            if cut not in self.front:
                self.front.append(cut)


class _Looks:
    """Candidates of one mesh, each estimated once."""

    def __init__(self, search: _Search, mesh: MeshConfig) -> None:
        self.search, self.mesh = search, mesh
        self.ranks: list[int] = []
        self.seen: dict[tuple[int, int], Candidate] = {}

    def at(self, rows: int, policy: int) -> Candidate:
        """Return the candidate with `rows` rows under the policy with that index."""
        key = rows, policy
        if key not in self.seen:
            self.seen[key] = self._look(rows, policy)
        return self.seen[key]

    def _look(self, rows: int, policy: int) -> Candidate:
        search, rung = self.search, self.search.policies[policy]
        config = search.config_of(self.mesh, rows, policy)
        if not self.ranks:
            self.ranks = stage_ranks(config, search.world)
        search.estimated += 1
        rank, needs, misfit = self._fullest(config)
        score = score_of(config, needs, misfit, rung.checkpointing, policy, search.budget)
        settings = tuple(settings_of(config, search.config))
        found = Candidate(config, rung, needs, rank, score, settings)
        nearest = search.nearest
        if misfit == TOO_LARGE and (nearest is None or needs.point < nearest.estimate.point):
            rank, needs, _ = self._fullest(config, True)  # ranks behind that one may need more
            search.nearest = replace(found, estimate=needs, rank=rank)
        return found

    def _fullest(self, config: Config, every: bool = False) -> tuple[int, MemoryEstimate, int]:
        """Return the rank that needs most, its estimate, and the worst verdict of all ranks."""
        search, worst, found, config = self.search, FITS, [], as_planned(config)
        for rank in self.ranks:
            needs = search.estimator(config, search.world, rank, search.budget)
            worst = max(worst, MISFITS[needs.verdict])
            found.append((needs.point, rank, needs))
            if worst == TOO_LARGE and not every:
                break
        _, rank, needs = max(found, key=lambda f: (f[0], -f[1]))
        self.ranks.remove(rank)
        self.ranks.insert(0, rank)  # the next look is likely decided there too
        return rank, needs, worst


def score_of(
    config: Config,
    needs: MemoryEstimate,
    misfit: int,
    checkpointing: bool,
    policy: int,
    budget: int,
) -> Score:
    """Return the score of a candidate.

    Args:
        config: resolved.
        needs: estimate of its fullest rank.
        misfit: `FITS`, `AT_RISK` or `TOO_LARGE`.
        checkpointing: at least one block is recomputed.
        policy: index of the recompute policy; a larger one repeats more work.
        budget: bytes that a rank may use.
    """
    mesh, train = config.mesh, config.train
    return Score(
        misfit,
        -train.device_batch_size,
        checkpointing,
        train.grad_accum,
        policy,
        -((budget - needs.point) * 100 // max(1, budget)),
        mesh.tp,
        mesh.ep,
        mesh.cp,
        mesh.pp,
        mesh.dp_replicate,
    )


def _as_many_as_fit(rows: Sequence[int], fits: Callable[[int], bool]) -> Sequence[int]:
    """Return the prefix of ascending `rows` that fits, found by bisection."""
    if not rows or not fits(rows[0]):
        return []
    low, high = 1, len(rows)
    while low < high:
        middle = (low + high) // 2
        if fits(rows[middle]):
            low = middle + 1
        else:
            high = middle
    return rows[:low]
