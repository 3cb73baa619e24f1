"""From words on the command line to a resolved configuration, and where each value came from."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import resource
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megacpp.blocks.attention.config import YarnConfig
from megacpp.cli.main import COMMANDS
from megacpp.config.arguments import (
    flatten,
    leaf_types,
    parse_args,
    parse_run,
    read_flags,
    read_value,
    replace_keys,
    split_args,
    take_value,
)
from megacpp.config.checks.every import lookup
from megacpp.config.help import command_help, run_help
from megacpp.config.presets import PRESETS, preset, tiny
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, setting, settings_of
from megacpp.errors import EXIT_CODES, ConfigError, MegacppError

ROOT = Path(__file__).parents[1]


def run(words: str, world_size: int = 1) -> Config:
    return parse_run(words.split(), world_size).config


# ---- every form of a flag -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--run.steps 7", "run.steps", 7),
        ("--run.steps=7", "run.steps", 7),
        ("--run.steps 1_000", "run.steps", 1000),
        ("--run.steps 5 --run.steps 7", "run.steps", 7),
        ("--optim.lr 1e-4", "optim.lr", 1e-4),
        ("--optim.lr=.5", "optim.lr", 0.5),
        ("--optim.lr 1", "optim.lr", 1.0),
        ("--train.device-batch-size 2", "train.device_batch_size", 2),
        ("--train.device_batch_size 2", "train.device_batch_size", 2),
        ("--mesh.dp-shard -1", "mesh.dp_shard", 1),  # -1 is a value, and fills the world
        ("--optim.name adamw", "optim.name", "adamw"),
        ("--run.tensorboard", "run.tensorboard", True),
        ("--run.no-tensorboard", "run.tensorboard", False),
        ("--run.tensorboard false", "run.tensorboard", False),
        ("--run.tensorboard=no", "run.tensorboard", False),
        ("--run.no-tensorboard --run.tensorboard", "run.tensorboard", True),
        ("--model.tie-embeddings --run.steps 3", "model.tie_embeddings", True),
        ("--model.logit-softcap 30", "model.logit_softcap", 30.0),
        ("--model.logit-softcap none", "model.logit_softcap", None),
        ("--model.m2rnn.gradient-clip None", "model.m2rnn.gradient_clip", None),
        ("--run.sample-prompt=--x=y", "run.sample_prompt", "--x=y"),
        ("--run.sample-prompt=", "run.sample_prompt", ""),
        ("--run.dir /tmp/x", "run.dir", "/tmp/x"),
    ],
)
def test_forms_of_a_flag(words: str, key: str, value: object) -> None:
    found = lookup(run(words), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("key", sorted(leaf_types(Config)))
def test_every_setting_can_be_given_and_reads_back(key: str) -> None:
    """Write each default as text and read the same value again."""
    full = replace_keys(Config(), {"model.attention.yarn.factor": 40.0})
    value, flag = lookup(full, key), f"--{key.replace('_', '-')}"
    assert list(read_flags([f"{flag}={value}"])) == [(key, value)]
    if value != "":
        assert list(read_flags([flag, str(value)])) == [(key, value)]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (int, "1.5", "whole number"),
        (int, "1e3", "whole number"),
        (int, "", "whole number"),
        (float, "1,5", "a finite number"),
        (bool, "2", "true or false"),
        (float | None, "nil", "a finite number"),
        (Literal["left", "right"], "lefr", "must be one of left, right. Fix: did you mean 'left'"),
        (Literal["left", "right"], "", "must be one of left, right. Fix: use one of these"),
    ],
)
def test_unreadable_values(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value("a.b", kind, text)
    assert str(caught.value).startswith(f"a.b={text}: ") and words in str(caught.value)


# ---- suggestions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("--run.step 5", "did you mean '--run.steps'"),
        ("--steps 5", "did you mean '--run.steps'"),
        ("--train.seq-len 5", "did you mean '--data.seq-len'"),
        ("--optim.learning-rate 1", "see train.py --help optim"),
        ("--train.batch-size 1", "did you mean '--train.device-batch-size'"),
        ("--precision.fp8-layer A", "did you mean '--precision.fp8-layers'"),
        ("--mesh.size 2", "see train.py --help mesh"),
        ("--kernels.moe torch", "Fix: of kernels, use one of attention, cross-entropy, experts,"),
        ("--model.attention.num-head 2", "did you mean '--model.attention.num-heads'"),
        ("--model.moe.topk 2", "did you mean '--model.moe.top-k'"),
        ("--optim.no-lr", "did you mean '--optim.lr'"),
        ("--zzzzzzzz 1", "see train.py --help"),
    ],
)
def test_unknown_flags_suggest(words: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=r"no such setting\. Fix: ") as caught:
        run(words)
    assert suggestion in str(caught.value)


def test_a_slip_of_the_finger_is_told_which_setting_is_meant() -> None:
    """Leave out, change, add or swap a letter: 95 of 100 errors name the right setting."""
    draw, told, keys = random.Random(0), [], {*flatten(run("tiny"))}
    for key in sorted(key for key in keys if "." in key):
        section, _, name = key.rpartition(".")
        at, letter = draw.randrange(len(name)), draw.choice(string.ascii_lowercase)
        swapped = name[at + 1 : at + 2] + name[at] + name[at + 2 :]
        changed = (name[at + 1 :], swapped, letter + name[at + 1 :], letter + name[at:])
        slip = f"{section}.{name[:at]}{draw.choice(changed)}"
        if slip not in keys and not slip.endswith("."):
            with pytest.raises(ConfigError, match=r"no such setting\. Fix: ") as caught:
                run(f"--{slip} 1")
            told.append(f"did you mean '--{key.replace('_', '-')}'" in str(caught.value))
    assert len(told) > 200 and sum(told) >= 0.95 * len(told)


def test_a_value_far_from_all_others_is_not_taken_for_one() -> None:
    with pytest.raises(ConfigError, match=r"fp8: must be one of auto, .*\. Fix: use one of these"):
        run("--precision.dtype fp8")


@pytest.mark.parametrize(("name", "meant"), [("tyni", "tiny"), ("nam56", "nam56r")])
def test_unknown_presets_suggest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        run(name)


def test_an_unknown_preset_without_neighbours_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        run("qqqq")
    assert all(name in str(caught.value) for name in PRESETS)


# ---- provenance ---------------------------------------------------------------------------------


def test_every_value_has_a_source() -> None:
    resolved = parse_run("nam56r_base --run.steps 5 --mesh.dp-replicate 2".split(), world_size=8)
    source = resolved.provenance
    assert source.keys() == flatten(resolved.config).keys()
    assert source["run.steps"] == source["mesh.dp_replicate"] == "command line"
    assert source["model.dim"] == source["model.moe.activation"] == "preset"
    assert source["model.norm_eps"] == source["optim.beta1"] == "default"
    for key in ("train.grad_accum", "mesh.dp_shard", "run.dir"):
        assert source[key] == "derived", key
    assert resolved.config.mesh.dp_shard == 4 and resolved.config.run.dir == "runs/nam56r_base"


def test_a_given_value_counts_as_given_even_if_it_is_the_default() -> None:
    source = parse_run(["tiny", "--optim.beta1", "0.9"], 1).provenance
    assert source["optim.beta1"] == "command line"


def test_accumulation_is_derived_from_either_end() -> None:
    words = "tiny --train.device-batch-size 2 --data.seq-len 16"
    given = parse_run(f"{words} --train.tokens-per-step 256".split(), 2)
    assert given.config.train.grad_accum == 4
    assert given.provenance["train.tokens_per_step"] == "command line"
    assert given.provenance["train.grad_accum"] == "derived"
    other = parse_run(f"{words} --train.grad-accum 4".split(), 2)
    assert other.config.train.tokens_per_step == 256
    assert other.provenance["train.tokens_per_step"] == "derived"


def test_a_yarn_flag_switches_yarn_on() -> None:
    words = "--model.attention.kind mla --model.attention.no-qk-norm"
    assert run(words).model.attention.yarn is None
    config = run(f"{words} --model.attention.yarn.factor 8")
    assert config.model.attention.yarn == YarnConfig(factor=8.0)


def test_the_preset_is_optional_and_nothing_else_changes() -> None:
    assert run("--run.seed 1") == run("tiny --run.seed 1")
    resolved, base = run("tiny"), tiny()
    assert resolved.model == base.model and resolved.optim == base.optim


def test_presets_are_frozen_and_fresh() -> None:
    config = preset("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.steps = 3  # type: ignore[misc]
    assert replace_keys(config, {"run.steps": 3}).run.steps == 3
    assert preset("tiny") == config


# ---- subcommands --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy:
    """What the toy does."""

    path: str = setting(words="Where it is.", positional=True)
    rows: int = setting(2, "Rows of it.", "rows", at_least=1)
    split: Literal["train", "validation"] = setting("validation", "Part of it.")
    limit: float | None = setting(None, "Most of it.", at_least=0)
    verify: bool = setting(False, "Look twice.")


@dataclass(frozen=True)
class Own:
    """Flags beside those of a run."""

    rows: int = setting(2, "Rows of it.")
    verify: bool = setting(False, "Look twice.")


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("here", Toy("here")),
        ("--path here", Toy("here")),
        ("here --rows=5 --verify", Toy("here", rows=5, verify=True)),
        ("here --split train --limit 2", Toy("here", split="train", limit=2.0)),
        ("here --limit none --no-verify", Toy("here")),
    ],
)
def test_arguments_of_a_subcommand(words: str, args: Toy) -> None:
    assert parse_args(Toy, words.split()) == args


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "path=: is needed: where it is. Fix: write PATH."),
        ("--rows 2", "path=: is needed"),
        ("here there", "argument=there: is not a flag"),
        ("here --row 2", "--row: no such setting. Fix: did you mean '--rows'"),
        ("here --rows x", "rows=x: must be a whole number"),
        ("here --split test", "split=test: must be one of train, validation"),
        ("here --rows", "rows=: needs a value"),
        ("here --rows 0", "rows=0: must be at least 1. Fix: use --rows 1 or more"),
        ("here --limit=-1", "limit=-1.0: must be at least 0"),
    ],
)
def test_mistakes_of_a_subcommand_are_one_line(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(Toy, words.split())
    assert str(caught.value).startswith(line) and "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_of_a_subcommand() -> None:
    text = command_help("megacpp toy", "What it does.", settings_of(Toy, top=True))
    assert "usage: megacpp toy PATH [--rows INT]" in text and "What it does." in text
    assert "--rows INT              Rows of it. (rows, at least 1; default 2)" in text
    assert "Where it is. (needed)" in text and "Part of it. (train, validation; default" in text


def test_own_flags_and_those_of_a_run() -> None:
    words = "tiny --rows 3 --mesh.tp 2 --verify here --run.steps=4".split()
    args, rest = split_args(Own, words)
    assert args == Own(rows=3, verify=True)
    assert rest == "tiny --mesh.tp 2 here --run.steps=4".split()


def test_taking_single_values() -> None:
    words = ["a", "--n", "3", "--m=4"]
    assert take_value(words, "--n", "1") == "3" and take_value(words, "--n", "1") == "1"
    assert take_value(words, "--m", "9") == "4"
    assert words == ["a"]
    with pytest.raises(ConfigError, match="--n=: needs a value"):
        take_value(["--n"], "--n", "")


# ---- help ---------------------------------------------------------------------------------------


def test_help_names_every_preset_and_setting() -> None:
    text = run_help("train.py")
    flags = set(re.findall(r"--([a-z][a-z0-9_.-]+)", text))
    settings = {k.replace("_", "-") for k in leaf_types(Config)}
    off = {k for k in flags if ".no-" in k}  # `--run.no-tensorboard`
    # What is listed can be given, YaRN included, which is off unless one of its flags is.
    assert flags - off == settings | {"section.key", "config", "fit", "help"}
    assert all(f"  {name} " in text for name in PRESETS)
    assert all(f"  {code:3}  {words}" in text for code, words in EXIT_CODES.items())


def test_exit_codes_of_errors_are_explained() -> None:
    codes = {cls.exit_code for cls in MegacppError.__subclasses__()}
    assert codes <= set(EXIT_CODES) and set(EXIT_CODES) == {0, 1, 2, 3, 4, 5, 6, 75, 130, 141}


def test_help_of_a_section() -> None:
    text = run_help("train.py", "model.moe")
    flags = set(re.findall(r"^  --([a-z][a-z0-9_.-]+)", text, re.M))
    assert flags and all(flag.startswith("model.moe.") for flag in flags)
    with pytest.raises(ConfigError, match="did you mean 'optim'"):
        run_help("train.py", "optimm")


def all_settings() -> list[Setting]:
    """Settings of a run and flags of every command."""
    commands = (one for command in COMMANDS.values() for one in command.settings().values())
    return [*settings_of(Config).values(), *commands]


@pytest.mark.parametrize("one", all_settings(), ids=lambda one: one.key)
def test_a_setting_has_a_sentence_and_a_number_its_unit_or_range(one: Setting) -> None:
    assert 8 <= len(one.words) <= 100 and len(one.words.split()) >= 3, one.words
    assert one.words[0].isupper() or one.words.split()[0].rstrip(":") in one.choices
    assert one.words.endswith(".")
    numeric = {int, float, int | None, float | None}
    if one.kind in numeric:
        assert one.unit or one.range, f"{one.key}: neither unit nor range"
        if one.range is not None and not one.required and one.default is not None:
            assert one.range.holds(one.default)


@pytest.mark.parametrize("command", ["train.py --help", "-m megacpp --help"])
def test_help_takes_less_than_a_second_and_no_torch(command: str) -> None:
    """Limit help to a second of CPU time; importing torch alone takes longer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and not done.stderr
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert seconds < 1.0
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "megacpp.config.arguments" in imported and not imported & {"torch", "numpy"}


