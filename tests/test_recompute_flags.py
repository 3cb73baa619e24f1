"""Older names of recompute settings: each means a setting of the policy, and the run says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.presets import PER_BLOCK, dense_110m, tiny
from megacpp.config.recompute_flags import OLDER
from megacpp.config.schema import KEEP, CheckpointingPolicy
from megacpp.errors import ConfigError


def policy(*flags: str, preset: str = "dense_110m") -> CheckpointingPolicy:
    return parse_run([preset, *flags], 1).config.recompute


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--recompute-moe-experts"], {"eblock": "expert_gemm_only"}),
        (["--recompute_moe_experts=false"], {"eblock": "none"}),
        (["--recompute-m2rnn", "false"], {"rblock": "none"}),
        (["--recompute-mamba-conv"], {"mblock": "conv_bc_only"}),
        (["--no-recompute-mamba-conv"], {"mblock": "none"}),
        (["--recompute-norms", "true"], {"norms": True}),
        (["--recompute-modules=core_attn,mlp"], {"core_attn": True, "mlp": True}),
        (["--recompute-modules", "moe"], {"eblock": "full"}),
        (["--mtp-recompute=false"], {"mtp": False}),
        (["--mhc-recompute-group-size", "-1"], {"mhc_group_size": -1}),
        (["--cpu-offload-checkpointing"], {"offload": "block_inputs"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_is_read_as_its_setting(flags: list[str], expected: dict[str, object]) -> None:
    assert policy(*flags) == CheckpointingPolicy(**expected)  # type: ignore[arg-type]
    resolved = parse_run(["dense_110m", *flags], 1)
    (note,) = resolved.notes
    assert note.startswith(flags[0].split("=")[0]) and "means --recompute." in note
    for key in expected:
        assert resolved.provenance[f"recompute.{key}"] == "command line"


def test_latent_queries() -> None:
    flags = ["--model.attention.kind", "mla", "--model.attention.qk-norm", "false"]
    assert policy("--mla-recompute-q-upproj", *flags, preset="tiny").mla_q_upproj


def test_gradient_checkpointing_is_a_policy_and_a_budget() -> None:
    """By block kind; where blocks are compiled the compiler gets a budget below 1 for it."""
    assert policy("--gradient-checkpointing", "true") == PER_BLOCK
    compiled = policy("--gradient-checkpointing", "--train.compile", "inductor")
    assert compiled == replace(PER_BLOCK, activation_memory_budget=0.5)
    off = policy("--gradient-checkpointing=false", preset="tiny")
    assert off == KEEP and tiny().recompute != KEEP
    kept = policy("--train.compile=aot_eager", "--no-gradient-checkpointing")
    assert kept == replace(KEEP, activation_memory_budget=1.0)


def test_a_derived_budget_is_said_and_a_given_one_is_taken() -> None:
    compiled = ["tiny", "--train.compile", "inductor"]
    found = parse_run(compiled, 1)
    (note,) = found.notes
    assert "keep recompute.activation_memory_budget=0.5" in note and "1 keeps all" in note
    assert found.provenance["recompute.activation_memory_budget"] == "derived"
    for given in (0.25, 1.0):
        found = parse_run([*compiled, "--recompute.activation_memory_budget", f"{given}"], 1)
        assert found.config.recompute.activation_memory_budget == given and not found.notes
    eager = parse_run(["tiny"], 1)
    assert eager.config.recompute.activation_memory_budget < 0 and not eager.notes


def test_spacing_is_the_policy_by_kind_and_the_run_says_so() -> None:
    for spacing in ("1", "2"):
        resolved = parse_run(["dense_110m", "--checkpoint-spacing", spacing], 1)
        assert resolved.config.recompute == PER_BLOCK
        (note,) = resolved.notes
        assert note.startswith(f"--checkpoint-spacing {spacing} means --recompute.")
        assert note.endswith("no policy for one layer in 2") == (spacing == "2")
    assert policy("--checkpoint-spacing=0", preset="tiny") == KEEP
    compiled = policy("--checkpoint_spacing=1", "--train.compile", "inductor")
    assert compiled == replace(PER_BLOCK, activation_memory_budget=0.5)


def test_leaving_expert_blocks_out_is_said_by_name() -> None:
    assert policy("--skip-eblock-checkpointing", preset="tiny") == replace(
        tiny().recompute, eblock="none"
    )
    assert policy("--skip-eblock-checkpointing=false", preset="tiny") == tiny().recompute


def test_a_later_flag_wins_as_always() -> None:
    both = ["--gradient-checkpointing", "--recompute.rblock", "none"]
    assert policy(*both).rblock == "none"
    assert policy(*reversed_pairs(both)).rblock == "full_plus_norms"


def reversed_pairs(flags: list[str]) -> list[str]:
    return [*flags[1:], flags[0]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--recompute-moe-experts", "maybe"], "must be true or false"),
        (["--recompute-modules", "everything"], "must be of core_attn, mlp, moe, norms"),
        (["--recompute-modules"], "needs a value"),
        (["--checkpoint-spacing", "often"], "must be a number of layers, 0 for none"),
        (["--checkpoint-spacing"], "needs a value"),
        (["--mhc-recompute-group-size", "-2"], "must be at least -1"),
        (["--activation-memory-budget", "0.5"], "no block is compiled"),
        (["--recompute.activation-memory-budget", "1.5"], "must be in [-1, 1]"),
        (["--mla-recompute-q-upproj"], "there is no latent"),
        (["--recompute.compress", "1"], "must be in [0, 1)"),
        (["--recompute.mblock", "full"], "must be one of none, conv_bc_only"),
        (["--recompute.offload-host-gib", "0"], "must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(["dense_110m", *flags], 1)
    text = str(caught.value)
    assert words in text and "Fix:" in text and "\n" not in text


def test_the_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OLDER:
        monkeypatch.setenv(name.upper(), "1")
        monkeypatch.setenv(f"MEGACPP_{name.upper()}", "1")
    assert parse_run(["dense_110m"], 1).config.recompute == dense_110m().recompute
