"""Attack runs and print the table R1-R25: `make torture`.

python -m tests.torture [--only R17 R18] [--minutes 30] [--write docs/torture.md]

Rows with a measurement of their own attack processes under torchrun; the others run the tests that
hold the bar, and print what these recorded (tests/figures.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path

from megacpp.launch.record import git_commit
from megacpp.run.goodput import account, read_starts
from megacpp.state.checkpoint import verify
from megacpp.state.files import read_parsed
from tests.figures import figures
from tests.launch import ROOT
from tests.ranks import children
from tests.torture.disks import FAULTS, STEPS, attack, disk, problems, rows_of, weights
from tests.torture.killing import alive, cost_of_kills, kills_between, nodes
from tests.torture.signals import signals
from tests.torture.yard import Yard

ATTACK = str(ROOT / "tests/torture/attack.py")
LIMIT_S = 6
HANGS = [  # fault, rank, phase that the report must name
    ("stop", 1, "step"),
    ("loop", 1, "step"),
    ("deadlock", 0, "step"),
    ("sleep", 0, "step"),
    ("other-collective", 1, "step"),
    ("data", 1, "data"),
    ("save", 1, "save"),
    ("evaluation", 0, "evaluation"),
    ("start", 1, "start"),
]
TESTS = {
    "R1": ("kills during a save", "state/test_crash.py"),
    "R3": ("flipped bits of files", "state/test_damage.py state/test_sound.py"),
    "R4": ("truncated and swapped files", "state/test_damage.py state/test_hostile.py"),
    "R5": ("resume, same mesh and another", "state/test_resume.py"),
    "R6": ("load on another mesh", "state/test_meshes.py"),
    "R7": ("meshes equal one rank", "parallel/test_everything.py"),
    "R8": ("the same run twice", "test_run.py"),
    "R9": (
        "documents stay apart",
        "model/test_attention.py "
        "model/test_hybrid.py::test_a_token_changes_nothing_in_other_documents",
    ),
    "R10": ("NaN on one rank", "run/test_bad_steps.py parallel/test_guard.py"),
    "R11": ("spikes and rewinds", "run/test_rewind.py"),
    "R12": ("no label counts", "parallel/test_boundary.py"),
    "R14": (
        "damaged corpora",
        "data/test_batches.py data/test_sources.py run/test_damaged_corpus.py",
    ),
    "R19": ("ranks with less data", "data/test_loader.py run/test_evaluate.py"),
    "R20": ("every row once", "data/test_batches.py data/test_loader.py"),
    "R21": ("hostile files", "state/test_hostile.py state/test_bombs.py interop/test_headers.py"),
    "R22": ("retention", "state/test_sound.py state/test_crash.py"),
    "R23": ("export and back", "interop/test_export.py"),
}


def hangs(yard: Yard) -> str:
    """R18: each fault is reported within its timeout + 10 s with the right rank and phase."""
    late, wrong = 0.0, []
    for fault, rank, phase in HANGS:
        start = 40 if fault == "start" else 120
        limits = f"start={start},step={LIMIT_S},save={LIMIT_S},evaluation={LIMIT_S}"
        flags = yard.flags(f"hang-{fault}", "--run.timeout", limits)
        path = yard.folder / f"hang-{fault}"
        process = subprocess.Popen(
            yard.under(2, ATTACK, fault, str(rank), "3", *flags),
            cwd=ROOT,
            env=yard.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, err = process.communicate()
        ended = time.time()
        told, metrics = read_parsed(path / "status.json"), path / "metrics.jsonl"
        lines = [line for line in err.decode().splitlines() if line.startswith("error: ")]
        said = told.get("message") or "".join(lines)  # in the start there is no folder yet
        named = f"rank {rank} " in said.split("; rank")[0] or f"and {rank} differ" in said
        six = told.get("code", 6) == 6 and b"exitcode  : 6" in err
        if not six or not named or f"phase {phase}" not in said:
            wrong.append(f"{fault}: {said or err[-500:].decode()}")
        if metrics.exists():
            late = max(late, ended - metrics.stat().st_mtime)  # the last step that was made
    if words := slow_disk(yard):
        wrong.append(words)
    if lagging := straggler(yard):
        wrong.append(lagging)
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
    every = len(HANGS) + 2
    return (
        f"{every - len(wrong)} of {every} named (with a slow disk and a straggler runs went on), "
        f"the slowest run gone {late:.0f} s after its last step (timeout {LIMIT_S} s)"
    )


def slow_disk(yard: Yard) -> str:
    """Run on a disk that is slow under one rank; return what is wrong with what was said."""
    flags = yard.flags("slow-disk", "--run.steps", "4", "--checkpoint.every", "2")
    done = subprocess.run(
        yard.under(2, ATTACK, "slow-disk", "1", "0", *flags, "--checkpoint.async", "false"),
        cwd=ROOT,
        env=yard.env,
        capture_output=True,
        text=True,
    )
    line = "step 2: warning: the disk of rank 1 is slow: its part of the checkpoint took "
    return "" if done.returncode == 0 and line in done.stdout else f"{done.stdout} {done.stderr}"


def straggler(yard: Yard) -> str:
    """Run with a rank that is slow in each step; return what is wrong with what was said."""
    flags = yard.flags("slow", "--run.steps", "40")
    done = subprocess.run(
        yard.under(2, ATTACK, "slow", "1", "0", *flags),
        cwd=ROOT,
        env=yard.env,
        capture_output=True,
        text=True,
    )
    named = "warning: rank 1 is a straggler: " in done.stdout and "rank 0 is a" not in done.stdout
    return "" if done.returncode == 0 and named else f"{done.stdout} {done.stderr}"


def kills(yard: Yard) -> str:
    """R17: kill ranks and agents at random; the weights are those of a run that nobody kills.

    Both are runs of `tiny` at the same time, as long as the whole attack may take.
    """
    more = ["--model.vocab-size", "400", "--train.device-batch-size", "2", "--run.eval-rows", "8"]
    more += ["--checkpoint.every", "5", "--checkpoint.async", "true", "--checkpoint.keep", "2"]

    def both(steps: int, pause: tuple[float, float]) -> tuple[str, bool]:
        names = ("straight", "killed")
        every = [yard.flags(f"{name}-{steps}", *more, small=()) for name in names]
        every = [[*flags, "--run.steps", str(steps)] for flags in every]
        straight = yard.start(2, "train.py", *every[0])
        with nodes(every[1], yard.env) as killed:
            said = kills_between(killed, yard.folder / f"killed-{steps}", yard.rng, pause)
        straight.wait()
        one, two = (weights(yard.folder / f"{name}-{steps}") for name in names)
        return said, bool(one) and one == two

    both(12, (math.inf, math.inf))
    rows = [json.loads(row) for row in (yard.folder / "straight-12/metrics.jsonl").open()]
    step_s = sorted(row["step_s"] for row in rows[6:])[3]
    steps = max(20, int(60 * yard.minutes / step_s))
    shm = set(os.listdir("/dev/shm"))
    said, same = both(steps, (2 * max(10, 2 * yard.minutes), 6 * max(10, 2 * yard.minutes)))
    spent = account(read_starts(yard.folder / f"killed-{steps}/goodput.jsonl"))
    weights_are = "equal bit for bit" if same else "DIFFER"
    return (
        f"{steps:,} steps of tiny, {spent.wall_s / 60:.0f} minutes: {said}, in /dev/shm "
        f"{len(set(os.listdir('/dev/shm')) - shm)}; weights {weights_are}, "
        f"{spent.goodput:.0%} of the time in steps; {cost_of_kills(spent)}"
    )


def soak(yard: Yard) -> str:
    """R25: memory, file handles and shared memory of a long run with faults stay flat.

    A rank is killed after a quarter of the steps, and the launcher gets SIGTERM after half of them.
    The memory of the start that makes the second half is measured.
    """
    before = set(os.listdir("/dev/shm"))
    steps = int(80 * yard.minutes)
    flags = yard.flags("soak", "--run.steps", str(steps), "--run.eval-every", "50")
    flags += ["--checkpoint.every", "50", "--checkpoint.keep", "2"]
    seen: dict[int, list[tuple[int, int, int]]] = {}
    left = [(steps // 4, signal.SIGKILL), (steps // 2, signal.SIGTERM)]
    codes = []
    for _ in range(2):
        process = yard.start(2, "train.py", *flags, restarts=99)
        while process.poll() is None:
            time.sleep(1.0)
            step, ranks = rows_of(yard.folder / "soak"), children(process.pid)
            for pid in ranks:
                with suppress(OSError, TypeError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    rss = int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]
                    found = (step, rss, len(os.listdir(f"/proc/{pid}/fd")))
                    seen.setdefault(pid, []).append(found)
            if left and step >= left[0][0] and ranks:
                one = left.pop(0)[1]
                os.kill(ranks[0] if one == signal.SIGKILL else process.pid, one)
        codes.append(process.returncode)
    last = list(seen.values())[-2:]
    halves = [rows[len(rows) // 2 :] for rows in last]  # pools have grown by then
    memory = max(slope([(s, r) for s, r, _ in half]) for half in halves)
    handles = max(slope([(s, f) for s, _, f in half]) for half in halves)
    names = sorted(set(os.listdir("/dev/shm")) - before)
    return (
        f"{steps:,} steps, a rank killed at {steps // 4:,}, SIGTERM at {steps // 2:,}: "
        f"codes {codes}, memory {memory:+.2f} KiB a step, file handles {handles:+.4f} a step, "
        f"ranks left: {len(alive([*seen]))}, in /dev/shm: {len(names)}"
    )


def shutdowns(yard: Yard) -> str:
    """R24: runs of four ranks leave with 0 and no word of the runtime."""
    count, bad = max(2, int(yard.minutes / 3)), 0
    for number in range(count):
        shutil.rmtree(yard.folder / "ends", ignore_errors=True)
        flags = yard.flags("ends", "--run.steps", "2", "--run.seed", str(number))
        done = subprocess.run(
            yard.under(4, "train.py", *flags),
            cwd=ROOT,
            env=yard.env,
            capture_output=True,
            text=True,
        )
        bad += done.returncode != 0 or "terminate called" in done.stderr
    return f"{count - bad} of {count} runs of 4 ranks ended with 0"


def configurations(yard: Yard) -> str:
    """R13: random configurations have a sound plan or end in one line; 20,000 in half an hour."""
    count = str(int(20_000 * yard.minutes / 30))
    rows = Path(tempfile.gettempdir()) / f"megacpp-torture-configurations-{commit()}.jsonl"
    words = ["--count", count, "--seed", "7", "--workers", "2", "--out", str(rows)]
    done = yard.call("-m", "tests.fuzz_config", *words)
    *wrong, last = done.stdout.splitlines() or [done.stderr[-200:]]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return last


def launchers(yard: Yard) -> str:
    """R2: of two launchers that start at once on one folder, one trains and one is refused."""
    count, good = max(1, int(yard.minutes / 6)), 0
    for number in range(count):
        folder = yard.folder / f"both-{number}"
        flags = yard.flags(folder.name, "--run.steps", "60", "--checkpoint.every", "20")
        both = [
            subprocess.Popen(
                yard.under(2, "train.py", *flags),
                cwd=ROOT,
                env=yard.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        said = [process.communicate()[1] for process in both]
        refused = [f"run.dir={folder}: is in use by process" in err for err in said]
        ended = [process.returncode for process in both]
        steps = [json.loads(row)["step"] for row in (folder / "metrics.jsonl").open()]
        one = sorted(refused) == [False, True] and ended[refused.index(False)] == 0
        saved = sorted((folder / "checkpoints").glob("step-*"))
        good += one and steps == list(range(60)) and bool(saved) and not any(map(verify, saved))
        if not one:
            print(ended, *(err[-500:] for err in said), sep="\n", file=sys.stderr)
    return (
        f"{good} of {count} times one trained alone, all of its checkpoints verify, and the other "
        "ended with one line"
    )


def disks(yard: Yard) -> str:
    """R15: runs whose disk fails end with 4 and one line, and go on once it is mended."""
    steps = ["--run.steps", str(STEPS), "--checkpoint.every", "2", "--nproc", "2"]

    def words(folder: str) -> list[str]:
        return [*yard.flags(folder, *steps), "--run.eval-rows", "4"]

    yard.call("-m", "megacpp", "train", *words("disk-straight"))
    wrong, skipped = [], []
    for fault in FAULTS:
        with disk(yard.folder / f"disk-{fault}", fault) as place:
            if place is None:
                skipped.append(fault)
                continue
            folder = place / "run"
            ended = attack(words(f"disk-{fault}/run"), folder, fault, yard.env)
            straight = yard.folder / "disk-straight"
            wrong += [f"{fault}: {one}" for one in problems(*ended, folder, straight)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    bad = {one.split(":")[0] for one in wrong}
    tried = [fault for fault in FAULTS if fault not in skipped]
    more = f", not possible here: {', '.join(skipped)}" if skipped else ""
    good = f"{len(tried) - len(bad)} of {len(tried)} ended with 4 and went on"
    return f"{good} ({', '.join(tried)}){more}"


def flips(yard: Yard) -> str:
    """SDC: bits flipped in one rank's state, gradients and activations are found, and named."""
    return yard.call("-m", "tests.torture.flips", str(int(100 * yard.minutes / 30))).stdout.strip()


