"""Hangs: found by a thread of every rank, reported once with the rank that did not arrive.

    RUN/failures/hang-rank-0.txt    step, phase, collectives and Python stack of a rank

A rank makes progress when its phase changes or it begins a collective. The first rank without
progress for `run.timeout` seconds raises an alarm in the launcher's store. Every rank answers with
its state, within `ANSWER_S`; the first one that answered reports (blame.py), ends ranks of its node
that did not answer, and all leave with code 6. The threads have connections of their own, because
a main thread that waits in the store keeps its connection.

Gloo raises on the ranks that lost a peer. A kernel of NCCL waits for ever for a peer on its node,
and so does the host behind it: there a rank leaves by its watch, some seconds after another one has
said that the run ends.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megacpp.config.checks.every import hang_limits
from megacpp.outcome import PEER_LOST, note
from megacpp.run import flight
from megacpp.run.blame import blame
from megacpp.run.rank_store import RankStore
from megacpp.run.straggler import Straggler

# Phase, and the limit that applies to it, by class of goodput.py.
PHASES = {
    "startup": ("start", "start"),
    "compile": ("step", "start"),
    "step": ("step", "step"),
    "data": ("data", "step"),
    "checkpoint": ("save", "save"),
    "evaluation": ("evaluation", "evaluation"),
    "idle": ("end", "save"),
}
TICK_S, BEAT_S = 0.01, 1.0  # between two looks in a step, and between two signs of life
SLOW_TICK_S = BEAT_S / 4  # between two looks elsewhere
NEWS_S = 0.2  # a new step or phase is told at most so often
ANSWER_S = 4.0  # from the alarm until a rank without an answer is at fault
LEAVE_S = 10.0  # from another rank's error until a rank that hasn't noticed it leaves
WRITE_S = 1.0  # for the report: its disk, or the reader of its output, may be what hangs


def group_timeout(text: str) -> timedelta:
    """Return the timeout of process groups: longer than those of the watch, which names ranks."""
    longest = max(hang_limits(text).values())
    return timedelta(seconds=longest + 120) if longest else timedelta(days=365)


class HangWatch:
    """Watch over the progress of this rank, and over alarms of the others.

    Args:
        peers: store of all ranks.
        limits: seconds without progress by phase: start, step, save, evaluation; 0: never.
        folder: folder of the run.
        report: writes the end of the run for its launcher and its user.
    """

    def __init__(
        self,
        peers: RankStore,
        limits: Mapping[str, float],
        folder: Path,
        report: Callable[[str], None],
    ) -> None:
        self.peers, self.limits, self.folder, self.report = peers, limits, folder, report
        self.straggler = Straggler(folder)
        self._late_s = 0.0
        self._ended: float | None = None  # when this rank heard of another one's error
        self._sign: tuple[object, ...] = ()
        self._told_last: dict[str, Any] = {}
        self._stop = threading.Event()
        # The flight recorder reads it when the first process group is made.
        os.environ.setdefault(flight.BUFFER, flight.ENTRIES)
        if peers.size > 1:
            self._store = peers.store.clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang")
        self._thread.start()

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch: the run is over, or its error is being reported."""
        self._stop.set()
        self._thread.join(ANSWER_S)
        if self.peers.size > 1:
            with suppress(Exception):  # the process that served the store has ended
                self._store.set(f"hang/left/{self.peers.rank}", "{}")

    def _phase(self) -> tuple[str, str]:
        """Return the phase of this rank, and the one whose limit applies."""
        if (clock := self.peers.clock) is None:
            return PHASES["startup"]
        name, limit = PHASES[clock.phase]
        return name, "start" if clock.first and limit == "step" else limit

    def _state(self) -> dict[str, Any]:
        """Return step and phase of this rank."""
        clock = self.peers.clock
        return {"step": None if clock is None else clock.at, "phase": self._phase()[0]}

    def _whole_state(self) -> dict[str, Any]:
        """Return all that a report needs of this rank."""
        line, stack = flight.stack()
        waits, reached = flight.waits() + flight.stage_wait(stack), flight.reached()
        if self.peers.waits:  # for all ranks, before their process group exists
            everyone = list(range(self.peers.size))
            met = {"key": "store", "group": "all ranks", "members": everyone}
            waits.append({"op": self.peers.waits, "seq": self.peers.meetings, **met})
        reached["store"] = self.peers.meetings
        return self._state() | {"line": line, "stack": stack, "waits": waits, "reached": reached}

    def _watch(self) -> None:
        alone, beat, news, before = self.peers.size == 1, 0.0, 0.0, time.monotonic()
        while not self._stop.wait(TICK_S if self._in_steps and not alone else SLOW_TICK_S):
            now = time.monotonic()
            passed, before = now - before, now
            with suppress(Exception):  # a store or a group that has ended: so has the run
                self._count(min(passed, BEAT_S), alone)  # less if this process was stopped
                limit = self.limits[self._phase()[1]]
                if late := 0 < limit < self._late_s:
                    self._alarm(limit)
                if not alone and now - news > NEWS_S and self._state() != self._told_last:
                    news = now
                    self._beat()
                if not alone and (late or now - beat > BEAT_S):
                    beat = now
                    self._beat()
                    if self._store.check(["hang/alarm"]):
                        self._answer()
                    self._follow(now)

    def _count(self, passed: float, alone: bool) -> None:
        """Count the seconds since the last sign of progress."""
        clock, waiting = self.peers.clock, False
        if alone:
            begun = 0
        elif self._in_steps:
            begun, waiting = flight.under_way()
        else:
            # torch reads the recorder's tables of groups without a lock, and the first collective
            # of a group writes there: of a mesh there are a dozen in the first step of each rank.
            begun = sum(flight.reached().values())
        turns = (clock.turns, clock.at) if clock is not None else ()
        sign = (*turns, begun, self.peers.meetings)
        self._late_s = 0.0 if sign != self._sign else self._late_s + passed
        self._sign = sign
        if self._in_steps and clock is not None:
            self.straggler.sample(clock.at, passed, waiting)

    @property
    def _in_steps(self) -> bool:
        """Whether this rank is in a step after the first, of which samples are taken."""
        clock = self.peers.clock
        return clock is not None and clock.phase in ("step", "data") and not clock.first

    def _beat(self) -> None:
        """Tell the others the phase of this rank and its own time of a step."""
        self._told_last = self._state()
        state = self._told_last | self.straggler.figures()
        self._store.set(f"hang/beat/{self.peers.rank}", json.dumps(state))
        if self.peers.rank == 0 and self.straggler.due():
            self.straggler.compare(self._told("beat"))

    def _told(self, what: str) -> dict[int, dict[str, Any]]:
        """Return what ranks have told under a key, by rank."""
        keys = {rank: f"hang/{what}/{rank}" for rank in range(self.peers.size)}
        return {
            r: json.loads(self._store.get(k)) for r, k in keys.items() if self._store.check([k])
        }

    def _alarm(self, limit: float) -> None:
        """Call for the states of all ranks; a single one reports at once."""
        at, name = self._state()["step"], self._phase()[0]
        late = (
            f"no progress for {limit:g} s in {'' if at is None else f'step {at + 1}, '}phase {name}"
        )
        if self.peers.size > 1:
            return self._store.set("hang/alarm", late)
        state = self._whole_state()
        _within(lambda: self._write(state))
        self._end(late, blame({0: state}, [0], {}))
        os._exit(PEER_LOST)

    def _answer(self) -> None:
        """Answer an alarm, and leave; the first rank that answered waits for all and reports."""
        rank, table, mine = self.peers.rank, self.peers.table, self._whole_state()
        deadline, states, gone = time.monotonic() + ANSWER_S, {}, {}
        self._store.set(f"hang/state/{rank}", json.dumps(mine))
        _within(lambda: self._write(mine))
        while len(states.keys() | gone.keys()) < len(table) and time.monotonic() < deadline:
            time.sleep(TICK_S * 10)
            states, gone = self._told("state"), self._told("left")
        here = [other for other in range(len(table)) if other not in gone]
        first = next(other for other in states if table[other].node == table[rank].node)
        if rank == min(states) and self._store.add("said", 1) == 1:
            self._end(
                self._store.get("hang/alarm").decode(), blame(states, here, self._told("beat"))
            )
            self._store.set("hang/reported", "")
        else:
            note(PEER_LOST, "lost another rank")
            with suppress(Exception):
                self._store.wait(["hang/reported"], timedelta(seconds=ANSWER_S))
        for other in here if rank == first else ():
            if other not in states and table[other].node == table[rank].node:
                with suppress(OSError):
                    os.kill(table[other].pid, signal.SIGKILL)
        os._exit(PEER_LOST)

    def _follow(self, now: float) -> None:
        """Leave behind a rank that has claimed the report of the run's end, if that is a while ago.

        A rank that still writes a save goes on: another one may end its part earlier.

        Args:
            now: monotonic seconds.
        """
        saving = self.peers.writer is not None and self.peers.writer.busy
        if saving or not self._store.add("said", 0):
            self._ended = None
            return
        self._ended = now if self._ended is None else self._ended
        if now - self._ended > LEAVE_S:
            note(PEER_LOST, "lost another rank")
            os._exit(PEER_LOST)

    def _end(self, late: str, whose: str) -> None:
        """Report the hang."""
        stacks = self.folder / "failures" / "hang-rank-*.txt"
        line = f"run.timeout: {late}: {whose} (stacks: {stacks})"
        _within(lambda: self.report(line))

    def _write(self, state: Mapping[str, Any]) -> None:
        """Write the state of this rank into the run folder."""
        path = self.folder / "failures" / f"hang-rank-{self.peers.rank}.txt"
        path.parent.mkdir(exist_ok=True)
        lines = [f"step {state['step']} (from 0), phase {state['phase']}"]
        lines += [f"waits in {json.dumps(wait)}" for wait in state["waits"]]
        lines += [f"collectives begun: {json.dumps(state['reached'])}", "", state["stack"]]
        path.write_text("\n".join(lines))


def _within(what: Callable[[], None]) -> None:
    """Do something for at most `WRITE_S`, and go on without it, also if it fails."""

    def tried() -> None:
        with suppress(Exception):
            what()

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(WRITE_S)
