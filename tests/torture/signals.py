"""R16: a run is stopped by signals at random moments, again and again, and goes on each time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from megacpp.state.checkpoint import verify
from megacpp.state.files import read_parsed
from megacpp.state.published import latest_checkpoint
from tests.launch import ROOT
from tests.ranks import LONG_S, Stillness, children
from tests.torture.disks import rows_of, weights
from tests.torture.killing import alive
from tests.torture.yard import Yard

WAYS = ("SIGTERM to the launcher", "to one rank", "to all, three times", "Ctrl-C twice")
RANKS = ("--nproc=2",)
LATEST_S = 4.0  # of a signal behind the first step of a start


def signals(yard: Yard) -> str:
    """R16: stop a run at 50 random moments in half an hour, then compare it with one left alone.

    It saves every 3 steps and evaluates every 4. Steps that a stop loses or makes twice would
    change the final weights.
    """
    count, folder = max(4, int(50 * yard.minutes / 30)), yard.folder / "signals"
    more = ["--checkpoint.every", "3", "--run.eval-every", "4"]
    more += ["--optim.schedule", "constant", "--optim.warmup-steps", "1"]
    slowest: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        took_s, words = stop(yard, way, yard.flags("signals", *more, "--run.steps", "100000"))
        slowest[way] = max(slowest[way], took_s)
        wrong += [f"{way}, stop {number}: {words}"] if words else []
    until = ["--run.steps", str(rows_of(folder) + 2)]
    codes = [
        yard.call("-m", "megacpp", "train", *yard.flags(name, *more, *until), *RANKS).returncode
        for name in ("signals", "left-alone")
    ]
    same = codes == [0, 0] and weights(folder) == weights(yard.folder / "left-alone") != []
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return (
        f"{count - len(wrong)} of {count} stops as documented, {rows_of(folder):,} steps, weights "
        f"{'equal bit for bit' if same else 'DIFFER'}; seconds until all are gone, at most: "
        + ", ".join(f"{way} {took_s:.1f}" for way, took_s in slowest.items())
    )


def stop(yard: Yard, way: str, flags: list[str]) -> tuple[float, str]:
    """Start a run, stop it at a random moment; return the seconds it took and what is wrong."""
    folder = yard.folder / "signals"
    before = rows_of(folder)
    words = [sys.executable, "-m", "megacpp", "train", *flags, *RANKS]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, cwd=ROOT, env=yard.env, start_new_session=True, **quiet)
    deadline, still = time.monotonic() + LONG_S, Stillness()
    while rows_of(folder) <= before and process.poll() is None:
        if still.hangs([process.pid]) or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 0.0, "hangs before the first step of its start"
        time.sleep(0.05)
    time.sleep(yard.rng.uniform(0.0, LATEST_S))
    ranks = children(process.pid)
    if len(ranks) != 2:
        process.kill()
        return 0.0, f"{len(ranks)} ranks before the signal"
    ctrl_c = way.startswith("Ctrl-C")
    if ctrl_c:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    began = time.monotonic()
    if ctrl_c:
        os.killpg(process.pid, signal.SIGINT)
    elif way == "to one rank":
        os.kill(yard.rng.choice(ranks), signal.SIGTERM)
    else:
        for again in range(3 if "three" in way else 1):
            time.sleep(0.1 * again)
            os.killpg(process.pid, signal.SIGTERM) if "all" in way else process.terminate()
    while (alive(ranks) or process.poll() is None) and time.monotonic() < began + 60:
        time.sleep(0.02)
    took_s = time.monotonic() - began
    process.kill()
    process.wait()
    return took_s, problems(folder, 130 if ctrl_c else 75, took_s, 2.0 if ctrl_c else 25.0)


def problems(folder: Path, code: int, took_s: float, limit_s: float) -> str:
    """Return what is wrong with a stopped run; empty if nothing."""
    status, rows = read_parsed(folder / "status.json"), rows_of(folder)
    newest = latest_checkpoint(folder / "checkpoints")
    wrong = [f"{took_s:.1f} s"] if took_s > limit_s else []
    if status.get("code") != code:
        wrong.append(f"status.json has code {status.get('code')}")
    if newest is None:
        return "; ".join([*wrong, "no checkpoint"])
    if code == 75 and newest.name != f"step-{rows:06}":
        wrong.append(f"{newest.name} after {rows} steps")
    return "; ".join([*wrong, *verify(newest)])
