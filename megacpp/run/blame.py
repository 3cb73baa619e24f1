"""Ranks at fault for a hang, from what every rank was waiting for; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

State = Mapping[str, Any]  # of one rank, as `HangWatch` tells it


def blame(states: Mapping[int, State], ranks: Sequence[int], seen: Mapping[int, State]) -> str:
    """Return one sentence: which rank did not arrive, where it is, and who waits for it.

    A rank that gives no answer is at fault: it is stopped, or stuck outside Python. Otherwise the
    waits are followed from rank to rank to those that wait for nobody.

    Args:
        states: state of each rank that answered.
        ranks: ranks that have not left.
        seen: last sign of life of each rank.
    """
    silent = [rank for rank in ranks if rank not in states]
    if silent:
        more = "; ".join(_waiting(rank, state) for rank, state in states.items() if state["waits"])
        last = _place(seen.get(silent[0], {}))[1:]
        why = "stopped, or stuck outside Python" + (last and f", last seen{last}")
        return f"{_ranks(silent)} gave no answer ({why}){more and '; ' + more}"
    edges = {rank: _waited_for(rank, states) for rank in states}
    for rank, state in states.items():
        for wait in state["waits"]:
            if other := _mismatch(rank, wait, states):
                return f"ranks {rank} and {other[0]} differ in a collective: " + "; ".join(
                    _waiting(one, states[one], [what]) for one, what in ((rank, wait), other)
                )
    free = [rank for rank in states if not edges[rank]]
    stuck = [rank for rank in free if not states[rank]["waits"]]
    blamed = stuck if any(edges.values()) else free
    waiting = [rank for rank in states if edges[rank] & set(blamed)] if blamed else list(states)
    some = waiting if len(waiting) <= 2 else waiting[:2]
    more = "; ".join(_waiting(rank, states[rank]) for rank in some)
    more += f" (and {len(waiting) - 2} further ranks)" if len(waiting) > 2 else ""
    if not blamed:
        return f"{_ranks(sorted(states))} wait for each other: {more}"
    if not waiting:
        said = "; ".join(f"rank {rank} is{_place(states[rank])[1:]}" for rank in blamed[:2])
        return f"{_ranks(blamed)} made no progress: {said}"
    return f"{_ranks(blamed)} did not arrive{_place(states[blamed[0]])}; {more}"


def _waited_for(rank: int, states: Mapping[int, State]) -> set[int]:
    """Return the ranks that have not begun a collective in which this one waits."""
    found: set[int] = set()
    for wait in states[rank]["waits"]:
        others = [other for other in wait["members"] if other != rank and other in states]
        if wait["seq"] < 0:  # for another pipeline stage: for one that doesn't wait likewise
            found |= {o for o in others if not any(w["seq"] < 0 for w in states[o]["waits"])}
        else:
            found |= {o for o in others if states[o]["reached"].get(wait["key"], 0) < wait["seq"]}
    return found


def _mismatch(
    rank: int, wait: Mapping[str, Any], states: Mapping[int, State]
) -> tuple[int, Mapping[str, Any]] | None:
    """Return a rank whose collective of the same number in the same group is another one."""
    for other in wait["members"]:
        for its in states[other]["waits"] if other != rank and other in states else ():
            same = its["key"] == wait["key"] and its["seq"] == wait["seq"] >= 0
            if same and its["op"] != wait["op"]:
                return other, its
    return None


def _waiting(rank: int, state: State, waits: Sequence[Mapping[str, Any]] = ()) -> str:
    first = (waits or state["waits"])[0]
    number = f" {first['seq']}" if first["seq"] >= 0 else ""
    return f"rank {rank} waits in {first['op']}{number} of {first['group']}{_place(state)}"


def _place(state: State) -> str:
    """Return a phrase: step, phase and line of a rank."""
    if not state:
        return ""
    step = f"step {state['step'] + 1}, " if state.get("step") is not None else ""
    line = f", {state['line']}" if state.get("line") else ""
    return f", in {step}phase {state['phase']}{line}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
