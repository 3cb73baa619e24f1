"""Assignment 3: a 1F1B timetable."""


def timetable(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the actions of a stage in order: ("F" or "B", microbatch)."""
    raise NotImplementedError
