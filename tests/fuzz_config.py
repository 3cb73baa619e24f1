"""Random configurations: each one is legal or ends in lines of its own, at once.

python -m tests.fuzz_config --count 20000 --seed 0
"""

from __future__ import annotations

import argparse
import random
import signal
import time
import traceback
import typing
from collections.abc import Iterator
from typing import Any

from megacpp.config.arguments import parse_run, replace_keys
from megacpp.config.checks.every import broken
from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.errors import MegacppError

MOST_S = 5.0  # of CPU time
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 48, 64, 127, 128, 1000, 4096, 65537, 10**6 + 3, 2**31)
WORLDS = (1, 1, 2, 3, 4, 8, 12, 64, 1000, 4096, 131072)


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


def trial(draw: random.Random) -> tuple[str, dict[str, Any], int, str]:
    """Return preset, changes, world and what went wrong; nothing did if that is empty."""
    preset, given, world = draw.choice(sorted(PRESETS)), changes(draw), draw.choice(WORLDS)
    began = time.process_time()
    wrong = ""
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * MOST_S)
    try:
        config = replace_keys(parse_run([preset], 1).config, given)
        for error in broken(config, world):
            line = str(error)
            if "\n" in line or ". Fix: " not in line or len(line) > 900:
                wrong = f"message {line!r}"
    except MegacppError:
        pass
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = "".join(traceback.format_exception(error)[-2:]).strip()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if not wrong and time.process_time() - began > MOST_S:
        wrong = f"took over {MOST_S:g} s"
    return preset, given, world, wrong


def failures(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any], int, str]]:
    """Yield what went wrong in `count` configurations."""

    def late(*_: object) -> None:
        raise TimeoutError(f"over {2 * MOST_S:g} s")

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        draw = random.Random(seed)
        for _ in range(count):
            found = trial(draw)
            if found[-1]:
                yield found
    finally:
        signal.signal(signal.SIGVTALRM, before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = 0
    for preset, settings, world, wrong in failures(given.count, given.seed):
        found += 1
        print(f"{preset} {settings} on {world} ranks: {wrong}", flush=True)
    print(f"{found} of {given.count} configurations")
    raise SystemExit(found > 0)
