"""Picture of pairs of mesh axes: where they are compared with one process, and what is refused."""

from __future__ import annotations

from itertools import combinations, product

from bench.pictures.svg import Drawing
from megacpp.config.checks.every import broken
from megacpp.config.schema import Config
from megacpp.lessons.models import config_of
from tests.parallel.coverage import KINDS, proven
from tests.parallel.test_compositions import AXES

DEGREES = (2, 3, 4, 8)
WIDE, HIGH, BAR = 122, 80, 16  # of a pair of axes, and of a kind of block
CELL = (20, 14)


def refused(axes: tuple[str, str], degrees: tuple[int, int]) -> str:
    """Return the setting that `tiny` refuses on such a mesh, or nothing.

    The mesh has the ranks of both axes; where `ep` is one of them, `dp_shard` has those that `ep`
    shares with it.
    """
    size = degrees[0] if axes == ("dp_shard", "ep") else degrees[0] * degrees[1]
    shards: dict[str, object] = {} if "ep" in axes else {"dp_shard": 1}
    mesh = shards | dict(zip(axes, degrees, strict=True))
    config: Config = config_of("tiny", mesh, {"train.grad_accum": max(DEGREES)})
    error = next(broken(config, size), None)
    return str(error).split("=")[0] if error else ""


def compared_and_refused() -> Drawing:
    """Draw a square of axes: below its diagonal meshes in tests, above it refused degrees."""
    meshes = proven()
    most = max(len(meshes[pair, kind]) for pair in combinations(AXES, 2) for kind in KINDS)
    drawing = Drawing(760, "Pairs of mesh axes: meshes that tests compare with one process, by kind"
                      " of block; and which degrees tiny refuses")  # fmt: skip
    drawing.text(14, 22, "below: meshes in tests", "head")
    drawing.legend(210, 12, list(enumerate(KINDS)))
    drawing.text(14, 44, "above: degrees of tiny", "head")
    drawing.legend(
        210, 34, [("off", "accepted"), (7, "refused by a rule of mesh.tp, mesh.cp or mesh.ep")]
    )
    left, top = 14.0, 78.0
    for i, axis in enumerate(AXES):
        drawing.text(left + i * WIDE + 8, top + i * HIGH + 36, axis, "head")
    for (i, a), (j, b) in combinations(enumerate(AXES), 2):
        x, y = left + i * WIDE, top + j * HIGH + 58
        drawing.path([(x, y), (x + len(KINDS) * BAR, y)], "line")
        for number, kind in enumerate(KINDS):
            count = len(meshes[(a, b), kind])
            high = count / most * (HIGH - 28)
            drawing.rect(x + number * BAR, y - high, BAR - 2, high, number)
            at = x + number * BAR + (4 if count < 10 else 0)
            drawing.text(at, y - high - 3, f"{count}", "note")
        x, y = left + j * WIDE + 10, top + i * HIGH
        for (m, one), (n, other) in product(enumerate(DEGREES), repeat=2):
            key = refused((a, b), (one, other)).removeprefix("mesh.")
            place = x + n * CELL[0], y + m * CELL[1]
            drawing.rect(*place, CELL[0] - 1, CELL[1] - 1, 7 if key else "off", key)
            if not i and not m:
                drawing.text(place[0] + 6, y - 5, f"{other}", "note")
            if b == AXES[-1] and not n:
                drawing.text(x + len(DEGREES) * CELL[0] + 4, place[1] + 11, f"{one}", "note")
    return drawing
