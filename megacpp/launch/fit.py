"""Ladder of a fitted run: try candidates in turn, and take the fastest of those that are sound.

    plan -> four steps of the first -> out of memory? the next one that keeps recomputing as it is
         -> gradient norms against their average -> median of steps 1 to 3
         -> the next, until a few are sound      -> train the one with the smallest median

A candidate that ran out of memory was predicted to fit, so its estimate is wrong by some bytes.
Candidates with about the same prediction or more (`BUMP`) are then skipped. From then on candidates
with the last one's recompute policy come first, of these the ones that change a single setting, and
then the planner's order counts. Any other failure is a bug, and ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from megacpp.config.arguments import flatten
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, MegacppError, config_error
from megacpp.memory.budget import words
from megacpp.memory.planner import Candidate
from megacpp.run.health import Health

STEPS = 4
BUMP = 0.02  # fraction by which the next estimate must be below one that ran out of memory
# Settings derived from a candidate's mesh and batch; all have the same tokens per step.
DERIVED = ("train.grad_accum", "mesh.dp_shard")


@dataclass(frozen=True)
class Outcome:
    """Result of four steps.

    `unsound`: they ran, but their gradients say that training would fail. `failed`: a failure that
    no other configuration would avoid.

    Attributes:
        kind: class of the result.
        detail: message.
        step_s, tokens_per_s, grad_norms: figures of every step.
        peak_bytes: peak of rank 0.
        code: exit code of the first rank that failed.
        wall_s: seconds of the attempt.
    """

    kind: Literal["ok", "oom", "unsound", "failed"]
    detail: str = ""
    step_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    peak_bytes: int | None = None
    code: int = 0
    wall_s: float = 0.0

    @property
    def median_step_s(self) -> float | None:
        """Median seconds of the steps after the first, which builds kernels and allocates."""
        return median(self.step_s[1:]) if len(self.step_s) > 1 else None

    @property
    def median_tokens_per_s(self) -> float | None:
        """Median tokens per second of the steps after the first."""
        return median(self.tokens_per_s[1:]) if len(self.tokens_per_s) > 1 else None


@dataclass(frozen=True)
class Attempt:
    """Attempt to run a candidate.

    Attributes:
        number: index, from 1.
        changed: settings that differ from the previous attempt (for the first: from the requested
            configuration), new values by name.
        knobs: names of the changes for a person.
        headroom: fraction of the device that estimates had to leave free.
    """

    number: int
    candidate: Candidate
    changed: dict[str, Any]
    knobs: tuple[str, ...]
    headroom: float
    outcome: Outcome

    def as_dict(self) -> dict[str, Any]:
        """Return the attempt for launch.json."""
        o = self.outcome
        return {
            "attempt": self.number,
            "changed": self.changed,
            "knobs": list(self.knobs),
            "checkpointing": self.candidate.checkpointing,
            "headroom": self.headroom,
            "predicted_bytes": self.candidate.estimate.point,
            "outcome": o.kind,
            "detail": o.detail,
            "peak_bytes": o.peak_bytes,
            "median_step_s": o.median_step_s,
            "median_tokens_per_s": o.median_tokens_per_s,
            "grad_norms": list(o.grad_norms),
            "wall_s": o.wall_s,
        }


@dataclass
class Ladder:
    """Choice of the next candidate from the previous outcomes; it runs nothing itself.

    Args:
        candidates: scored candidates in the planner's order, all of the same tokens per step.
        asked: requested configuration.
        device_bytes, budget_bytes: memory of a device, and the part that estimates may use.
        extra_bytes: bytes that a candidate's estimate is known to miss (see calibration.py).
        attempts: attempts so far.
        chosen: number of the attempt whose candidate trains; None: none yet.
    """

    candidates: Sequence[Candidate]
    asked: Config
    device_bytes: int
    budget_bytes: int
    extra_bytes: Callable[[Candidate], int] = lambda _: 0
    attempts: list[Attempt] = field(default_factory=list)
    chosen: int | None = None

    def __post_init__(self) -> None:
        assert all(c.score is not None for c in self.candidates), "a candidate was never scored"
        self._ceiling = float(self.budget_bytes)
        self._tried: set[int] = set()

    def next(self) -> Candidate | None:
        """Return the next candidate, or None if none is left."""
        left = [
            (i, c)
            for i, c in enumerate(self.candidates)
            if i not in self._tried and c.estimate.point <= self._ceiling
        ]
        if any(attempt.outcome.kind == "oom" for attempt in self.attempts):
            before = self.attempts[-1].candidate
            left.sort(
                key=lambda one: (
                    one[1].config.recompute != before.config.recompute,
                    len(knobs_between(before.config, one[1].config)) > 1,
                    one[0],
                )
            )
        for i, candidate in left:
            if self._needs(candidate) <= self._ceiling:
                self._now = i
                return candidate
        return None

    def note(self, outcome: Outcome) -> Attempt:
        """Record the outcome of the candidate that `next` returned last."""
        candidate = self.candidates[self._now]
        before = self.attempts[-1].candidate.config if self.attempts else self.asked
        attempt = Attempt(
            len(self.attempts) + 1,
            candidate,
            difference(before, candidate.config),
            knobs_between(before, candidate.config),
            round(1 - self._ceiling / self.device_bytes, 4),
            outcome,
        )
        self.attempts.append(attempt)
        self._tried.add(self._now)
        if outcome.kind == "oom":
            self._ceiling = min(self._ceiling, self._needs(candidate) * (1 - BUMP))
        return attempt

    def _needs(self, candidate: Candidate) -> int:
        return candidate.estimate.point + self.extra_bytes(candidate)


def climb(ladder: Ladder, run: Callable[[int, Candidate], Outcome], most: int = 1) -> Candidate:
    """Run candidates of the ladder until some are sound; return the one with the fastest step.

    All have the same tokens per step, so the median step decides; of equal ones the first.

    Args:
        ladder: candidates.
        run: runs four steps of a candidate; the number of the attempt counts from 1.
        most: sound candidates to compare.

    Raises:
        ConfigError: no candidate is left.
        MegacppError: an attempt failed for another reason than memory; with its exit code.
    """
    sound: list[Attempt] = []
    while len(sound) < most and (candidate := ladder.next()) is not None:
        attempt = ladder.note(run(len(ladder.attempts) + 1, candidate))
        if attempt.outcome.kind == "ok":
            sound.append(attempt)
        if attempt.outcome.kind == "failed":
            raise _bug(attempt)
    if not sound:
        raise _nothing_left(ladder)
    best = min(sound, key=lambda a: a.outcome.median_step_s or math.inf)
    ladder.chosen = best.number
    return best.candidate


def difference(before: Config, after: Config) -> dict[str, Any]:
    """Return settings that differ, with their new values."""
    old = flatten(before)
    return {key: value for key, value in flatten(after).items() if old.get(key) != value}


def knobs_between(before: Config, after: Config) -> tuple[str, ...]:
    """Return names of the changes for a person; all settings of a recompute policy are one name."""
    keys = [key for key in difference(before, after) if key not in DERIVED]
    return tuple(dict.fromkeys("recompute" if k.startswith("recompute.") else k for k in keys))


def outcome_of(records: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return the outcome of the steps that a trial recorded in metrics.jsonl.

    Gradient norms are compared with their average by the rules of `Health`: a non-finite norm, a
    skipped step, or a norm beyond the critical limit makes a candidate unsound.
    """
    norms = tuple(row["grad_norm"] for row in records)
    outcome = Outcome(
        "ok",
        step_s=tuple(row["step_s"] for row in records),
        tokens_per_s=tuple(row["tokens_per_s"] for row in records),
        grad_norms=norms,
        peak_bytes=max((row["peak_bytes"] for row in records), default=None),
    )
    if len(records) != STEPS:
        return _as(outcome, "failed", f"{len(records)} of {STEPS} steps are on record")
    health = Health()
    for row, norm in zip(records, norms, strict=True):
        step = row["step"]
        if norm is None or row["loss"] is None or not math.isfinite(norm):
            return _as(outcome, "unsound", f"step {step + 1} is not finite")
        if row["skipped"] or row["nonfinite"]:
            return _as(outcome, "unsound", f"step {step + 1} has gradients that are not finite")
        warned = health.observe(step, row["loss"], norm)
        ratio = health.figures()["grad_norm_ratio"]
        if ratio is not None and ratio >= health.critical:
            return _as(outcome, "unsound", warned[0])
    return outcome


