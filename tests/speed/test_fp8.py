"""Time of FP8: which products are in it, and what the rounding of their operands moves."""

from __future__ import annotations

from typing import Literal

import pytest

from megacpp.config.arguments import parse_run
from megacpp.speed.fp8 import EAGER, FUSED, ROUNDING
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Operator, Passes, Product, seconds
from megacpp.speed.ours import step_work
from megacpp.speed.step import BlockWork

DENSE = "dense_110m --precision.fp8 torchao"
TOKENS = 16_384
WIDTH, HIDDEN = 768, 2_048


def block(words: str, letter: str) -> BlockWork:
    """Return the second block of a letter, which isn't near an end of the model."""
    blocks = step_work(parse_run(words.split(), 1).config, 1, "H100").blocks
    return [b for b in blocks if b.kind == letter][1]


def roundings(ops: tuple[Operator, ...]) -> float:
    return sum(op.bytes for op in ops if isinstance(op, Passes) and op.what == ROUNDING)


def dtypes(ops: tuple[Operator, ...], layout: Literal["TN", "NN", "NT"]) -> set[str]:
    return {op.dtype for op in ops if isinstance(op, Product) and op.layout == layout}


@pytest.mark.parametrize(("compiler", "each"), [("off", EAGER), ("inductor", FUSED)])
def test_both_operands_of_each_product_are_rounded(compiler: str, each: float) -> None:
    found = block(f"{DENSE} --train.compile {compiler}", "F")
    weights = 3 * WIDTH * HIDDEN
    assert roundings(found.forward) == each * (TOKENS * (2 * WIDTH + HIDDEN) + weights)
    assert roundings(found.backward) == each * (TOKENS * (2 * HIDDEN + WIDTH) + weights)


@pytest.mark.parametrize(
    ("recipe", "of_weights", "more"),
    [
        ("rowwise_with_gw_hp", "bf16", 0),  # a wide gradient reads what was not rounded
        ("rowwise", "fp8", 3 * TOKENS * (WIDTH + HIDDEN)),  # rounds along the tokens
        ("tensorwise", "fp8", 0),  # one scale serves all products
    ],
)
def test_the_recipe_decides_how_gradients_of_weights_are_made(
    recipe: str, of_weights: str, more: int
) -> None:
    found = block(
        f"{DENSE} --train.compile inductor --precision.fp8-recipe {recipe} "
        "--precision.fp8-local-scales true",
        "F",
    )
    assert dtypes(found.backward, "NT") == {of_weights} and dtypes(found.backward, "NN") == {"fp8"}
    usual = TOKENS * (2 * HIDDEN + WIDTH) + 3 * WIDTH * HIDDEN
    assert roundings(found.backward) == FUSED * (usual + more)


def test_gathered_weights_come_rounded() -> None:
    words = f"{DENSE} --train.compile inductor --precision.fp8-recipe tensorwise "
    words += "--precision.fp8-local-scales true --precision.fp8-all-gather true"
    config = parse_run(words.split(), 2).config
    found = [b for b in step_work(config, 2, "H100").blocks if b.kind == "F"][1]
    assert roundings(found.forward) == FUSED * TOKENS * (2 * WIDTH + HIDDEN)


def test_emulated_rounding_of_a_trace_is_not_counted() -> None:
    """Check that memory-bound work beside the roundings is that of bf16, for experts too."""
    words = "nam56r_quarter --train.compile inductor"
    for letter in "AE":
        wide, eight = (block(f"{words} {fp8}", letter) for fp8 in ("", "--precision.fp8 torchao"))
        for narrow, plain in ((eight.forward, wide.forward), (eight.backward, wide.backward)):
            rest = [op for op in narrow if isinstance(op, Passes) and op.what != ROUNDING]
            assert rest == [op for op in plain if isinstance(op, Passes)]


def test_fp8_pays_where_matrices_are_wide_and_tokens_many() -> None:
    words = "nam56r_quarter --train.compile inductor --data.seq-len 32768 --precision.fp8"
    times = [
        sum(seconds(op, gpu("H100"), Rates()) for op in (*found.forward, *found.backward))
        for found in (block(f"{words} {fp8}", "A") for fp8 in ("off", "torchao"))
    ]
    assert times[1] < times[0]