def tests(yard: Yard, files: str) -> str:
    """Run tests; return the figures that they recorded, and how many passed."""
    paths, report = [f"tests/{name}" for name in files.split()], yard.folder / "report.xml"
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Twenty times what one test makes in the suite.
    yard.env |= {"MEGACPP_KILLS": "800", "MEGACPP_MUTATIONS": "60000"}
    done = yard.call("-m", "pytest", *words, *paths)
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
    return ("" if done.returncode == 0 else "FAILED: ") + figures(report)


def slope(points: list[tuple[int, int]]) -> float:
    """Return the least-squares slope of some points; 0 without enough of them."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    over = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / over


OWN: dict[str, tuple[str, Callable[[Yard], str]]] = {
    "R2": ("two launchers, one folder", launchers),
    "R13": ("random configurations", configurations),
    "R15": ("disks that fail", disks),
    "R16": ("signals", signals),
    "R17": ("kill -9 of ranks", kills),
    "R18": ("hangs", hangs),
    "R24": ("clean ends", shutdowns),
    "R25": ("soak", soak),
    "SDC": ("flipped bits in memory", flips),
}
ROWS = [*(f"R{n}" for n in range(1, 26)), "SDC"]


def main() -> None:
    """Run the attacks and print a row for each bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="R")
    parser.add_argument("--minutes", type=float, default=30.0, help="scales the long attacks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="page whose rows are replaced by new ones")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megacpp-torture-") as name:
        yard = Yard(Path(name), given.seed, given.minutes)
        print("| bar | attack | figure | seconds | run |\n|---|---|---|---|---|", flush=True)
        for row in [row for row in ROWS if not given.only or row in given.only]:
            began = time.perf_counter()
            if row in OWN:
                attack, figure = OWN[row][0], OWN[row][1](yard)
            else:
                attack, figure = TESTS[row][0], tests(yard, TESTS[row][1])
            took = time.perf_counter() - began
            line = f"| {row} | {attack} | {figure} | {took:.0f} | {stamp(given.minutes)} |"
            print(line, flush=True)
            if given.write:
                write(given.write, row, line)


def commit() -> str:
    """Return the first digits of the checkout's commit; with a `+` if files differ from it."""
    name = git_commit() or "unknown"
    return name[:9] + "+" * name.endswith("-dirty")


def stamp(minutes: float) -> str:
    """Return date, commit and scale of a row."""
    return f"{date.today()} {commit()}, --minutes {minutes:g}"


def write(page: Path, row: str, line: str) -> None:
    """Replace or add a row of the table on a page; rows stay in their order."""
    before = [text for text in page.read_text().splitlines() if text.split(" ")[1:2] != [row]]
    order = ["bar", *ROWS]
    at = max(
        number
        for number, text in enumerate(before)
        if text.startswith("|---")
        or (text.startswith("| ") and order.index(text.split(" ")[1]) < order.index(row))
    )
    page.write_text("\n".join([*before[: at + 1], line, *before[at + 1 :]]) + "\n")


if __name__ == "__main__":
    main()