def _as(outcome: Outcome, kind: Literal["unsound", "failed"], detail: str) -> Outcome:
    return replace(outcome, kind=kind, detail=detail)


def _nothing_left(ladder: Ladder) -> ConfigError:
    tried = len(ladder.attempts)
    least = min((c.estimate.point for c in ladder.candidates), default=None)
    if least is None:
        rule = "the plan has no candidate for these ranks"
    elif not tried:
        rule = (
            f"no candidate fits: the smallest of {len(ladder.candidates)} needs {words(least)}, "
            f"{words(ladder.budget_bytes)} may be used"
        )
    else:
        ends = ", ".join(f"{a.number}: {a.outcome.kind}" for a in ladder.attempts)
        rule = (
            f"none of {tried} candidates that were tried is left ({ends}), and no other is below "
            f"{words(max(0.0, ladder._ceiling))}"
        )
    return config_error(
        "memory.fit", "auto", rule, "use more ranks, a shorter data.seq_len or a smaller model"
    )


def _bug(attempt: Attempt) -> MegacppError:
    said = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in attempt.changed.items())
    error = MegacppError(
        f"memory.fit=auto: attempt {attempt.number} ({said or 'as asked'}) failed, and not for "
        f"lack of memory: {attempt.outcome.detail}. Fix: run it alone with --memory.fit smoke."
    )
    error.exit_code = attempt.outcome.code or 1
    return error
