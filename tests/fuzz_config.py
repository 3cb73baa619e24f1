"""Random configurations: each one has a sound plan or ends in lines of its own, at once.

python -m tests.fuzz_config --count 20000 --seed 0 --workers 2 --out tried.jsonl

A plan is sound if its mesh has as many ranks as the world, and the memory of the fullest rank is a
finite sum of parts that are not negative. Configuration number N of a seed is the same for any
count and any number of workers. A block of sizes that no earlier plan of this user had is traced
once (megacpp/memory/trace_cache.py); these seconds are printed apart. All are CPU seconds of the
process, which other work on the machine doesn't change. The same command goes on with those that
`--out` has no row of.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import time
import traceback
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from megacpp.cli import block_trace
from megacpp.config.arguments import parse_run, replace_keys
from megacpp.config.checks.every import broken, resolve
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.config.settings import flatten, settings_of
from megacpp.errors import MegacppError
from megacpp.memory.budget import BRIEF, GIB, as_run, fullest

MOST_S = 5.0  # without traces of new blocks
MOST_TRACE_S = 60.0
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 48, 64, 127, 128, 1000, 4096, 65537, 10**6 + 3, 2**31)
WORLDS = (1, 1, 2, 3, 4, 8, 12, 64, 1000, 4096, 131072)
DEGREES = (1, 1, 1, 2, 4)


@dataclass(frozen=True)
class Trial:
    """Configuration, and what went wrong with it; nothing did if that is empty.

    Attributes:
        preset, changes, world: the configuration and its number of ranks.
        planned: it is legal and has a plan.
        wrong: an exception, an unsound plan, a message that isn't one line, or a late end.
        seconds: CPU time, without traces.
        trace_s: CPU time of traces.
        number: of the configuration.
    """

    preset: str
    changes: dict[str, Any]
    world: int
    planned: bool = False
    wrong: str = ""
    seconds: float = 0.0
    trace_s: float = 0.0
    number: int = -1


@lru_cache
def base(preset: str) -> Config:
    """Return a preset as a command line without flags resolves it."""
    return parse_run([preset], 1).config


def changes(draw: random.Random) -> dict[str, Any]:
    """Return one to eight settings with values of their type, some of them out of range."""
    found: dict[str, Any] = {}
    settings = list(settings_of(Config).values())
    for one in draw.sample(settings, draw.randint(1, 8)):
        choices = typing.get_args(one.kind)
        if one.kind is bool:
            found[one.key] = draw.random() < 0.5
        elif one.kind is int:
            found[one.key] = draw.choice(NUMBERS) * draw.choice((1, 1, 1, -1))
        elif one.kind is float:
            found[one.key] = draw.choice((0.0, 0.5, 1.0, 1e-8, 3.0, 1e30, -1.0))
        elif one.kind is str:
            found[one.key] = draw.choice(("", "A", "AMERF", "1", "0,2", "1:3", "x", "-1", "E" * 9))
        elif choices and all(isinstance(choice, str) for choice in choices):
            found[one.key] = draw.choice(choices)
    return found


def likely(draw: random.Random, preset: str) -> dict[str, Any]:
    """Return a mesh of small degrees, and one to four settings near their values."""
    axes = ("pp", "dp_replicate", "cp", "tp", "ep")
    found: dict[str, Any] = {f"mesh.{axis}": draw.choice(DEGREES) for axis in axes}
    found |= {"mesh.dp_shard": -1, "train.grad_accum": 4, "train.tokens_per_step": 0}
    own, settings = flatten(base(preset)), list(settings_of(Config).values())
    for one in draw.sample(settings, draw.randint(1, 2)):
        value, choices = own.get(one.key), typing.get_args(one.kind)
        if isinstance(value, bool):
            found[one.key] = not value
        elif isinstance(value, int) and one.key not in found:
            found[one.key] = draw.choice((value, value * 2, value // 2))
        elif choices and all(isinstance(choice, str) for choice in choices):
            found[one.key] = draw.choice(choices)
    return found


def drawn(number: int, seed: int) -> Trial:
    """Return configuration `number` of a seed; one of 16 is near a preset."""
    draw = random.Random(f"{seed} {number}")
    preset = draw.choice(sorted(PRESETS))
    if number % 16:
        return Trial(preset, changes(draw), draw.choice(WORLDS))
    given = likely(draw, preset)
    others = [given[f"mesh.{axis}"] for axis in ("pp", "dp_replicate", "cp", "tp")]
    return Trial(preset, given, math.prod(others) * draw.choice(DEGREES))


def unsound(config: Config, world: int) -> str:
    """Return what is wrong with the plan of a legal configuration on the GPUs of a world."""
    run = as_run(resolve(config, world), "cuda", narrow=True)
    mesh = run.mesh
    ranks = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
    rank, found = fullest(run, world, 80 * GIB, BRIEF)
    parts = found.components
    if ranks != world or not 0 <= rank < world:
        return f"{ranks} ranks in the mesh, rank {rank} is the fullest"
    if not math.isfinite(found.point) or found.point <= 0 or min(parts.values()) < 0:
        return f"a rank of {found.point} bytes: {parts}"
    return ""


def trial(number: int, seed: int) -> Trial:
    """Check a configuration, and plan it if it is legal."""
    one, wrong, planned, traces = drawn(number, seed), "", False, []
    trace_blocks = block_trace.trace_blocks

    def timed(requests: Any) -> Any:
        started = time.process_time()
        found = trace_blocks(requests)
        traces.append(time.process_time() - started)
        return found

    began = time.process_time()
    block_trace.trace_blocks = timed
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_TRACE_S)
    try:
        config = replace_keys(base(one.preset), one.changes)
        lines = [str(error) for error in broken(config, one.world)]
        bad = [s for s in lines if "\n" in s or ". Fix: " not in s or len(s) > 900]
        wrong, planned = f"message {bad[0]!r}" if bad else "", not lines
        if planned:
            wrong = unsound(config, one.world)
    except MegacppError:
        pass
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = "".join(traceback.format_exception(error)[-2:]).strip()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        block_trace.trace_blocks = trace_blocks
    took = time.process_time() - began - sum(traces)
    if not wrong and took > MOST_S:
        wrong = f"took {took:.1f} s"
    return replace(
        one, planned=planned, wrong=wrong, seconds=took, trace_s=sum(traces), number=number
    )


def late(*_: object) -> None:
    raise TimeoutError(f"over {MOST_TRACE_S:g} s")


def trials(numbers: Iterable[int], seed: int) -> Iterator[Trial]:
    """Yield the trials of some configurations, one after another."""
    before = signal.signal(signal.SIGVTALRM, late)
    try:
        yield from (trial(number, seed) for number in numbers)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _ready() -> None:
    """Import what the first plan of a process imports, so that no configuration is charged."""
    signal.signal(signal.SIGVTALRM, late)
    unsound(base("tiny"), 1)


def summary(tried: Sequence[Trial]) -> str:
    """Return the counts of some trials, in one line."""
    bad = sum(bool(one.wrong) for one in tried)
    plans = sum(one.planned and not one.wrong for one in tried)
    both = [one.seconds + one.trace_s for one in tried]
    late = sum(seconds > MOST_S for seconds in both)
    return (
        f"{len(tried):,} configurations: {plans:,} plans, {len(tried) - plans - bad:,} errors of "
        f"one line, {bad} others; slowest {max(one.seconds for one in tried):.1f} s of a CPU, with "
        f"traces of new blocks {max(both):.1f} s ({late} over {MOST_S:g} s)"
    )


def main() -> None:
    """Try configurations, print what went wrong, and end with a line of counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="rows of what was tried")
    given = parser.parse_args()
    given.out.touch()
    tried = [Trial(**json.loads(line)) for line in given.out.read_text().splitlines()]
    left = sorted({*range(given.count)} - {one.number for one in tried})
    # Not forked: torch's threads don't survive one.
    with (
        multiprocessing.get_context("spawn").Pool(given.workers, _ready) as pool,
        given.out.open("a", buffering=1) as out,
    ):
        for one in pool.imap_unordered(partial(trial, seed=given.seed), left, chunksize=16):
            tried.append(one)
            out.write(json.dumps(asdict(one)) + "\n")
            if one.wrong:
                print(f"{one.preset} {one.changes} on {one.world} ranks: {one.wrong}", flush=True)
    print(summary(tried))
    raise SystemExit(any(one.wrong for one in tried))


if __name__ == "__main__":
    main()
