"""Picture of number formats: how finely each rounds, and where it ends."""

from __future__ import annotations

import torch

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
FROM, TO, DRAWS = -30, 20, 9973  # powers of two; numbers drawn in each octave


def rounding_of_formats() -> Drawing:
    """Draw the largest relative error in each octave, found by rounding numbers in it."""
    drawing = Drawing(660, "bf16 rounds alike everywhere; fp16 and e4m3 are finer or end early.")
    drawing.legend(60, 14, [(number, name) for number, name in enumerate(FORMATS)])
    axes = Axes(drawing, 60, 60, 560, 190, (2.0**FROM, 2.0**TO), (1e-4, 1.0), log=True)
    names = ("size of the number", "largest relative error")
    axes.frame([1e-9, 1e-6, 1e-3, 1, 1e3, 1e6], [1e-4, 1e-3, 1e-2, 0.1, 1], names)
    for number, dtype in enumerate(FORMATS.values()):
        points = []
        for exponent in range(FROM, TO):
            x = 2.0**exponent * torch.linspace(1, 2, DRAWS, dtype=torch.float64)[:-1]
            kept = x.to(dtype).double()
            error = ((kept - x) / x).abs().amax().item()
            if kept.isfinite().all() and x.amax() <= torch.finfo(dtype).max:
                points.append((2.0 ** (exponent + 0.5), error))
        axes.line(points, f"s{number}")
    return drawing
