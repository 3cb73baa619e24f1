"""What a traced step has alive while each part of the model runs, to hold closed forms against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megacpp.memory.forms.traced import TracedPart
from megacpp.memory.stream import Stream, StreamBlock

ELSEWHERE = ("parameters", "optimizer_state", "batch", "communication", "muon_transient")
KEPT = ("activations", "moe_routing", "head_loss")  # what the graph holds until it ends, of others


@dataclass(frozen=True)
class WorkingSet:
    """Most bytes at once in a phase of a part, and what they are.

    Counted: what is alive but for weights (shards, gathered, buffers of their collectives), the
    optimizer's state, the batch, gradients of other parts' weights, and what other parts keep.
    So: own kept tensors as far as they are alive, gradients that came from behind, temporaries,
    and the gradients of the part's own weights, whole.
    """

    bytes: int
    gradients: int
    blocks: tuple[StreamBlock, ...]


def working_sets(
    stream: Stream,
    batch: bool = False,
    parts: Mapping[str, TracedPart] | None = None,
    casts: bool = False,
) -> dict[tuple[str, str], WorkingSet]:
    """By (`forward` or `backward`, part); of the last microbatch.

    Args:
        parts: those that are traced together count what they hand each other.
        batch: count the batch as well, with what all layers share.
        casts: of one process, whose autocast casts weights: count those of the part.
    """
    order = [name.split()[1] for _, name in stream.marks if name.startswith("forward ")]
    place = {part: i for i, part in enumerate(order)}
    found_in = {part: _same_chain(parts or {}, place, part) for part in order}
    segments = {i: name for i, name in stream.marks}  # the last mark of a place wins
    alive: set[int] = set()
    now = ""
    found: dict[tuple[str, str], WorkingSet] = {}
    most: dict[str, int] = {}
    for index, (number, sign) in enumerate(stream.changes()):
        now = segments.get(index, now)
        (alive.add if sign > 0 else alive.discard)(number)
        phase, _, part = now.partition(" ")
        if phase not in ("forward", "backward") or part not in place:
            continue
        if index in segments:
            most[now] = 0
        blocks = list(_counted(stream, alive, part, place, batch, found_in[part]))
        if casts:
            every = (stream.blocks[number] for number in alive)
            blocks += [b for b in every if b.component == "communication" and b.part == part]
        size = sum(b.bytes for b in blocks)
        if size > most.get(now, -1):
            most[now] = size
            gradients = sum(b.bytes for b in blocks if b.component == "gradients")
            found[phase, part] = WorkingSet(size, gradients, tuple(blocks))
    return found


def _same_chain(
    parts: Mapping[str, TracedPart], place: Mapping[str, int], part: str
) -> frozenset[str]:
    if part not in parts:
        return frozenset()
    first, size = place[part] - parts[part].place, len(parts[part].chain)
    return frozenset(name for name, at in place.items() if first <= at < first + size)


def _counted(
    stream: Stream,
    alive: set[int],
    part: str,
    place: dict[str, int],
    batch: bool,
    chain: frozenset[str],
) -> Iterator[StreamBlock]:
    for number in alive:
        block = stream.blocks[number]
        if batch and block.component == "batch":
            yield block
        if block.component in ELSEWHERE:
            continue
        if block.component == "gradients" and (
            block.part != part or block.name.startswith(("_reduce_scatter_base_", "copy_ "))
        ):
            continue  # of others, or shards
        if place.get(block.part, len(place)) < place[part]:
            if block.part in chain and block.component == "workspace":
                yield block
            continue
        # The head makes the gradient of its input in its forward.
        fused = part in ("norm", "top", "mtp") and block.name.startswith("mm ")
        own = block.part == part or (fused and block.part in ("head", "top"))
        if block.component in KEPT and not own:
            continue
        yield block
