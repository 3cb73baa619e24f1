"""Pattern strings: tiling by layer index, pipeline cuts, counts, one-line errors."""

from __future__ import annotations

import dataclasses

import pytest

from megacpp.config.presets import NAM_PATTERN
from megacpp.config.schema import ModelConfig
from megacpp.errors import ConfigError
from megacpp.model.pattern import (
    LETTERS,
    block_letters,
    expand_pattern,
    layer_kinds,
    letter_counts,
)


@pytest.mark.parametrize(
    ("depth", "counts"),
    [
        (12, {"A": 3, "M": 3, "E": 5, "R": 1}),
        (13, {"A": 4, "M": 3, "E": 5, "R": 1}),
        (52, {"A": 13, "M": 13, "E": 22, "R": 4}),
        (56, {"A": 14, "M": 14, "E": 24, "R": 4}),
    ],
)
def test_counts_of_the_nam_pattern(depth: int, counts: dict[str, int]) -> None:
    assert letter_counts(NAM_PATTERN, depth) == counts
    assert sum(counts.values()) == depth


@pytest.mark.parametrize("pattern", ["A", "AEM", NAM_PATTERN])
@pytest.mark.parametrize("depth", [1, 2, 3, 7, 12, 25])
def test_layer_i_has_letter_i_modulo_the_pattern(pattern: str, depth: int) -> None:
    stages = expand_pattern(pattern, depth)
    assert len(stages) == 1 and len(stages[0]) == depth
    assert all(letter == pattern[i % len(pattern)] for i, letter in enumerate(stages[0]))


def test_a_shorter_depth_is_a_prefix() -> None:
    assert block_letters(NAM_PATTERN, 52).startswith(block_letters(NAM_PATTERN, 13))


def test_lower_case_reads_the_same() -> None:
    assert block_letters("aem|r", 4) == block_letters("AEM|R", 4) == "AEMR"


def test_cuts_make_stages_and_change_no_letter() -> None:
    assert expand_pattern("AE|M|EAEM", 7) == ("AE", "M", "EAEM")
    assert block_letters("AE|M|EAEM", 7) == "AEMEAEM"
    assert letter_counts("AE|M|EAEM", 7) == letter_counts("AEMEAEM", 7)


def test_layers_without_the_window_have_a_kind_of_their_own() -> None:
    model = dataclasses.replace(ModelConfig(), pattern="AF", depth=12)
    for ranks, full in (("", []), ("every:4", [3]), ("1, 5", [1, 5]), ("all", list(range(6)))):
        attention = dataclasses.replace(model.attention, window=8, full_layers=ranks)
        kinds = layer_kinds(dataclasses.replace(model, attention=attention))
        assert [rank for rank, kind in enumerate(kinds[::2]) if kind == "A+full"] == full


def test_letters_that_do_not_occur_are_not_counted() -> None:
    assert letter_counts("AF", 4) == {"A": 2, "F": 2}


@pytest.mark.parametrize(
    ("pattern", "depth", "key", "words"),
    [
        ("AXE", 3, "model.pattern=AXE", "unknown letter 'X'"),
        ("A E", 3, "model.pattern=A E", "unknown letter ' '"),
        ("", 3, "model.pattern=''", "no letter"),
        ("||", 3, "model.pattern=||", "no letter"),
    ],
)
def test_wrong_letters_list_the_legal_ones(pattern: str, depth: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_pattern(pattern, depth)
    line = str(caught.value)
    assert line.startswith(key) and words in line and "\n" not in line
    assert all(f"{letter} ({kind})" in line for letter, kind in LETTERS.items())


@pytest.mark.parametrize("pattern", ["|AE", "AE|", "A||E"])
def test_an_empty_stage_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="stage is empty"):
        expand_pattern(pattern, 2)


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_cut_pattern_is_not_tiled(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"has 2, model.depth={depth}.*--model.depth 2"):
        expand_pattern("A|E", depth)


@pytest.mark.parametrize("depth", [0, -1])
@pytest.mark.parametrize("pattern", ["AE", "A|E"])
def test_a_depth_below_one_is_refused(pattern: str, depth: int) -> None:
    with pytest.raises(ConfigError, match=f"^model.depth={depth}: must be at least 1"):
        expand_pattern(pattern, depth)
