"""Order of a pipeline's actions, as torch's own schedule object emits it, without processes.

torch_order("zbv", ranks=4, microbatches=8)[0]      # [0F0, 0F1, ..., 7F0, 7I0, 7W0, ...]
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megacpp.model.stages import stage_ids, stages_per_rank


def torch_order(schedule: str, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """Return the actions of each rank by its number; the schedule has several stages a rank.

    Its constructor reads numbers of the stages alone, so these have nothing else.
    """
    from parallel.pipeline import SCHEDULES  # imports torch's pipelines

    count = ranks * stages_per_rank(schedule)
    stages = [
        SimpleNamespace(
            group=None, group_size=ranks, group_rank=0, num_stages=count, stage_index=i,
            stage_index_to_group_rank={}, has_backward=True, submod=None, device=None,
            is_first=i == 0, is_last=i == count - 1,
        )
        for i in stage_ids(schedule, ranks, 0)
    ]  # fmt: skip
    return SCHEDULES[schedule](stages, microbatches).pipeline_order
