"""Plant faults one at a time and print which the tests find: `make mutants`.

python -m tests.mutants [--only PATTERN] [--seed 7] [--time 240] [--again]

A run that is stopped goes on where it was: verdicts are kept in the folder `--out`. A verdict
belongs to one change of one text of a file; `--again` asks again where no test found it.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.utils.tensorboard  # noqa: F401 - so that no forked process has to import these

from tests.mutants.choose import FileChoice
from tests.mutants.faults import Fault, listed
from tests.mutants.generate import generated
from tests.mutants.judge import PlantedTree, Verdict

ROOT = Path(__file__).parents[2]
FOUND_BY = Path(__file__).with_name("found_by.json")
NEAR = 2  # lines between a fault and those of the list whose finders are asked first
LEAST = 0.95  # of all faults: a test must find them
ACCEPTED_S = 30.0  # CPU seconds for a fault that has a reason why no test finds it


class Court:
    """Judge faults one after the other, and remember the verdicts.

    Args:
        root: the checkout.
        out: folder of verdicts, costs of tests and the planted copy.
        time_s: seconds of tests for each fault.
    """

    def __init__(self, root: Path, out: Path, time_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.root, self.out, self.time_s = root, out, time_s
        self.tree = PlantedTree(root, out / "work")
        self.memory = out / "verdicts.json"
        kept = json.loads(self.memory.read_text()) if self.memory.exists() else {}
        self.verdicts: dict[str, dict[str, Any]] = kept.get("verdicts", {})
        self.costs: dict[str, float] = kept.get("costs", {})
        self.sound: dict[str, bool] = {}  # of these sources: not kept
        self.choice = FileChoice(root, self.costs)
        self.listed = listed(root)

    def text(self, fault: Fault) -> str:
        """Return the sound text of a fault's file."""
        return (self.root / fault.file).read_text()

    def finders(self, fault: Fault) -> list[str]:
        """Return the tests that found this fault before, or those of the list beside it."""
        text = self.text(fault)
        line = fault.line(text)
        near = [f for f in self.listed if f.file == fault.file and abs(f.line(text) - line) <= NEAR]
        names = [named(fault)] if fault in self.listed else map(named, near)
        return list(dict.fromkeys(found_before()[n] for n in names if n in found_before()))

    def known(self, fault: Fault) -> dict[str, Any] | None:
        """Return the verdict of an earlier run on the same change of the same file."""
        return self.verdicts.get(fault.key(self.text(fault)))

    def judge(self, fault: Fault) -> dict[str, Any]:
        """Return the verdict on a fault, and keep it."""
        unsound = {test.split("::")[0] for test, passes in self.sound.items() if not passes}
        line = fault.line(self.text(fault))
        files = [f for f in self.choice.files(fault.file, line) if f not in unsound]
        began, verdict, spent_s = time.monotonic(), None, 0.0
        time_s = min(self.time_s, ACCEPTED_S) if fault.accepted else self.time_s
        once = self.finders(fault)
        for tests in (once, files[:1], files[1:]):  # the others aren't even imported for most
            if tests and spent_s < time_s:
                try:
                    verdict = self._judge(fault, tests, time_s - spent_s)
                except RuntimeError:
                    if tests is not once:  # the test that found it before has another name now
                        raise
                    continue
                spent_s += verdict.cpu_s
                if verdict.outcome != "survived":
                    break
        assert verdict is not None, f"no test imports {fault.file}"
        text = self.text(fault)
        kept = {
            "outcome": verdict.outcome,
            "where": f"{fault.file}:{fault.line(text)}",
            "name": fault.name,
            "by": verdict.by,
            "seconds": round(time.monotonic() - began, 1),
            "accepted": fault.accepted,
            "tests": files,
        }
        self.verdicts[fault.key(text)] = kept
        self._keep()
        return kept

    def _judge(self, fault: Fault, tests: list[str], time_s: float) -> Verdict:
        """Run tests; one that fails without the fault, too, proves nothing and is left out."""
        while True:
            verdict = self.tree.judge(tests, time_s, fault)
            self.costs.update(verdict.costs)
            if verdict.outcome != "killed" or self._passes(verdict):
                return verdict
            tests = [file for file in tests if file != verdict.by.split("::")[0]]
            if not tests:
                return replace(verdict, outcome="survived", by="")

    def _keep(self) -> None:
        kept = {"verdicts": self.verdicts, "costs": self.costs}
        self.memory.write_text(json.dumps(kept, indent=1))

    def _passes(self, verdict: Verdict) -> bool:
        """Whether the test that failed passes without the fault: else it proves nothing."""
        if "::" not in verdict.by:  # its file couldn't be imported, or the process died
            return True
        if verdict.by not in self.sound:
            alone = self.tree.judge([verdict.by], self.time_s)
            self.sound[verdict.by] = alone.outcome == "survived"
            if not self.sound[verdict.by]:
                print(f"      {verdict.by} fails without a fault: left out", flush=True)
        return self.sound[verdict.by]


def named(fault: Fault) -> str:
    """Return the name of a listed fault in `FOUND_BY`."""
    return f"{fault.file}: {fault.name}"


