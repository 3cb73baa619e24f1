"""Picture of activations: what each kind of block saves and forgets, and what that costs."""

from __future__ import annotations

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing
from megacpp.config.checks.every import resolve
from megacpp.config.presets import nam56r_base
from megacpp.lessons.pareto import NORMS, measured, part_of
from megacpp.lessons.recompute import BY_KIND, KEEP_ALL

FLOPS, LINK = 400e12, 64e9  # of a GPU per second, and bytes per second to the host
KINDS = {"R": "M2RNN", "M": "Mamba-3", "A": "attention", "E": "experts"}


def saved_by_kind() -> Drawing:
    """Draw bytes that blocks of `nam56r_base` save and forget, and ms to get them back."""
    model = resolve(nam56r_base(), 1)
    tokens = model.train.device_batch_size * model.data.seq_len
    every, norms, policy = (measured(s, model, 1).activations for s in (KEEP_ALL, NORMS, BY_KIND))
    drawing = Drawing(760, "Activations of each kind of block in nam56r_base: what stays, what is"
                      " computed again, and the ms of that beside those of moving it")  # fmt: skip
    drawing.legend(84, 12, [(0, "stays"), (1, "its policy drops"), (2, "recomputed norms drop")])
    drawing.legend(484, 12, [(3, "computed again"), (8, "moved instead")])
    row, high = 52.0, 52.0 * len(KINDS)
    size = Axes(drawing, 84, 44, 300, high, (0, 110), (0, 1))
    size.frame(range(0, 101, 20), [], ("bytes per token and channel of one layer", ""))
    time = Axes(drawing, 484, 44, 216, high, (0, 200), (0, 1))
    time.frame(range(0, 201, 50), [], ("predicted ms, all layers of a kind", ""))
    for number, (kind, name) in enumerate(KINDS.items()):
        y = size.top + number * row + 8
        whole, less, least = (part_of(found, kind) for found in (every, norms, policy))
        each = [p.bytes / p.layers / tokens / model.model.dim for p in (least, less, whole)]
        drawing.text(14, y + 16, f"{kind} x {whole.layers}", "head")
        drawing.text(14, y + 32, name, "note")
        begin = 0.0
        for fill, end in enumerate(each):
            x, wide = size.at(begin, 0)[0], size.at(end, 0)[0] - size.at(begin, 0)[0]
            drawing.rect(x, y, wide, 36, fill, f"{end - begin:.1f}" if wide > 26 else "")
            begin = end
        drawing.text(size.at(begin, 0)[0] + 5, y + 22, f"{each[0]:.1f} of {begin:.1f}", "note")
        costs = (3, least.repeated(whole) / FLOPS), (8, (whole.bytes - least.bytes) / LINK)
        for half, (fill, spent) in enumerate(costs):
            wide = time.at(1e3 * spent, 0)[0] - time.left
            drawing.rect(time.left, y + 18 * half, wide, 17, fill)
            drawing.text(time.left + wide + 5, y + 13 + 18 * half, f"{1e3 * spent:.1f}", "note")
    return drawing
