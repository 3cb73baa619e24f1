"""`megacpp activations`: numbers add up, levers save, mistakes are one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from megacpp.cli.activations import POLICIES, flops, levers_of
from megacpp.cli.main import main
from megacpp.cli.measure import coordinates, measure, microbatches_in_flight
from megacpp.config.arguments import parse_run
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, MeshConfig, ModelConfig
from megacpp.model.flops import block_flops
from parallel.simulate.fake import fake_world

SMALL = ["tiny", "--data.seq-len", "64", "--train.device-batch-size", "2"]
FEW = [*SMALL, "--model.depth", "3", "--model.pattern", "AFE"]


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["activations", *words])
    out, err = capsys.readouterr()
    return code, out, err


def content(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = command(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_numbers_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = content(capsys, *SMALL, "--policy", "selective", "--levers")
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["embed", "A", "E", "M", "R last", "norm", "head"]
    assert {name: part["layers"] for name, part in parts.items()} == {
        **{"embed": 1, "A": 3, "E": 5, "M": 3},
        **{"R last": 1, "norm": 1, "head": 1},
    }
    assert found["bytes"] == sum(part["bytes"] for part in parts.values())
    for part in parts.values():
        assert part["bytes"] == sum(kept["bytes"] for kept in part["kept"])
    plain = found["nothing_recomputed"]
    assert plain["replayed_flops"] == 0 < found["replayed_flops"]
    assert found["forward_flops"] == plain["forward_flops"]
    assert 0 < found["bytes"] < plain["bytes"] <= plain["backward_peak"]
    assert set(found["levers"]) == {
        "ablock=selective",
        "eblock=expert_gemm_only",
        "mblock=conv_bc_only",
        "rblock=recurrence",
        "norms",
        "mlp",
    }
    for name, lever in found["levers"].items():
        assert lever["saved_bytes"] > 0, name
    # The only R layer is the last one: its states are a choice of the kernel, not a region.
    assert found["levers"]["norms"]["replayed_flops"] == 0


def test_forward_flops_are_those_of_the_formula() -> None:
    """Attention, dense and shared experts exactly; rows of experts are padded on a CPU."""
    config = parse_run(FEW, 1).config
    found = measure(config, 1, 0)
    tokens = 2 * 64
    for letter in "AF":
        (part,) = (part for part in found.parts if part.name == letter)
        assert part.forward == tokens * block_flops(letter, config.model, 64)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--world", "8", "--rank", "5", "--mesh.tp", "2", "--mesh.ep", "4"]
    code, out, _ = command(capsys, *words, "--policy", "selective")
    lines = out.splitlines()
    assert code == 0 and "rank 5: dp_shard 2, tp 1, ep 1" in lines
    assert "policy: ablock=selective, eblock=expert_gemm_only" in out
    assert any(line.startswith("A  attention") for line in lines)
    assert any(line.startswith("R  M2RNN, last") for line in lines)
    assert any(line.startswith("saved ") and "of the forward" in line for line in lines)
    assert max(map(len, lines)) <= 100
    end = next(
        i for i, line in enumerate(lines) if line.startswith("embedding") and "made by" in line
    )
    assert max(map(len, lines[4:end])) <= 80


def test_nothing_recomputed_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, *FEW, "--policy", "none", "--all")
    assert code == 0 and "policy: nothing is recomputed" in out
    assert "smaller ones" not in out and "saved" not in out and "unsaved" not in out
    code, every, _ = command(capsys, *FEW, "--policy", "none")
    assert len(every.splitlines()) < len(out.splitlines()) and "smaller ones" in every


def test_a_pipeline_stage_has_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--train.tokens-per-step", "0", "--train.grad-accum", "4", "--world", "4"]
    words += ["--mesh.pp", "2", "--policy", "none"]
    first, last = (content(capsys, *words, "--rank", rank) for rank in ("0", "3"))
    names = [[part["name"] for part in found["parts"]] for found in (first, last)]
    assert names[0][0] == "embed" and "head" not in names[0]
    assert names[1][0] == "received" and names[1][-2:] == ["norm", "head"]
    layers = [sum(p["layers"] for p in found["parts"]) for found in (first, last)]
    assert sum(layers) == 12 + 4  # and embed, received, norm, head
    assert (first["microbatches_in_flight"], last["microbatches_in_flight"]) == (2, 1)
    received = last["parts"][0]["kept"][0]
    assert received["shape"] == [2, 64, 192] and received["bytes"] == 2 * 64 * 192 * 2


@pytest.mark.parametrize("kind", ["block_inputs", "saved_tensors"])
def test_offload_moves_bytes_to_the_host(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that bytes leave the device for the host; with less room there, fewer leave."""
    words = [*FEW, "--recompute.ablock", "full", "--recompute.fblock", "full"]
    stays = content(capsys, *words)
    offload = ["--recompute.offload", kind, "--recompute.offload-min-mib", "0.01"]
    leaves = content(capsys, *words, *offload)
    assert stays["host_bytes"] == 0 < leaves["host_bytes"] == stays["bytes"] - leaves["bytes"]
    x = 2 * 64 * 192 * 2  # of A and F, what each of them gets in bf16
    assert leaves["host_bytes"] == 2 * x
    room = f"{1.5 * x / 2**30:.9f}"
    little = content(capsys, *words, *offload, "--recompute.offload-host-gib", room)
    assert little["host_bytes"] == x and little["bytes"] == stays["bytes"] - x


