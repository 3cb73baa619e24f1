"""Ladder of a fitted run, with injected outcomes (on real ranks: test_fit_runs.py)."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megacpp.config.arguments import Resolved, flatten, parse_run, replace_keys
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, MegacppError
from megacpp.launch.auto_fit import _follow, _lead, _Orders
from megacpp.launch.command import command_words
from megacpp.launch.fit import BUMP, Attempt, Ladder, Outcome, climb, knobs_between, outcome_of
from megacpp.launch.trial import (
    SETTINGS,
    TrialCommand,
    _until_over,
    out_of_memory,
    run_trial,
    trial_command,
)
from megacpp.memory.estimate import MemoryEstimate
from megacpp.run.rank_store import RankStore

OOM, OK = Outcome("oom"), Outcome("ok", step_s=(9.0, 1.0, 2.0, 3.0))
BASE = parse_run(["tiny", "--train.tokens-per-step", "32768"], 8).config


@dataclass(frozen=True)
class Rung:
    config: Config
    estimate: MemoryEstimate
    checkpointing: bool
    score: Any = 1


def rung(point: int, checkpointing: bool, rows: int = 8, **other: Any) -> Rung:
    """Return a candidate with a predicted need of `point` bytes."""
    keys = {
        "train.device_batch_size": rows,
        "recompute.ablock": "full" if checkpointing else "none",
    }
    keys |= {key.replace("__", "."): value for key, value in other.items()}
    needs = MemoryEstimate({}, {}, "", {}, 0, point, point, 100, ())
    return Rung(replace_keys(BASE, keys), needs, checkpointing)


def walked(
    candidates: Sequence[Rung], outcomes: Sequence[Outcome], most: int = 1, **given: Any
) -> tuple[list[int], list[Attempt]]:
    """Which candidates were tried, by their place in the plan; the last outcome repeats."""
    ladder = Ladder(candidates, BASE, 120, 100, **given)
    tried: list[int] = []

    def run(number: int, candidate: Any) -> Outcome:
        assert number == len(tried) + 1
        tried.append(next(i for i, c in enumerate(candidates) if c is candidate))
        return outcomes[min(number, len(outcomes)) - 1]

    try:
        climb(ladder, run, most)
    except ConfigError:
        tried.append(-1)
    return tried, ladder.attempts


PLAN = [
    rung(95, False, 8),
    rung(70, True, 8),
    rung(80, False, 4),
    rung(60, True, 4),
    rung(65, False, 2),
    rung(50, True, 2),
    rung(40, True, 1),
]


def test_a_retry_preserves_gradient_checkpointing() -> None:
    """Reproduce a known failure: 8 rows with recompute were traded for 4 rows without."""
    candidates = [rung(90, True, 8), rung(80, False, 4), rung(60, True, 4)]
    assert walked(candidates, [OOM, OK])[0] == [0, 2]
    assert walked(PLAN, [OOM, OK])[0] == [0, 2], "nor is it switched on as long as rows can go"


@pytest.mark.parametrize("failures", range(7))
def test_out_of_memory_at_each_rung_walks_the_ladder_in_order(failures: int) -> None:
    # Fewer rows as long as they help; then recompute with as many, one knob; then fewer again.
    order = [0, 2, 4, 5, 6]
    tried, attempts = walked(PLAN, [OOM] * failures + [OK])
    whole = [*order, -1]
    assert tried == whole[: min(failures + 1, len(whole))]
    points = [attempt.candidate.estimate.point for attempt in attempts]
    assert all(b <= a * (1 - BUMP) for a, b in pairwise(points))
    heads = [attempt.headroom for attempt in attempts]
    assert heads == sorted(heads) and heads[0] == round(1 - 100 / 120, 4)


def test_what_is_predicted_to_need_as_much_is_not_tried() -> None:
    """Skip a second candidate that fits on paper, as the first one did."""
    candidates = [rung(90, False, 8), rung(89, False, 4), rung(88, False, 2)]
    assert walked(candidates, [OOM, OK])[0] == [0, 2], "89 is within 2 % of 90"
    assert walked([rung(101, False), rung(99, False)], [OK])[0] == [1], "beyond the budget"
    extra = {"extra_bytes": lambda c: 5 if c is candidates[0] else 0}
    assert walked([candidates[0], rung(96, False, 4)], [OK], **extra)[0] == [0]
    assert walked([rung(96, False), candidates[1]], [OK], extra_bytes=lambda _: 5)[0] == [1]


def test_one_knob_at_a_time_where_that_is_possible() -> None:
    first = rung(95, False, 8)
    both = rung(60, False, 4, mesh__tp=2, train__grad_accum=4)
    rows, tensor = rung(70, False, 4), rung(50, False, 8, mesh__tp=2, mesh__dp_shard=4)
    tried, attempts = walked([first, both, tensor, rows], [OOM, OK])
    assert tried == [0, 2] and attempts[1].knobs == ("mesh.tp",), "dp_shard follows from tp"
    tried, attempts = walked([first, both], [OOM, OK])
    assert tried == [0, 1] and attempts[1].knobs == ("train.device_batch_size", "mesh.tp")
    dropped = rung(60, True, 8)
    assert walked([first, dropped, both], [OOM, OK])[0] == [0, 2], "recompute stays before that"
    other = rung(9, True, 8, recompute__norms=True, recompute__mlp=False)
    assert knobs_between(first.config, other.config) == ("recompute",), "a policy is one knob"


def test_unsound_candidates_are_passed_over_and_say_nothing_of_memory() -> None:
    bad = Outcome("unsound", "step 3: CRITICAL")
    tried, attempts = walked(PLAN, [bad, OK])
    assert tried == [0, 1] and attempts[1].headroom == attempts[0].headroom
    record = attempts[0].as_dict()
    assert record["outcome"] == "unsound" and record["detail"] == "step 3: CRITICAL"
    assert attempts[1].as_dict()["changed"] == {"recompute.ablock": "full"}
    assert attempts[1].as_dict()["median_step_s"] == 2.0


def test_after_lack_of_memory_recompute_stays_as_it_is_for_good() -> None:
    bad = Outcome("unsound")
    assert walked(PLAN, [OOM, bad, OK])[0] == [0, 2, 4], "not 1, the next one of the plan"


def test_other_failures_are_bugs_and_end_the_run() -> None:
    ladder = Ladder(PLAN, BASE, 120, 100)
    with pytest.raises(
        MegacppError, match=r"attempt 1 .* and not for lack of memory: boom"
    ) as found:
        climb(ladder, lambda number, _: Outcome("failed", "boom", code=3))
    assert found.value.exit_code == 3 and len(ladder.attempts) == 1


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([], "the plan has no candidate"),
        ([rung(300, True), rung(200, True)], "no candidate fits: the smallest of 2 needs"),
        (PLAN[:2], r"none of 2 candidates that were tried is left \(1: oom, 2: oom\)"),
    ],
    ids=["none", "too large", "tried"],
)
def test_nothing_left_is_one_line(plan: list[Rung], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        climb(Ladder(plan, BASE, 120, 100), lambda *_: OOM)
    text = str(found.value)
    assert text.startswith("memory.fit=auto: ") and ". Fix: " in text and "\n" not in text
    assert found.value.exit_code == 2


def in_steps(*seconds: float) -> list[Outcome]:
    """Return sound outcomes whose median step takes so long, with a slow first step."""
    return [Outcome("ok", step_s=(9.0 / s, s, s, s)) for s in seconds]


def chosen(outcomes: Sequence[Outcome], most: int) -> tuple[int, int]:
    """Return the number of attempts, and the place in the plan of the candidate that trains."""
    ladder = Ladder(PLAN, BASE, 120, 100)
    found = climb(ladder, lambda number, _: outcomes[number - 1], most)
    assert ladder.attempts[(ladder.chosen or 0) - 1].candidate is found
    return len(ladder.attempts), PLAN.index(found)  # type: ignore[arg-type]


def test_the_fastest_of_the_best_few_trains() -> None:
    assert chosen(in_steps(3.0, 1.0, 2.0, 0.5), 3) == (3, 1), "by the median, not the first step"
    assert chosen(in_steps(2.0, 2.0, 2.0), 3) == (3, 0), "of equals the planner's first"
    bad = Outcome("unsound")
    assert chosen([*in_steps(3.0), bad, *in_steps(2.0, 1.0)], 3) == (4, 3), "sound ones count"
    assert chosen([*in_steps(3.0), *[OOM] * 9], 3) == (5, 0), "and the plan may end before"


def test_a_retry_compares_policies() -> None:
    """Two candidates recompute, by different policies: the one like the last comes first."""
    first = rung(90, True, 8)
    other = rung(70, True, 8, recompute__ablock="selective")
    like = rung(60, True, 4)
    assert walked([first, other, like], [OOM, OK])[0] == [0, 2]


def test_nothing_unscored_is_run() -> None:
    with pytest.raises(AssertionError, match="never scored"):
        Ladder([rung(1, False), Rung(BASE, PLAN[0].estimate, False, None)], BASE, 120, 100)
    assert climb(Ladder(PLAN, BASE, 120, 100), lambda *_: OK) is PLAN[0]


# ---- what four steps say -------------------------------------------------------------------------


def steps(norms: Sequence[float | None], **of_last: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "step": i,
            "loss": 5.0,
            "grad_norm": norm,
            "step_s": (100.0, 3.0, 1.0, 2.0)[i],
            "tokens_per_s": (1.0, 10.0, 30.0, 20.0)[i],
            "peak_bytes": 7 + i,
            "skipped": False,
            "nonfinite": 0,
        }
        for i, norm in enumerate(norms)
    ]
    rows[-1] |= of_last
    return rows


def test_the_first_step_counts_for_nothing() -> None:
    found = outcome_of(steps([1.0, 1.1, 1.2, 1.3]))
    assert found.kind == "ok" and found.median_step_s == 2.0 and found.median_tokens_per_s == 20.0
    assert found.peak_bytes == 10


@pytest.mark.parametrize(
    ("norms", "of_last", "kind"),
    [
        ([1160.0, 3648.0, 7200.0, 7000.0], {}, "ok"),  # a healthy start
        ([1.0, 99.0, 60.0, 50.0], {}, "ok"),
        ([1.0, 101.0, 1.0, 1.0], {}, "unsound"),
        ([1.0, 1.0, 1.0, 150.0], {}, "unsound"),
        ([1.0, 1.0, None, 1.0], {}, "unsound"),
        ([1.0, 1.0, math.inf, 1.0], {}, "unsound"),
        ([1.0, 1.0, 1.0, 1.0], {"loss": None}, "unsound"),
        ([1.0, 1.0, 1.0, 1.0], {"skipped": True}, "unsound"),
        ([1.0, 1.0, 1.0, 1.0], {"nonfinite": 3}, "unsound"),
        ([1.0, 1.0, 1.0], {}, "failed"),
    ],
)
def test_gradient_norms_against_their_average(
    norms: list[float | None], of_last: dict[str, Any], kind: str
) -> None:
    assert outcome_of(steps(norms, **of_last)).kind == kind


# ---- what is started -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "tiny",
        "nam56r_base --mesh.tp 2 --mesh.ep 4",
        "nam52_deep_base --model.moe.capacity-factor none --optim.eps 1e-10",
        "dense_110m --train.compile inductor --run.dir /a/b=c --model.attention.kind mla"
        " --model.attention.qk-norm false --model.attention.yarn.factor 8",
    ],
)
def test_a_configuration_and_its_command_line(flags: str) -> None:
    config = parse_run(flags.split(), 8).config
    assert parse_run(command_words(config.preset, flatten(config)), 8).config == config


def test_four_steps_of_a_candidate_and_nothing_else(tmp_path: Path) -> None:
    config = parse_run("nam56r_base --mesh.tp 2 --optim.warmup-steps 50".split(), 8).config
    order = trial_command(3, config, 8, tmp_path / "own")
    run = parse_run(order.arguments, 8).config
    assert run == replace_keys(config, {**SETTINGS, "run.dir": str(tmp_path / "own")})
    assert (run.run.steps, run.memory.fit, run.checkpoint.every) == (4, "smoke", 0)
    assert run.mesh == config.mesh and run.train == config.train and 0 < order.port < 65536


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        (1, "RuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory: 12", True),
        (-9, "", True),
        (1, "ValueError: sizes differ", False),
        (0, "", False),
    ],
)
def test_what_lack_of_memory_looks_like(code: int, said: str, expected: bool) -> None:
    assert out_of_memory({"code": code, "said": said, "ended": False}) == expected
    assert not out_of_memory({"code": -9, "said": "", "ended": True}), "ended for a peer's sake"


def test_a_port_that_somebody_took_is_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Outcome("failed", "rank 0: torch.distributed.DistNetworkError: ... name: EADDRINUSE")
    ends = [taken, taken, OK]
    given: list[TrialCommand] = []

    def run_order(order: TrialCommand, _: RankStore) -> Outcome:
        given.append(order)
        return ends[len(given) - 1]

    monkeypatch.setattr("megacpp.launch.auto_fit.run_trial", run_order)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    orders, asked = _Orders(RankStore(), 8, tmp_path), Rung(BASE, PLAN[0].estimate, False)
    assert orders.run(1, asked) is OK
    assert [order.number for order in given] == [1, 2, 3], "each is an order of its own"
    assert {order.folder for order in given} == {str(tmp_path / "attempt-1")}
    ends[2] = taken
    given.clear()
    assert orders.run(2, asked).kind == "failed", "three ports in a row are something else"


def test_the_margin_of_calibration_reaches_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a candidate is tried that measured runs have shown not to fit."""

    class Assessed:
        margin = SimpleNamespace(extra_bytes=7)

    room = SimpleNamespace(device_bytes=120, budget_bytes=100, source="given")
    estimator: Any = SimpleNamespace(size=8, room=room, admission=lambda config: Assessed)
    plan = SimpleNamespace(candidates=PLAN, world=8, budget_bytes=100, tokens_per_step=1)
    vars(plan).update(considered=1, out={})
    climbs: list[tuple[Ladder, int]] = []

    def climbed(ladder: Ladder, _: Any, most: int) -> Rung:
        climbs.append((ladder, most))
        return PLAN[0]

    monkeypatch.setattr("megacpp.launch.auto_fit.planned", lambda *_: plan)
    monkeypatch.setattr("megacpp.launch.auto_fit.climb", climbed)
    monkeypatch.setattr("megacpp.launch.auto_fit.summary", lambda *_: {})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = replace(BASE, run=replace(BASE.run, dir=str(tmp_path / "run")))
    _lead(RankStore(), estimator, Resolved(run, {}, ()))
    ((ladder, most),) = climbs
    assert ladder.extra_bytes(PLAN[0]) == 7
    assert most == run.memory.fit_candidates > 1, "the first that fits isn't the fastest"


