"""Pictures of number formats: how finely each rounds, where it ends, and what a scale saves."""

from __future__ import annotations

from itertools import product
from typing import get_args

import torch
from torch import Tensor

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing
from megacpp.config.presets import tiny
from megacpp.config.schema import PrecisionConfig
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.low_bit import BLOCKS, MIN_ENTRIES, Bits, new_low_bit_state, plain, write
from parallel.step_sums import LossScale

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
WAYS = {"keep 11 bits": 3, "keep fewer": 2, "become 0": 1, "overflow": 7}
MOMENTS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}
FROM, TO, DRAWS = -30, 20, 9973  # powers of two; numbers drawn in each octave


def rounding_of_formats() -> Drawing:
    """Draw the largest relative error in each octave, found by rounding numbers in it."""
    drawing = Drawing(660, "bf16 rounds alike everywhere; fp16 and e4m3 are finer or end early.")
    drawing.legend(60, 14, [(number, name) for number, name in enumerate(FORMATS)])
    axes = Axes(drawing, 60, 60, 560, 190, (2.0**FROM, 2.0**TO), (1e-4, 1.0), log="xy")
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


def gradients_of_activations(tokens: int) -> Tensor:
    """Return the gradients behind all blocks of an untrained `tiny`, fp64 `[N]`.

    Args:
        tokens: by which the loss is divided, those of a step.
    """
    config, generator = tiny().model, torch.Generator().manual_seed(0)
    model = HybridLM(config).double()
    initialise(model, model.init_rules(), seed=0)
    ids_BT = torch.randint(config.vocab_size, (1, 129), generator=generator)
    found: list[Tensor] = []
    for block in model.blocks.children():
        block.register_forward_hook(lambda *io: io[2].register_hook(found.append) and None)
    out = model(ids_BT[:, :-1], ids_BT[:, 1:], Documents.rows(1, 128))
    (out.loss_sum / tokens).backward()
    return torch.cat([gradient.flatten() for gradient in found]).double()


def error_in_block(bits: Bits, name: str, exponent: int) -> float:
    """Return the largest relative error of moments in an octave, whose block has a 1.

    Args:
        bits: of the state.
        name: of the moment.
        exponent: of the octave's end, a power of two.
    """
    entry = new_low_bit_state(torch.zeros(MIN_ENTRIES), bits)[name]
    blocks = 2.0 ** (exponent - torch.linspace(0, 1, MIN_ENTRIES)).view(-1, BLOCKS[bits])
    blocks[:, 0] = 1
    write(entry, blocks.view(-1))
    kept = plain(entry).view_as(blocks)[:, 1:]
    return (kept / blocks[:, 1:] - 1).abs().amax().item()


def kept_by_fp16(values: Tensor) -> list[Tensor]:
    """Return masks of the numbers that fp16 keeps in each way of `WAYS`, `[N]` each.

    Args:
        values: positive, `[N]`.
    """
    rounded = values.half()
    lost, over = rounded == 0, rounded.isinf()
    small = values < torch.finfo(torch.float16).smallest_normal
    return [~small & ~over, small & ~lost, lost, over]


def scales_of_small_numbers() -> Drawing:
    """Draw gradients in the range of fp16 by loss scale, and errors of moments in a block."""
    drawing = Drawing(760, "Gradients before and behind a loss scale in the range of fp16, and the"
                      " error of a moment by its size in a block")  # fmt: skip
    drawing.text(14, 22, "fp16: gradients behind the blocks of tiny", "head")
    drawing.legend(14, 36, [(fill, name) for name, fill in WAYS.items()])
    gradients = gradients_of_activations(1 << 18).abs()
    for panel, factor in enumerate((1.0, LossScale(PrecisionConfig(dtype="fp16")).value)):
        axes = Axes(drawing, 30, 86 + panel * 142.0, 330, 84, (-36, 20), (0, 0.35))
        words = _octaves(axes, gradients * factor)
        drawing.text(30, axes.top - 6, f"loss scale {factor:,.0f}: {words}", "note")
    drawing.text(410, 22, "AdamW: moments in a block with one scale", "head")
    chart = Axes(drawing, 456, 104, 286, 208, (2.0**-24, 1.0), (1e-3, 1.0), log="xy")
    names = "size, 1: the largest of its block", "largest relative error"
    chart.frame([1e-6, 1e-4, 1e-2, 1], [1e-3, 1e-2, 0.1, 1], names)
    for number, (bits, moment) in enumerate(product(get_args(Bits), MOMENTS)):
        points = [(2.0**n, min(1.0, error_in_block(bits, moment, n))) for n in range(-23, 1)]
        chart.line(points, f"s{number}")
        words = f"{bits.removesuffix('bit')} bits, {MOMENTS[moment]}"
        drawing.legend(410 + 160 * (number // 2), 36 + 20 * (number % 2), [(f"s{number}", words)])
    return drawing


def _octaves(axes: Axes, values: Tensor) -> str:
    """Draw how many values lie in each octave, over what fp16 does there; return shares in words.

    Args:
        axes: powers of two, and shares.
        values: positive, `[N]`.
    """
    ways, bottom = kept_by_fp16(values), axes.top + axes.high
    for octave in range(int(axes.x[0]), int(axes.x[1])):
        here = values.log2().floor() == octave
        inside = kept_by_fp16(torch.tensor([1.2 * 2.0**octave]))  # it rounds within the octave
        (x, y), right = axes.at(octave, 0), axes.at(octave + 1, 0)[0]
        for fill, way, kept in zip(WAYS.values(), ways, inside, strict=True):
            high = (way & here).double().mean().item() / axes.y[1] * axes.high
            y -= high
            if high:
                axes.drawing.rect(x, y, right - x - 1, high, fill)
            if kept:
                axes.drawing.rect(x, bottom + 3, right - x, 8, fill)
        if octave % 8 == 0:
            axes.drawing.text(x - 10, bottom + 26, f"2^{octave}", "note")
    shares = [(way.double().mean().item(), name) for way, name in zip(ways, WAYS, strict=True)]
    return ", ".join(f"{share:.1%} {name}" for share, name in shares if share > 5e-4)
