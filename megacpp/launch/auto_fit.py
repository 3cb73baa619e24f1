"""Fit of a launch (`--fit auto`): rank 0 plans, all ranks try candidates, the fastest trains."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacpp.config.arguments import Resolved, flatten, parse_run
from megacpp.config.schema import Config
from megacpp.errors import MegacppError, config_error
from megacpp.launch.command import command_words
from megacpp.launch.fit import Ladder, Outcome, climb, difference
from megacpp.launch.gate import Admission, Estimator
from megacpp.launch.trial import TrialCommand, port_conflict, run_trial, trial_command
from megacpp.memory.planner import Candidate, Plan, plan
from megacpp.run.rank_store import RankStore

PORTS = 3  # attempts to find a free port
SHOWN = 10  # candidates in the launch record


def fitted(
    resolved: Resolved, peers: RankStore, device: torch.device
) -> tuple[Resolved, Admission]:
    """Return the configuration of the fastest candidate that runs, and its memory estimate.

    Args:
        resolved: given configuration.
        peers: store of all ranks.
        device: device of this rank.

    Raises:
        ConfigError: no candidate fits.
        MegacppError: an attempt failed for another reason than memory.
    """
    size, estimator = peers.size, Estimator(resolved.config, peers.size, device)
    try:
        if peers.rank:
            config, told = _follow(peers, size), {}
        else:
            config, told = _lead(peers, estimator, resolved)
    except Exception:
        peers.gather("over", True)
        raise
    peers.gather("over", True)  # rank 0 may serve the store: it exits last
    found = replace(estimator.admission(config), **told)
    return _refit(resolved, config), found


def planned(estimator: Estimator, resolved: Resolved) -> Plan:
    """Return the plan of a run; settings of its command line are fixed."""
    budget = estimator.room.budget_bytes
    assert budget is not None
    settled = estimator.settled(resolved.config)
    found = plan(settled, estimator.size, budget, settled.train.tokens_per_step, resolved.given)
    return replace(
        found, candidates=tuple(_unsettled(c, resolved.config) for c in found.candidates)
    )


def _unsettled(candidate: Candidate, asked: Config) -> Candidate:
    """Restore `auto` in a candidate that was estimated with its resolved value."""
    train = replace(candidate.config.train, device=asked.train.device)
    return replace(
        candidate, config=replace(candidate.config, train=train, precision=asked.precision)
    )


def _lead(
    peers: RankStore, estimator: Estimator, resolved: Resolved
) -> tuple[Config, dict[str, Any]]:
    """Plan on rank 0, have all ranks try candidates, and return the configuration that works."""
    asked, room = resolved.config, estimator.room
    run = Path(resolved.config.run.dir)  # logs of failed attempts lie beside it, by start
    folder = run.with_name(f"{run.name}.fit") / time.strftime("%Y%m%d-%H%M%S")
    orders = _Orders(peers, estimator.size, folder)
    try:
        if room.device_bytes is None or room.budget_bytes is None:
            raise config_error("memory.fit", "auto", room.source, "give memory.device_gib")
        found = planned(estimator, resolved)
        ladder = Ladder(
            found.candidates,
            asked,
            room.device_bytes,
            room.budget_bytes,
            lambda c: estimator.admission(c.config).margin.extra_bytes,
        )
        print(
            f"memory.fit=auto: {len(found.candidates)} candidates, those that fit run now, "
            f"{asked.memory.fit_candidates} at most, and the fastest trains"
        )
        config = climb(ladder, orders.run, asked.memory.fit_candidates).config
    except Exception as error:
        code = error.exit_code if isinstance(error, MegacppError) else 1
        orders.say({"error": str(error), "code": code})
        raise
    with contextlib.suppress(OSError):
        folder.rmdir()  # nothing failed
        folder.parent.rmdir()
    orders.say({"go": command_words(config.preset, flatten(config))})
    attempts = tuple(
        {**attempt.as_dict(), "chosen": attempt.number == ladder.chosen}
        for attempt in ladder.attempts
    )
    return config, {"plan": summary(found, asked), "attempts": attempts}


def _follow(peers: RankStore, size: int) -> Config:
    """Run trials on another rank until rank 0 names the configuration."""
    number = 1
    while True:
        said = peers.hear(f"order/{number}")
        if "go" in said:
            return parse_run(said["go"], size).config
        if "error" in said:
            error = MegacppError(said["error"])
            error.exit_code = said["code"]
            raise error
        order = TrialCommand(**{**said["run"], "arguments": tuple(said["run"]["arguments"])})
        run_trial(order, peers)
        number += 1


@dataclass
class _Orders:
    """Messages of rank 0 to the other ranks."""

    peers: RankStore
    size: int
    folder: Path
    number: int = 0

    def say(self, what: dict[str, Any]) -> None:
        self.number += 1
        self.peers.tell(f"order/{self.number}", what)

    def run(self, number: int, candidate: Candidate) -> Outcome:
        for _ in range(PORTS):
            own = self.folder / f"attempt-{number}"
            order = trial_command(self.number + 1, candidate.config, self.size, own)
            self.say({"run": asdict(order)})
            outcome = run_trial(order, self.peers)
            assert outcome is not None
            if not port_conflict(outcome):
                break
        took = f"{outcome.median_step_s:.3f} s a step" if outcome.median_step_s else outcome.detail
        print(f"attempt {number}: {outcome.kind}, {took}", flush=True)
        return outcome


def summary(found: Plan, asked: Config) -> dict[str, Any]:
    """Return a plan for the launch record."""
    return {
        "world": found.world,
        "budget_bytes": found.budget_bytes,
        "tokens_per_step": found.tokens_per_step,
        "considered": found.considered,
        "out": dict(found.out),
        "candidates": len(found.candidates),
        "first": [
            {
                "changed": difference(asked, c.config),
                "predicted_bytes": c.estimate.point,
                "verdict": c.estimate.verdict,
                "score": list(c.score),
                "checkpointing": c.checkpointing,
            }
            for c in found.candidates[:SHOWN]
        ],
    }


def _refit(resolved: Resolved, config: Config) -> Resolved:
    """Return the command line with the fitted settings, each marked with its origin."""
    changed = difference(resolved.config, config)
    notes = tuple(f"{key} = {value} (memory.fit=auto)" for key, value in sorted(changed.items()))
    provenance = {**resolved.provenance, **dict.fromkeys(changed, "fitted")}
    return Resolved(config, provenance, (*resolved.notes, *notes))