def test_rows_longer_than_the_model_says_are_noted() -> None:
    longer = ["dense_110m", "--data.seq-len", "8192"]
    lower = [*longer, "--model.pattern", "af"]
    assert parse_run(longer, 1).notes == parse_run(lower, 1).notes == (
        "rows have 8,192 tokens, model.attention.max_seq_len=4096: an export, chat and tasks keep "
        "to that, raise it too",
    )  # fmt: skip
    assert parse_run([*longer, "--model.attention.max-seq-len", "8192"], 1).notes == ()
    assert parse_run([*longer, "--model.pattern", "MF"], 1).notes == ()


@pytest.mark.parametrize("letters", ["ae", "FF --model.mtp.depths 1"])
def test_qk_clip_is_for_all_that_attends(letters: str) -> None:
    clipped = "tiny --optim.qk-clip 100 --model.attention.no-qk-norm --model.depth 2"
    assert parse_run(f"{clipped} --model.pattern {letters}".split(), 1).config.optim.qk_clip == 100


def test_replicas_without_shards_are_noted() -> None:
    given = "tiny --mesh.dp-replicate 2 --mesh.cp".split()
    assert parse_run([*given, "2"], 4).notes == ()
    (note,) = parse_run([*given, "1"], 2).notes
    assert "dp_replicate=2 has no shards to copy" in note and "as with mesh.dp_shard=2" in note


def test_a_file_without_a_preset_has_runs_of_its_own(tmp_path: Path) -> None:
    """The folder of tiny's runs isn't theirs, and it is said whose settings fill the gaps."""
    file = tmp_path / "big.toml"
    file.write_text("model.depth = 6")
    found = parse_run(["--config", str(file)], 1)
    assert found.config.run.dir == "runs/big" and found.config.preset == "tiny"
    assert found.notes == (f"{file} names no preset: what it leaves out is that of tiny",)
    named = parse_run(["tiny", "--config", str(file)], 1)
    assert named.config.run.dir == "runs/tiny" and named.notes == ()
    moved = parse_run(["--config", str(file), "--run.dir", "mine"], 1)
    assert moved.config.run.dir == "mine"
    file.write_text('preset = "tiny"\nmodel.depth = 6')
    assert parse_run(["--config", str(file)], 1).config.run.dir == "runs/tiny"
