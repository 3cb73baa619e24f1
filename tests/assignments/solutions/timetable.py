"""Assignment 3: a 1F1B timetable."""


def timetable(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the actions of a stage in order: ("F" or "B", microbatch)."""
    warm = min(stages - stage - 1, microbatches)
    actions = [("F", i) for i in range(warm)]
    for i in range(microbatches - warm):
        actions += [("F", warm + i), ("B", i)]
    return actions + [("B", i) for i in range(microbatches - warm, microbatches)]
