"""Products in FP8, and the passes that round their operands.

    forward, backward = in_fp8(forward, backward, config, experts=False)

A traced block rounds as it does without FP8 hardware, so its memory-bound work is taken from the
trace of its bf16 form, and what FP8 rounds is counted here. No torch import.
"""

from __future__ import annotations

from collections.abc import Iterable

from megacpp.config.schema import Config
from megacpp.speed.operators import Operator, Passes, Product

# Bytes moved for each number of an operand. A fused kernel reads it for its largest, reads it again
# and writes it, and so does one for the transposed copy; torchao's operators in eager mode take
# the absolute value and the largest, widen, scale, clamp and narrow, each in a pass.
FUSED, EAGER = 6.0, 33.0
FUSED_LAUNCHES, EAGER_LAUNCHES = 2, 8  # for each operand
ROUNDING = "rounding to FP8"


def in_fp8(
    forward: Iterable[Product], backward: Iterable[Product], config: Config, experts: bool
) -> tuple[list[Operator], list[Operator]]:
    """Return products in FP8 with their roundings, forward and backward.

    Args:
        forward: products of one matrix, or of one of each expert.
        backward: gradients of its input, and of itself.
        config: names the library and the recipe.
        experts: they are products of routed experts, whose kernels round.
    """
    ahead, back = (
        [made for op in ops for made in _rounded(op, config, experts)]
        for ops in (forward, backward)
    )
    return ahead, back


def _rounded(op: Product, config: Config, experts: bool) -> list[Operator]:
    """Return one product with the roundings of its operands.

    A weight's gradient is wide by the recipe `rowwise_with_gw_hp`. By `rowwise` it rounds both
    operands along the tokens; with one scale for each tensor, copies of the other products serve.
    """
    precision, gradient = config.precision, op.layout == "NT"
    by_row = precision.fp8 == "torchao" and (experts or precision.fp8_recipe != "tensorwise")
    if gradient and by_row and precision.fp8_recipe == "rowwise_with_gw_hp":
        return [op]
    eight = op._replace(dtype="fp8", rounds=False)
    if gradient and not by_row:
        return [eight]
    eager = precision.fp8 == "torchao" and config.train.compile != "inductor" and not experts
    each, launches = (EAGER, EAGER_LAUNCHES) if eager else (FUSED, FUSED_LAUNCHES)
    kept = not gradient and precision.fp8_all_gather  # the weight comes rounded
    numbers = op.count * op.k * (op.m + op.n * (not kept))
    return [Passes(each * numbers, launches * (2 - kept), ROUNDING), eight]
