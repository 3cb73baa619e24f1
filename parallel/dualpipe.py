"""DualPipe: microbatches go through the ranks from both ends at once (arXiv 2412.19437).

    rank       0      1      2      3
    there   ─► 0 ───► 1 ───► 2 ───► 3        stages that the first half of the microbatches meets
    back       3 ◄─── 2 ◄─── 1 ◄─── 0 ◄─     and the second half

Ranks r and P - 1 - r hold the same two stages and do the same at the same time. Folded in the
middle it is DualPipeV on P / 2 ranks with half of the microbatches, so torch's order of that
schedule is this one's. The stages of the way back are numbered 2 P and on: no stage of a rank is
the next one of another on the same rank, which torch would hand its output without sending it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType

Order = dict[int, list[_Action]]
Kind = _ComputationType
ROOM = 3  # numbers of stages for each rank, of which the second is nobody's


def number_of(stage: int, ranks: int, back: bool) -> int:
    """Return the number of a stage of the model on its way there or back."""
    return stage + 2 * ranks * back


class ScheduleDualPipe(schedules._PipelineScheduleRuntime):
    """DualPipe as a schedule of torch, over stages whose class says which are first and last.

    Args:
        stages: of this rank: the one of the way there, then that of the way back.
        n_microbatches: of both ways together.
        given: see torch's schedules.

    Raises:
        ValueError: an odd number of ranks or microbatches, or too few of these.
    """

    def __init__(self, stages: Sequence[Any], n_microbatches: int, **given: Any) -> None:
        ranks = stages[0].group_size
        if ranks % 2 or n_microbatches % 2 or n_microbatches < 2 * ranks:
            raise ValueError(f"DualPipe: {n_microbatches} microbatches on {ranks} ranks")
        super().__init__(stages, n_microbatches // 2, **given)
        there = [*range(ranks)]
        between = [ranks - 1] * ranks  # numbers of no stage, which torch 2.15 wants to have a rank
        self.stage_index_to_group_rank = dict(enumerate([*there, *between, *reversed(there)]))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        order = {rank: _actions(rank, ranks, n_microbatches // 2) for rank in range(ranks)}
        self.pipeline_order = order  # type: ignore[assignment]
        with_reductions = {
            rank: schedules._add_reduce_grad(
                schedules._add_unshard_reshard(actions),  # type: ignore[arg-type]
                n_microbatches // 2,
            )
            for rank, actions in order.items()
        }
        lowered = _with_sends(with_reductions, self.stage_index_to_group_rank, ranks)  # type: ignore[arg-type]
        waits = getattr(schedules, "_add_wait_send", None)  # of torch 2.15, where sends need them
        self.pipeline_order_with_comms = waits(lowered) if waits else lowered


def _actions(rank: int, ranks: int, microbatches: int) -> list[_Action]:
    """Return a rank's actions: those of a rank of DualPipeV, one of whose stages is the way back.

    Args:
        rank: of `ranks`.
        ranks: of the pipeline.
        microbatches: of each way.
    """
    half = min(rank, ranks - 1 - rank)
    folded = SimpleNamespace(pp_group_size=ranks // 2, _n_microbatches=microbatches)
    found = schedules.ScheduleDualPipeV._calculate_single_rank_operations(folded, half)  # type: ignore[arg-type]

    def renumbered(action: _Action) -> _Action:
        if action.sub_actions is not None:
            return action._replace(sub_actions=tuple(map(renumbered, action.sub_actions)))
        back = (action.stage_index == half) != (rank < ranks // 2)
        return action._replace(stage_index=number_of(action.stage_index, ranks, back))

    return [renumbered(action) for action in found if action is not None]


def _with_sends(order: Order, rank_of: Mapping[int, int], ranks: int) -> Order:
    """Return actions with the sends that follow them, and receives where a peer sends.

    As torch's own lowering, which knows one first and one last stage. What two ranks send each
    other is received in the order in which it is sent.
    """
    ends = {
        step: {number_of(stage, ranks, back) for back in (False, True)}
        for step, stage in ((1, ranks - 1), (-1, 0))
    }
    found: Order = {rank: [] for rank in order}
    arrived: set[tuple[int, Kind, int | None]] = set()
    left = {rank: deque(actions) for rank, actions in order.items()}

    def way(action: _Action) -> tuple[int, Kind, Kind] | None:
        """Return the step to the next stage of what an action makes, its send and receive."""
        if action.computation_type == Kind.FORWARD:
            return 1, Kind.SEND_F, Kind.RECV_F
        if action.computation_type in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
            return -1, Kind.SEND_B, Kind.RECV_B
        return None

    def ready(action: _Action) -> bool:
        if (goes := way(action)) is None or action.stage_index in ends[-goes[0]]:
            return True
        return (action.stage_index, goes[2], action.microbatch_index) in arrived

    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, todo in left.items():
            parts = (todo[0].sub_actions or (todo[0],)) if todo else ()
            if not parts or not all(map(ready, parts)):
                continue
            found[rank].append(todo.popleft())
            for action in parts:
                goes, stage, number = way(action), action.stage_index, action.microbatch_index
                if goes is None or stage in ends[goes[0]]:
                    continue
                step, send, receive = goes
                found[rank].append(_Action(stage, send, number))
                found[rank_of[stage + step]].append(_Action(stage + step, receive, number))
                arrived.add((stage + step, receive, number))
        assert sum(map(len, left.values())) < before, "a rank waits for ever"
    return found