def test_microbatches_in_flight() -> None:
    words = [*SMALL, "--train.tokens-per-step", "0", "--train.grad-accum", "6", "--mesh.pp", "4"]
    for schedule, expected in (("1f1b", [4, 3, 2, 1]), ("gpipe", [6] * 4), ("zbv", [None] * 4)):
        config = parse_run([*words, "--mesh.pp-schedule", schedule], 4).config
        assert [microbatches_in_flight(config, 4, rank) for rank in range(4)] == expected


def test_coordinates_are_those_of_the_mesh() -> None:
    words = [*SMALL, "--mesh.pp", "2", "--mesh.cp", "2", "--mesh.tp", "2", "--mesh.ep", "4"]
    config = parse_run([*words, "--train.grad-accum", "2"], 16).config
    for rank in (0, 5, 11, 15):
        with fake_world(config, 16, rank) as world:
            expected = {axis: world.coordinate(axis) for axis in world.degrees}
        assert coordinates(config.mesh, 16, rank) == expected
    assert coordinates(MeshConfig(dp_shard=1), 1, 0) == {}


def test_levers_are_what_a_policy_does() -> None:
    def found(policy: CheckpointingPolicy, pattern: str = "AR") -> list[str]:
        model = ModelConfig(pattern=pattern)
        return list(levers_of(Config(model=model, recompute=policy)))

    assert found(POLICIES["none"]) == []
    assert found(KEEP) == ["rblock=recurrence"]
    assert found(KEEP, "AF") == []  # of kinds that are there
    assert found(replace(KEEP, rblock="none", norms=True)) == ["norms"]


def test_flops_are_readable() -> None:
    assert [flops(n) for n in (0, 1, 999, 12_345, 10**15)] == [
        "0",
        "1.0",
        "999.0",
        "12.3 K",
        "1.0 P",
    ]


def test_what_can_not_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, key in (
        (["tiny", "--policy", "fll"], "policy=fll"),
        (["tiny", "--policy", "full", "--recompute.norms"], "policy=full"),
        (["tiny", "--train.compile", "inductor"], "train.compile=inductor"),
        (["nam56r_base", "--world", "8", "--mesh.tp", "3"], "mesh.tp=3"),
        (["tiny", "--world", "4", "--rank", "4"], "rank=4"),
        (["tiny", "--recompute.ablok", "full"], "--recompute.ablok"),
    ):
        code, out, err = command(capsys, *words)
        assert (code, out) == (2, ""), (words, err)
        assert err.startswith(f"error: {key}") and "Fix: " in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["nam52_deep_base", "--data.seq-len", "4096"], 1),
        (["nam56r_base", "--data.seq-len", "16384", "--mesh.tp", "4", "--mesh.cp", "2"], 1024),
    ],
    ids=["nam52_deep_base 4K", "nam56r_base 16K on 1024"],
)
def test_a_deep_model_takes_seconds(words: list[str], size: int) -> None:
    """CPU time, so that a busy machine doesn't fail it."""
    config = parse_run([*words, "--train.tokens-per-step", "0"], size).config
    began = time.process_time()
    found = measure(config, size, size - 1)
    assert sum(part.layers for part in found.parts) == 52 + 3
    assert time.process_time() - began < 60