def test_other_ranks_hear_that_the_first_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(device_bytes=None, budget_bytes=None, source="no device")
    estimator: Any = SimpleNamespace(size=8, room=room)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run, peers = replace(BASE, run=replace(BASE.run, dir=str(tmp_path / "run"))), RankStore()
    with pytest.raises(ConfigError, match=r"memory\.fit=auto: no device") as error:
        _lead(peers, estimator, Resolved(run, {}, ()))
    assert peers.told("order/1")
    assert peers.hear("order/1") == {"error": str(error.value), "code": 2}


def test_other_ranks_take_what_the_first_one_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each trial that they are told to run, with the words of the command line."""
    ran: list[TrialCommand] = []
    monkeypatch.setattr("megacpp.launch.auto_fit.run_trial", lambda order, _: ran.append(order))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    peers, words = RankStore(), ("tiny", "--mesh.tp", "2")
    trial = TrialCommand(1, words, "run/trial", "localhost", 1234)
    peers.tell("order/1", {"run": {**vars(trial), "arguments": list(words)}})
    peers.tell("order/2", {"go": list(words)})
    assert _follow(peers, 8) == parse_run(list(words), 8).config
    assert ran == [trial]


@pytest.mark.parametrize("code", [0, 1])
def test_other_ranks_hear_of_a_trial_that_failed_here(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    peers, child = RankStore(), SimpleNamespace(poll=lambda: code)
    assert _until_over(child, "1/failed", peers) == (code, False)  # type: ignore[arg-type]
    assert peers.told("1/failed") == bool(code)


def test_an_interrupted_trial_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    monkeypatch.setattr("megacpp.launch.trial.spawn", lambda *_: child)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    peers = RankStore()
    monkeypatch.setattr(peers, "told", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_trial(TrialCommand(1, (), str(tmp_path / "trial"), "localhost", 1234), peers)
    assert child.returncode == -signal.SIGKILL
