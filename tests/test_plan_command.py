"""`megacpp plan`: what it prints, what machines get, and the mistakes it names."""

from __future__ import annotations

import importlib.util
import json
import shlex
from typing import Any

import pytest

from megacpp.cli.main import main
from megacpp.cli.plan import bar, memory_bytes, mesh_words
from megacpp.config.arguments import flatten, parse_run
from megacpp.config.schema import MeshConfig
from megacpp.errors import ConfigError
from megacpp.memory.planner import REASONS, Score

ASKED = "plan tiny --world 4 --memory 2GiB --tokens-per-step 131072"


def told(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_machines_get_candidates_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, f"{ASKED} --top 5")
    scores = [Score(**one["score"]) for one in found["candidates"]]
    assert len(scores) == 5 and scores == sorted(scores)
    assert found["considered"] == found["fit"] + sum(found["out"].values())
    assert set(found["out"]) == set(REASONS)
    for one in found["candidates"]:
        assert one["estimate"]["point"] <= found["budget_bytes"] < found["memory_bytes"] == 2**31
        knobs = one["knobs"]
        rows = knobs["train.device_batch_size"] * knobs["train.grad_accum"]
        ranks = knobs["mesh.dp_shard"] * knobs["mesh.dp_replicate"]
        assert rows * ranks * found["seq_len"] == found["tokens_per_step"] == 131072
        assert one["flops"]["step"] > one["flops"]["repeated"] >= 0
        assert all(size > 0 for of in one["traffic_bytes"].values() for size in of.values())


def test_a_gpu_by_name_has_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan tiny --world 4 --tokens-per-step 131072 --top 1 --gpu H200"
    assert told(capsys, words)["memory_bytes"] == 141 << 30
    assert told(capsys, f"{words} --memory 8GiB")["memory_bytes"] == 8 << 30


def test_kernels_that_cannot_be_counted_here_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{ASKED} --model.pattern R --model.depth 1 --top 1".split()
    assert main(words) == 0 and "triton" not in capsys.readouterr().out
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else real(name)
    )
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "m2rnn torch (not triton)" in said and "triton isn't installed here" in said


def test_the_command_launches_the_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    """Read as train.py reads it, it is the candidate, knob by knob."""
    words = f"{ASKED} --seq 128 --optim.name adamw --mesh.ep 2 --top 12"
    for one in told(capsys, words)["candidates"]:
        command = shlex.split(one["command"])
        assert command[:4] == ["torchrun", "--standalone", "--nproc-per-node=4", "train.py"]
        config = parse_run(command[4:], 4).config
        settings = flatten(config)
        assert {key: settings[key] for key in one["knobs"]} == one["knobs"]
        assert (config.data.seq_len, config.optim.name, config.mesh.ep) == (128, "adamw", 2)
        assert config.train.tokens_per_step == 131072


def test_values_are_written_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--data.path data/MyCorpus --run.sample-prompt The --mesh.tp 1 --recompute.norms false"
    command = told(capsys, f"{ASKED} --top 1 {given}")["candidates"][0]["command"]
    words = shlex.split(command)
    assert words[words.index("--data.path") + 1] == "data/MyCorpus"
    assert words[words.index("--run.sample-prompt") + 1] == "The"
    assert words[words.index("--recompute.norms") + 1] == "false"


def test_many_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan tiny --world 16 --memory 2GiB --tokens-per-step 16384 --top 1"
    command = told(capsys, words)["candidates"][0]["command"]
    meet = "--rdzv-backend=c10d --rdzv-endpoint=$HOST:29500 --rdzv-id=tiny"
    assert command.startswith(f"torchrun --nnodes=2 --nproc-per-node=8 {meet} train.py tiny ")
    assert main([*words.replace("16384", "12288").replace("16 ", "12 ").split()]) == 0
    out = capsys.readouterr().out
    assert "12 ranks don't fill nodes of 8 (--per-node): 2 nodes of 6" in out
    assert "on each of 2 nodes, with HOST the name of one of them" in out


def test_people_get_a_table_that_needs_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.split(), "--top", "4", "--explain"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out and max(map(len, lines)) <= 100
    rows = [line for line in lines if line[:1].isdigit() and "[" in line]
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(row.count("|") == 1 and "A" in row for row in rows)
    assert "A activations" in out and "P parameters" in out
    assert [line[:12] for line in lines if " before " in line] == [
        f"#{n} before #{n + 1}" for n in (1, 2, 3)
    ]
    at = lines.index("best:")
    command = " ".join(line.removesuffix("\\").strip() for line in lines[at + 1 :])
    parse_run(shlex.split(command)[4:], 4)


