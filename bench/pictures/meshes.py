"""Pictures of meshes: who is who, who stores what, who has which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bench.pictures.svg import Drawing
from megacpp.config.checks.every import resolve
from megacpp.config.presets import tiny
from megacpp.config.schema import Config, MeshConfig
from megacpp.model.count import meta_model
from parallel.context.layout import ContextLayout
from parallel.fsdp import shard_slice
from parallel.simulate.fake import fake_world, planned_model

# Move of parallel/collectives.py, the states before and after it.
MOVES = (
    ("gather", "A[I_X, J]", "A[I, J]"),
    ("all_sum", "A[I, J]{X}", "A[I, J]"),
    ("scatter_sum", "A[I, J]{X}", "A[I_X, J]"),
    ("exchange", "A[I_X, J]", "A[I, J_X]"),
)

LAYOUTS: tuple[tuple[int, Literal["contiguous", "head_tail"], str], ...] = (
    (20, "contiguous", "contiguous"),
    (380, "head_tail", "head-tail"),
)


def foldings() -> Drawing:
    """Draw eight ranks twice: as dense blocks and as experts see them."""
    mesh, size = MeshConfig(dp_shard=4, tp=2, ep=4), 8
    where: list[dict[str, int]] = []
    for rank in range(size):
        with fake_world(Config(mesh=mesh), size, rank) as world:
            where.append({a: world.coordinate(a) for a in ("dp_shard", "tp", "efsdp", "ep")})
    drawing = Drawing(640, "Eight ranks as a dense mesh of 4 x 2 and as an expert mesh of 2 x 4")
    cell = 58
    foldings = (
        (96, "dp_shard", "tp", "dense blocks: dp_shard 4 x tp 2"),
        (360, "efsdp", "ep", "experts: efsdp 2 x ep 4"),
    )
    for left, rows, columns, title in foldings:
        drawing.text(left - 76, 24, title, "head")
        for rank, at in enumerate(where):
            x, y = left + at[columns] * cell, 58 + at[rows] * cell
            drawing.rect(x, y, cell - 4, cell - 4, at["ep"], f"rank {rank}")
            if rank == 3:
                drawing.rect(x - 1, y - 1, cell - 2, cell - 2, "edge")
            if at[rows] == 0:
                drawing.text(x + 12, 50, f"{columns} {at[columns]}", "note")
            if at[columns] == 0:
                drawing.text(left - 8, y + 32, f"{rows} {at[rows]}", "note", end=True)
    drawing.text(
        20, 312, "One colour: the ranks that hold the same experts. Framed: rank 3.", "note"
    )
    return drawing


def placements() -> Drawing:
    """Draw an 8 x 4 array on four ranks in its states, and the moves between them."""
    states: tuple[tuple[str, Placement], ...] = (
        ("A[I_X, J]", Shard(0)), ("A[I, J]", Replicate()),
        ("A[I, J]{X}", Partial()), ("A[I, J_X]", Shard(1)),
    )  # fmt: skip
    held: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {name: [] for name, _ in states}
    config = Config(mesh=MeshConfig(dp_shard=4))
    for rank in range(4):
        with fake_world(config, 4, rank) as world:
            mesh = world.meshes["dp_shard"]
            for name, state in states:
                held[name].append(compute_local_shape_and_global_offset((8, 4), mesh, [state]))
    drawing = Drawing(760, "An 8 x 4 array on four ranks in four placements, and the moves between")
    left, wide, high, y = 150, 16, 10, 44
    for rank in range(4):
        drawing.text(left + rank * 150 + 8, 24, f"rank {rank}", "head")
    for name, state in states:
        drawing.text(16, y + 28, name, "head")
        drawing.text(16, y + 46, repr(state).replace("dim=", "").replace("(sum)", "()"), "note")
        for rank, (shape, offset) in enumerate(held[name]):
            x = left + rank * 150
            fill = 4 if state.is_partial() else 9 if state.is_replicate() else rank
            for i, j in product(range(8), range(4)):
                at = zip((i, j), offset, shape, strict=True)
                mine = all(first <= place < first + count for place, first, count in at)
                cell = x + j * wide, y + i * high, wide - 1, high - 1
                drawing.rect(*cell, fill if mine else "off")
            words = "a summand" if state.is_partial() else f"{shape[0]} x {shape[1]}"
            drawing.text(x + 72, y + 44, words, "note")
        y += 106
    for i, (move, before, after) in enumerate(MOVES):
        x, top = 16 + i % 2 * 370, y + 6 + i // 2 * 24
        drawing.text(x, top, f"{move}:", "head")
        drawing.text(x + 106, top, f"{before}  to  {after}")
    return drawing


def slices() -> Drawing:
    """Draw which part of each matrix of two blocks rank 3 of four stores."""
    model = replace(tiny().model, pattern="AF", depth=2)
    config = resolve(replace(tiny(), model=model, mesh=MeshConfig(dp_shard=2, tp=2)), 4)
    named = meta_model(config.model).named_parameters()
    whole = {name: p.shape for name, p in named if p.ndim == 2}
    with fake_world(config, 4, 3) as world:
        held = dict(planned_model(config, world).named_parameters())
        parts = {name: shard_slice(held[name].detach()) for name in whole}
    drawing = Drawing(760, "The part of each matrix that rank 3 of dp_shard 2 x tp 2 stores")
    x, y, high = 20.0, 34.0, 0.0
    for name in sorted(whole, key=lambda n: (n.startswith(("embed", "head")), n)):
        rows, columns = whole[name]
        (r, c), (i, j) = parts[name].local.shape, parts[name].offset
        h, w = min(0.16 * rows, 120), columns * 0.16
        size = f"{r} x {c} of {rows} x {columns}"
        if x + max(w, 6.6 * len(size)) > 750:
            x, y, high = 20.0, y + high + 48, 0.0
        drawing.text(x, y - 8, name.replace("blocks.", "").replace(".weight", ""), "head")
        drawing.rect(x, y, w, h, "off")
        drawing.rect(x + j / columns * w, y + i / rows * h, c / columns * w, r / rows * h, 0)
        drawing.text(x, y + h + 16, size, "note")
        x, high = x + max(w, 6.6 * len(size)) + 18, max(high, h)
    return drawing


def masks() -> Drawing:
    """Draw the causal pairs of a row over four ranks, contiguous and head-tail."""
    tokens, ranks, cell = 32, 4, 9
    drawing = Drawing(700, "Causal attention of one row on four ranks: contiguous and head-tail")
    drawing.legend(20, 14, [(r, f"queries of rank {r}") for r in range(ranks)])
    for left, order, word in LAYOUTS:
        drawing.text(left, 52, word, "head")
        pairs = []
        for rank in range(ranks):
            index = ContextLayout.for_rank(order, rank, ranks).index(tokens).tolist()
            pairs.append(sum(t + 1 for t in index))
            for t in index:
                drawing.rect(left, 60 + t * cell, (t + 1) * cell, cell - 1, rank)
        y = 60 + tokens * cell + 18
        drawing.text(left, y, "pairs a rank: " + ", ".join(map(str, pairs)), "note")
    words = "Rows are queries, columns the keys that they see."
    drawing.text(20, 60 + tokens * cell + 38, words, "note")
    return drawing
