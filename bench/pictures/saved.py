"""Picture of saved state: pieces of a weight on one mesh, as the ranks of another one read them."""

from __future__ import annotations

from dataclasses import replace

from bench.pictures.svg import Drawing
from megacpp.config.checks.every import resolve
from megacpp.config.presets import tiny
from megacpp.config.schema import MeshConfig
from parallel.fsdp import shard_slice
from parallel.simulate.fake import fake_world, planned_model

WEIGHT = "blocks.0.mixer.wo.weight"
SAVED, READ = MeshConfig(dp_shard=4), MeshConfig(dp_shard=2, tp=2)
Rows = tuple[int, int, int, int]  # first and last row, first and last column


def pieces(mesh: MeshConfig) -> tuple[Rows, list[Rows]]:
    """Return a weight's rows and columns: of the whole, and on each of four ranks."""
    config = resolve(
        replace(tiny(), model=replace(tiny().model, pattern="AF", depth=2), mesh=mesh), 4
    )
    found: list[Rows] = []
    rows = columns = 0
    for rank in range(4):
        with fake_world(config, 4, rank) as world:
            weight = dict(planned_model(config, world).named_parameters())[WEIGHT]
            part, (rows, columns) = shard_slice(weight.detach()), weight.shape
        (i, j), (r, c) = part.offset, part.local.shape
        found.append((i, i + r, j, j + c))
    return (0, rows, 0, columns), found


def pieces_on_another_mesh() -> Drawing:
    """Draw a weight's pieces of four ranks, and what each rank of another mesh reads of them."""
    (_, rows, _, columns), saved = pieces(SAVED)
    _, wanted = pieces(READ)
    drawing = Drawing(760, "Pieces of a weight in four files, and which of them other ranks read")
    scale = 130 / columns
    drawing.text(16, 24, "saved on dp_shard 4", "head")
    drawing.text(196, 24, "read on dp_shard 2 x tp 2", "head")
    for x, part in zip((16, 196, 336, 476, 616), [(0, rows, 0, columns), *wanted], strict=True):
        top, number = 52.0, (x - 196) // 140
        drawing.text(x, 44, f"{WEIGHT[9:-7]}" if x == 16 else f"rank {number}", "note")
        drawing.rect(x, top, columns * scale, rows * scale, "off")
        read = 0
        for fill, piece in enumerate(saved):
            i, j = max(part[0], piece[0]), max(part[2], piece[2])
            h, w = min(part[1], piece[1]) - i, min(part[3], piece[3]) - j
            if h > 0 and w > 0:
                words = f"file {fill + 1}" if w * scale > 40 else ""
                place = x + j * scale, top + i * scale
                drawing.rect(*place, w * scale - 1, h * scale - 1, fill, words)
                read += 1
        if x > 16:
            drawing.text(x, top + rows * scale + 18, f"from {read} files", "note")
    return drawing