def test_the_first_criterion_that_differs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{ASKED} --mesh.ep 1 --recompute.norms true --top 3 --explain".split()) == 0
    out = capsys.readouterr().out
    assert "#1 before #2: a larger device batch (64 rows, not 32 rows)" in out
    assert "#2 before #3: a larger device batch (32 rows, not 16 rows)" in out


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan tiny --world 2 --memory 1MiB --tokens-per-step 1024"
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert "0 fit" in out and "nothing fits; nearest, " in out and "too large" in out
    *progress, error = err.splitlines()  # a slow machine shows progress
    assert error.startswith("error: memory=1.00 MiB: nothing fits: ")
    assert all(line.startswith("plan: ") and line.endswith(" left") for line in progress)
    memory = err.rstrip(".\n").split()[-1]
    assert main(words.replace("1MiB", memory).split()) == 0


def test_a_bar_shows_what_a_device_holds() -> None:
    parts = {"parameters": 30, "activations": 30, "workspace": 15}
    assert bar(parts, 90, 81).plain == "[PPPPPPPPPPAAAAAAAAAAWWWWW..|...]"
    assert bar({"activations": 200}, 90, 90).plain == f"[{'A' * 30}|]"


def test_a_mesh_in_words() -> None:
    assert mesh_words(MeshConfig(tp=2, ep=4, dp_shard=4)) == "tp2 ep4 dp4"
    assert mesh_words(MeshConfig(pp=2, cp=4, dp_replicate=8, dp_shard=1)) == "cp4 pp2 rep8"
    assert mesh_words(MeshConfig(dp_shard=1)) == "one rank"


@pytest.mark.parametrize(
    ("text", "bytes_"),
    (
        ("141GiB", 141 << 30),
        ("141GB", 141 * 10**9),
        ("80", 80 << 30),
        ("1.5 tib", 3 << 39),
        ("512mib", 1 << 29),
    ),
)
def test_memory_as_people_write_it(text: str, bytes_: int) -> None:
    assert memory_bytes(text) == bytes_


@pytest.mark.parametrize("text", ("lots", "-3GiB", "0", "12XB", "GiB", "1e3", ""))
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^memory=.*Fix: write --memory 141GiB\.$"):
        memory_bytes(text)


@pytest.mark.parametrize(
    ("words", "error"),
    (
        ("--memory 1GiB", "world=: is needed: number of devices. Fix: write --world 8."),
        ("--world 0 --memory 1GiB", "world=0: must be at least 1. Fix: use --world 1 or more."),
        ("--world 4", "memory=: of a device is needed. Fix: write --memory 141GiB, or --gpu H200."),
        ("--world 4 --memory much", "memory=much: must be a number"),
        (
            "--world 4 --memory 1GiB",
            "tokens_per_step=0: the preset has none. Fix: write --tokens-per-step 1048576.",
        ),
        (
            "--world 4 --memory 1GiB --tokens-per-step 5000",
            "tokens_per_step=5000: must be a multiple of data.seq_len (256). Fix: use 5120, rows "
            "for all 4 ranks.",
        ),
        (
            "--world 4 --memory 1GiB --tokens-per-step 131072 --mesh.tp 3",
            "mesh.tp=3: it must divide the world (4 ranks). Fix: use --mesh.tp 2.",
        ),
        ("--world 4 --memory 1GiB --top 0", "top=0: must be at least 1."),
        ("--world 4 --memory 1GiB --model.dim 0", "model.dim=0: must be at least 1"),
        ("--world 4 --memory 1GiB --mesh.tq 2", "--mesh.tq: no such setting."),
    ),
)
def test_a_mistake_is_one_line(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {error}") and said.count("\n") == 1


def test_a_preset_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan tinny --world 4 --memory 1GiB".split()) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


def test_the_preset_brings_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "plan dense_110m --world 4 --memory 80 --mesh.tp 1 --top 1")
    assert found["tokens_per_step"] == 262_144
    assert "--train.tokens-per-step" not in found["candidates"][0]["command"]


def test_a_device_named_in_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan tiny --world 2 --memory.device-gib 4 --memory.headroom 0.25 --top 1"
    found = told(capsys, f"{words} --tokens-per-step 1024")
    assert (found["memory_bytes"], found["budget_bytes"]) == (4 << 30, 3 << 30)


def test_a_narrow_screen_cuts_no_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", "moe_small", "--world", "8", "--memory", "80GiB", "--gpu", "H100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[next(n for n, line in enumerate(lines) if line.startswith("# mesh")) :]
    assert rows[1].startswith("1 ") and "\u2026" not in "".join(rows)