@functools.cache
def found_before() -> dict[str, str]:
    """Return the test that found a listed fault in the last complete run, by the fault's name."""
    return json.loads(FOUND_BY.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """Return verdicts as a table: what wasn't found first, and the shares."""
    lines = ["| verdict | fault | where | found by, or why not | s |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r["outcome"] == "killed", r["where"])):
        why = row["by"] or row["accepted"] or "no reason is known"
        name = row["name"].replace("|", "\\|")
        lines.append(f"| {row['outcome']} | {name} | {row['where']} | {why} | {row['seconds']} |")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the numbers of faults by verdict in one line."""
    count = Counter(row["outcome"] for row in rows)
    accepted = sum(row["outcome"] == "survived" and bool(row["accepted"]) for row in rows)
    share = count["killed"] / max(1, len(rows))
    return (
        f"{len(rows)} faults: {count['killed']} killed ({share:.1%}), {count['survived']} survived "
        f"({accepted} with a reason), {count['timed out']} timed out"
    )


def main() -> int:
    """Judge the chosen faults and write the table; 1 if a rule of `shortfalls` is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    say = parser.add_argument
    say("--only", nargs="+", default=["*"], metavar="PATTERN", help="faults: FILE:LINE NAME fits")
    say("--seed", type=int, default=None, help="of the generated faults (a new one each day)")
    say("--generated", type=int, default=None, metavar="N", help="faults by seed (half the list)")
    say("--time", type=float, default=240.0, metavar="S", help="CPU seconds for a fault (240)")
    say("--again", action="store_true", help="judge those again that weren't killed")
    say("--fresh", action="store_true", help="forget earlier verdicts")
    say("--record", action="store_true", help=f"write {FOUND_BY.name}: what to run first")
    say("--list", action="store_true", help="print the faults and the tests chosen; run nothing")
    say("--out", type=Path, default=ROOT / "build/mutants", help="folder of verdicts and table")
    given = parser.parse_args()
    faults = listed(ROOT)
    seed = int(time.time() // 86400) if given.seed is None else given.seed
    number = (len(faults) + 1) // 2 if given.generated is None else given.generated
    faults += generated(ROOT, number, seed, faults)
    if given.fresh:
        (given.out / "verdicts.json").unlink(missing_ok=True)
    court = Court(ROOT, given.out, given.time)
    words = [f"{f.file}:{f.line(court.text(f))} {f.name}" for f in faults]
    chosen = [(p, w, f) for p in given.only for w, f in zip(words, faults, strict=True)]
    pairs = list({w: (w, f) for p, w, f in chosen if fits(w, p)}.values())
    print(
        f"{len(pairs)} faults, {number} of all by seed {seed}; verdicts in {given.out}", flush=True
    )
    if given.list:
        for word, fault in pairs:
            line = fault.line(court.text(fault))
            print(word, *court.choice.files(fault.file, line), sep="\n    ")
        return 0
    rows = judged(court, pairs, given.again)
    (given.out / "table.md").write_text(table(rows) + "\n")
    if given.record:
        new = {named(f): r["by"] for f in faults[: len(faults) - number] if (r := court.known(f))}
        new = {name: by for name, by in (found_before() | new).items() if "::" in by}
        FOUND_BY.write_text(json.dumps(dict(sorted(new.items())), indent=1) + "\n")
    print(*(line for line in table(rows).splitlines() if not line.startswith("| killed")), sep="\n")
    found = shortfalls(rows, whole=given.only == ["*"])
    print(*found, sep="\n")
    return int(bool(found))


def shortfalls(rows: list[dict[str, Any]], whole: bool) -> list[str]:
    """Return a line for each rule that verdicts break.

    Args:
        rows: verdicts.
        whole: they are of every fault, so a share of them counts.
    """
    killed = [row["outcome"] == "killed" for row in rows]
    found = [
        f"no test finds {row['name']} ({row['where']}), and no reason is known"
        for row, dead in zip(rows, killed, strict=True)
        if not dead and not row["accepted"]
    ]
    found += [
        f"{row['by']} finds {row['name']} ({row['where']}): its reason isn't true any more"
        for row, dead in zip(rows, killed, strict=True)
        if dead and row["accepted"]
    ]
    if whole and sum(killed) < LEAST * len(rows):
        found.append(f"{sum(killed)} of {len(rows)} faults were found, less than {LEAST:.0%}")
    return found


def fits(word: str, pattern: str) -> bool:
    """Whether a pattern of the shell fits a part of the text."""
    return fnmatch.fnmatch(word, f"*{pattern}*")


def judged(court: Court, pairs: list[tuple[str, Fault]], again: bool) -> list[dict[str, Any]]:
    """Return the verdicts on faults, with a line for each that is judged now."""
    rows = {word: court.known(fault) for word, fault in pairs}
    left = [p for p in pairs if not (k := rows[p[0]]) or (again and k["outcome"] != "killed")]
    began = time.monotonic()
    for done, (word, fault) in enumerate(left, 1):
        rows[word] = verdict = court.judge(fault)
        spent = time.monotonic() - began
        eta_min = spent / done * (len(left) - done) / 60
        by = verdict["by"] or fault.accepted
        print(
            f"[{done:3}/{len(left)}] {verdict['outcome']:9} {verdict['seconds']:5.1f} s  {word}"
            f"{f'  by {by}' if by else ''}  eta {eta_min:.0f} min",
            flush=True,
        )
    return [row for row in rows.values() if row]


if __name__ == "__main__":
    raise SystemExit(main())
