"""Actions of a pipeline's schedule: of each rank, in order.

    StageAction(stage=1, kind="F", microbatch=0)

Kinds are `F` forward, `B` backward, `I` gradient of the input, `W` gradient of the weights.
`from_torch` reads those that a schedule of torch emits. No torch import here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

Actions = tuple[tuple["StageAction", ...], ...]  # of each rank, in order


class StageAction(NamedTuple):
    """Forward or backward of a microbatch in a stage."""

    stage: int
    kind: str
    microbatch: int


def from_torch(order: Mapping[int, Sequence[Any]], whole: Collection[int] = ()) -> Actions:
    """Return the actions of a torch schedule's `pipeline_order`, by rank.

    Args:
        order: actions of each rank.
        whole: stages that make both gradients where the schedule wants those of inputs.
    """
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found: list[tuple[StageAction, ...]] = []
    for rank in sorted(order):
        own: list[StageAction] = []
        for action in order[rank]:
            for one in _parts(action):
                kind = kinds.get(one.computation_type.name)
                if one.stage_index in whole:
                    kind = {"I": "B", "W": None}.get(kind or "", kind)
                if kind:
                    own.append(StageAction(one.stage_index, kind, one.microbatch_index))
        found.append(tuple(own))
    return tuple(found)


def answered(actions: Actions, stage: int) -> dict[int, list[int]]:
    """Return, by microbatch, the gradients that have arrived when a stage receives its input.

    They are those that the stage before has used before its forward of that microbatch, and after
    the forward before.

    Args:
        actions: of each rank.
        stage: that sends the gradients and receives the inputs.
    """
    found: dict[int, list[int]] = {}
    used: list[int] = []
    for action in (one for of_rank in actions for one in of_rank if one.stage == stage - 1):
        if action.kind == "F" and used:
            found[action.microbatch], used = used, []
        elif action.kind in "BI":
            used.append(action.microbatch)
    return found


def _parts(action: Any) -> Sequence[Any]:
    """Return an action's own actions: an overlapped forward and backward are two."""
    if action is None:
        return ()
    return getattr(action, "sub_actions", None) or (action,)
