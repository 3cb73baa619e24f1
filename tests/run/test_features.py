"""Header lines about a model's features, in numbers of the configuration."""

from __future__ import annotations

from megacpp.config.arguments import parse_run
from megacpp.config.presets import PRESETS, tiny, tiny_full
from megacpp.launch.features import feature_lines


def test_a_plain_model_has_no_line() -> None:
    assert feature_lines(tiny()) == []


def test_one_line_for_each_feature() -> None:
    """By hand: A blocks are layers 0, 4 and 8; of pools of 8 + 8 a token chooses 2 / 0.5."""
    assert feature_lines(tiny_full()) == [
        "sparse attention: 64 keys chosen in layers 4, taken over by 8",
        "null experts: a token chooses 4 of 8 experts and 8 nulls, 2 experts on average",
        "experts in 4 groups, of which a token visits 2",
        "further tokens: 2 by one block, 0.3 of the loss, weights 0.625, 0.375",
        "token order: 0.5 of the loss, 64 tokens ahead",
        "n-grams of 2 to 3 tokens: 8 tables, 64,512 rows of 8, zero at the start",
        "n-gram memories in front of layers 4: 2 to 3 tokens, 1,161,408 parameters each, "
        "zero at the start",
        "4 residual streams (paper, 20 rounds), mixed again in 4 groups of layers",
    ]


def test_settings_change_the_words() -> None:
    words = "tiny --model.mtp.depths 1 --model.mtp.shared False --model.mtp.switch 0.5"
    config = parse_run(f"{words} --model.mtp.loss-final 0.1".split(), 1).config
    assert feature_lines(config) == [
        "further tokens: 1 by a block each, 0.3 of the loss, 0.1 later, weights 1"
    ]
    words = "tiny --model.moe.num-groups 2 --model.moe.top-k-groups 1"
    assert feature_lines(parse_run(words.split(), 1).config) == [
        "experts in 2 groups, of which a token visits 1"
    ]


def test_a_capacity_is_said_to_depend_on_the_mesh() -> None:
    words = "tiny --mesh.ep 2 --model.moe.capacity-factor 1.25"
    for more, whose in (("", "each rank's tokens"), (" padded", "the tokens of 2 ranks")):
        flags = f"{words} --mesh.ep-dispatch{more}" if more else words
        (line,) = feature_lines(parse_run(flags.split(), 2).config)
        assert f"1.25 times an even share of {whose}" in line and "depends on the mesh" in line


def test_presets_with_features_say_them() -> None:
    found = {name: len(feature_lines(PRESETS[name]())) for name in ("nam56r", "nam52_deep")}
    assert found == {"nam56r": 3, "nam52_deep": 4}
