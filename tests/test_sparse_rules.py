"""Sparse attention: settings that can't work, one line each, and what a run says of the others."""

from __future__ import annotations

import pytest

from megacpp.blocks.attention.sparse_checks import sparse_lines
from megacpp.config.arguments import parse_run
from megacpp.errors import ConfigError

SPARSE = "tiny --model.attention.sparse.layers all"
PREFIX = "--model.attention.sparse."

# arguments, key that the line starts with, words that it contains; on so many ranks
WRONG: list[tuple[str, str, str, int]] = [
    (f"tiny {PREFIX}layers one", "model.attention.sparse.layers=one", "are numbers", 1),
    (f"tiny {PREFIX}layers 0,7", "model.attention.sparse.layers=0,7", "has 3 A blocks", 1),
    (f"tiny {PREFIX}layers 0 {PREFIX}own 2", "model.attention.sparse.own=2", "are sparse ones", 1),
    (f"tiny {PREFIX}own 1", "model.attention.sparse.own=1", "no layer is sparse", 1),
    (f"tiny {PREFIX}stage dense", "model.attention.sparse.stage=dense", "no layer is sparse", 1),
    (f"{SPARSE} {PREFIX}top-k 0", "model.attention.sparse.top_k=0", "at least 1", 1),
    (f"{SPARSE} {PREFIX}share 0", "model.attention.sparse.share=0", "at least 1", 1),
    (f"{SPARSE} {PREFIX}num-heads 0", "model.attention.sparse.num_heads=0", "at least 1", 1),
    (f"{SPARSE} {PREFIX}loss 0", "model.attention.sparse.loss=0.0", "must be above 0", 1),
    (f"{SPARSE} {PREFIX}head-dim 33", "model.attention.sparse.head_dim=33", "-dim 34.", 1),
    (
        f"{SPARSE} --model.attention.kind mla --model.attention.qk-norm false "
        f"--model.attention.qk-rope-head-dim 32 {PREFIX}head-dim 16",
        "model.attention.sparse.head_dim=16",
        "32 rotary dims of MLA, and must be even. Fix: use --model.attention.sparse.head-dim 32",
        1,
    ),
    (
        f"{SPARSE} --model.attention.rope-fraction 0.5 {PREFIX}head-dim 6",
        "model.attention.sparse.head_dim=6",
        "rope_fraction=0.5 takes 3 of it. Fix: use --model.attention.sparse.head-dim 8",
        1,
    ),
    (
        f"{SPARSE} --mesh.cp 2 --mesh.cp-attention ring",
        "mesh.cp_attention=ring",
        "use --mesh.cp-attention all_gather",
        2,
    ),
    (f"{SPARSE} --mesh.cp 2 --mesh.cp-attention heads", "mesh.cp_attention=heads", "whole rows", 2),
    (
        f"{SPARSE} {PREFIX}stage dense --mesh.pp 2 --train.grad-accum 2",
        "mesh.pp=2",
        "would have no backward (model.attention.sparse.stage=dense)",
        2,
    ),
    (
        f"{SPARSE} --mesh.pp 16 --train.grad-accum 16",
        "mesh.pp=16",
        "makes 16 stages of it, each needs a layer (model.depth=12)",
        16,
    ),
    (
        f"{SPARSE} {PREFIX}stage dense --model.attention.qk-norm false --optim.qk-clip 100",
        "optim.qk_clip=100.0",
        "weights that are to stay",
        1,
    ),
    (
        f"{SPARSE} {PREFIX}stage dense --recompute.compress 0.25",
        "recompute.compress=0.25",
        "what isn't trained",
        1,
    ),
]


@pytest.mark.parametrize(("arguments", "key", "words", "size"), WRONG, ids=[w[1] for w in WRONG])
def test_one_line(arguments: str, key: str, words: str, size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(arguments.split(), size)
    line = str(caught.value)
    assert line.startswith(f"{key}: ") and words in line and "Fix: " in line, line
    assert "\n" not in line


def test_transformer_engine_would_choose_again() -> None:
    """Check beside other rules of FP8, which come first if the library isn't installed."""
    from megacpp.config.checks.every import broken

    arguments = f"{SPARSE} --recompute.ablock full".split()
    config = parse_run(arguments, 1).config
    import dataclasses

    te = dataclasses.replace(config, precision=dataclasses.replace(config.precision, fp8="te"))
    assert any("would choose keys again" in str(error) for error in broken(te, 1))
    assert not any("choose keys" in str(error) for error in broken(config, 1))


@pytest.mark.parametrize(
    ("arguments", "size", "lines"),
    [
        ("tiny", 1, []),
        (
            f"{SPARSE} {PREFIX}share 2",
            1,
            ["sparse attention: 256 keys chosen in layers 0, 8, taken over by 4"],
        ),
        (
            f"{SPARSE} {PREFIX}share 2 {PREFIX}stage dense",
            1,
            [
                "sparse attention, warm-up: all keys are attended to, only the indexers of layers "
                "0, 8 are trained"
            ],
        ),
        (
            f"{SPARSE} {PREFIX}share 3 --mesh.pp 2 --train.grad-accum 2",
            2,
            ["sparse attention: 256 keys chosen in layers 0, taken over by 4, 8"],
        ),
    ],
)
def test_the_header_says_who_chooses(arguments: str, size: int, lines: list[str]) -> None:
    resolved = parse_run(arguments.split(), size)
    assert [*sparse_lines(resolved.config)] == lines
    assert resolved.provenance["model.attention.sparse.own"] == "default"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("full_layers 1", "full_layers=1: names blocks without the window"),
        (
            "full_layers 1 --model.attention.kind mla --model.attention.qk_norm false",
            "full_layers=1: belongs to grouped-query",
        ),
        ("window 8 --model.attention.full_layers 5", "full_layers=5: the model has 3 A blocks"),
        ("window 8 --model.attention.full_layers every:0", "full_layers=every:0: ranks of A"),
    ],
)
def test_blocks_without_the_window_are_named(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.attention\.{said}.* Fix: "):
        parse_run(f"tiny --model.attention.{words}".split(), 1)


def test_clipping_knows_one_temperature() -> None:
    words = "tiny --model.attention.qk_norm false --optim.qk_clip 50 --model.attention.window 8"
    words += " --model.attention.full_layers every:2 --model.attention.yarn.factor 4"
    with pytest.raises(ConfigError, match=r"^optim.qk_clip=50.0: knows one temperature.* Fix: "):
        parse_run(words.split(), 1)


def test_what_knows_no_window_is_refused() -> None:
    rule = r"^model\.attention\.sparse\.layers=1,2: knows no window .* Fix: use --"
    with pytest.raises(ConfigError, match=rule):
        parse_run("tiny_full --model.attention.window 8".split(), 1)
