"""`megacpp explain`: layouts from the plan and from DTensor agree, and drawings add up to a step.

Fake process groups: one process sees any rank of any mesh.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest

from megacpp.blocks.features import FEATURES
from megacpp.cli.dry_run import dependencies
from megacpp.cli.explain import plan_rows
from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.config.presets import preset
from megacpp.config.schema import MeshConfig
from megacpp.torch_extras import is_dtensor
from parallel.plans import row_of
from parallel.simulate.drawing import BACKWARD, FORWARD, STEP, draw, gathers_again
from parallel.simulate.dry_run import dry_run
from parallel.simulate.explain import OUTSIDE, brackets, explain
from parallel.simulate.fake import fake_world, planned_model
from tests.checkpointing.fp8_cases import changed
from tests.parallel.parity import Run
from tests.parallel.test_dry_run import config_for

TP = MeshConfig(dp_shard=2, tp=2)
ALL = MeshConfig(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, reshard="always")
RUNS = [
    Run("plain", TP),
    Run("plain", dataclasses.replace(TP, ep=4)),
    Run("options", MeshConfig(dp_replicate=2, dp_shard=2), dtype="fp32"),
    Run("plain", ALL, dtype="fp32"),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layouts_are_those_of_the_plan(run: Run) -> None:
    """tp and ep where the rows of the table say; some data axis on every parameter."""
    config = config_for(run)
    with fake_world(config, run.world) as world:
        model = planned_model(config, world)
        for name, p in model.named_parameters():
            array = row_of(model, name)
            assert is_dtensor(p)
            names = p.device_mesh.mesh_dim_names or ()
            for axis in ("tp", "ep"):
                if axis in names:
                    assert p.placements[names.index(axis)] == array.placement(axis), name
            text = brackets(p, array.dims)
            data = any(world.degree(axis) > 1 and axis in text for axis in ("fsdp", "efsdp"))
            assert data or "ep" in names, f"{name} {text}"
            cut = [axis for dim in text.strip("[]").split(", ") for axis in dim.split("_")[1:]]
            axes = [axis for axis in "·".join(cut).split("·") if axis]
            assert len(axes) == len(set(axes)), "an axis cuts once"


def test_brackets_name_all_axes() -> None:
    found = {line.name: line for line in explain(config_for(RUNS[-1]), 16, 7).parameters}
    expected = {
        "embed.weight": "[V_tp·fsdp, D]",
        "blocks.0.mixer.wo.weight": "[D_fsdp, Q_tp]",
        "blocks.1.mixer.in_B.weight": "[S_fsdp, D]",
        "blocks.2.mixer.experts.w2": "[E_ep, D_efsdp, I]",
        "blocks.2.mixer.router.weight": "[E_fsdp, D]",
        "blocks.3.mixer.state_weight": "[H_tp·fsdp, P, P]",
    }
    assert {name: found[name].brackets for name in expected} == expected
    w = found["embed.weight"]  # 48 words over tp 2, then over dp_shard 2 x cp 2
    assert (w.shape, w.local_shape, w.bytes) == ((48, 16), (6, 16), 6 * 16 * 4)
    assert w.letter == OUTSIDE and found["blocks.3.mixer.D"].letter == "R"


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_all_ranks_hold_the_model(run: Run) -> None:
    found = explain(config_for(run), run.world)
    assert found.all_ranks == found.model_bytes
    assert all(math.prod(line.local_shape) <= math.prod(line.shape) for line in found.parameters)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_drawings_add_up_to_a_step(run: Run) -> None:
    """A step of one microbatch is what its blocks draw, and what is drawn of no block.

    The rest are embedding, head and root, on the axes of the parameters, and sums of the host's.
    """
    config = config_for(run)
    with fake_world(config, run.world) as world:
        again = gathers_again(planned_model(config, world), config)
    drawn = draw(config, run.world, 0, again)
    sent: Counter[tuple[str, str, str]] = Counter()
    for key, value in dry_run(config, run.world, 0, dependencies()).traffic.items():
        sent[key.axis, key.kind, "count"] += value.count
        sent[key.axis, key.kind, "bytes"] += value.bytes
    blocks: Counter[tuple[str, str, str]] = Counter()
    for letter in config.model.pattern:
        for move in drawn[letter]:
            blocks[move.axis, move.kind, "count"] += 1
            blocks[move.axis, move.kind, "bytes"] += move.bytes
    rest = {key: n - blocks[key] for key, n in sent.items() if n != blocks[key]}
    assert not blocks.keys() - sent.keys() and all(n > 0 for n in rest.values())
    item = 8 if run.dtype == "fp64" else 4
    m = config.model
    mesh = run.mesh
    shards = mesh.dp_shard * mesh.cp
    T = config.data.seq_len // mesh.cp
    U = config.train.device_batch_size * T * m.dim * item  # the residual stream of this context
    vocabulary = m.vocab_size // mesh.tp * m.dim * item
    assert rest["fsdp", "reduce_scatter", "count"] == 3, "embedding, head, root"
    # the root's parameters, which are padded to whole shards, are what more there is
    root = rest["fsdp", "reduce_scatter", "bytes"] - 2 * vocabulary
    assert root > 0 and root % (shards * item) == 0
    assert rest["fsdp", "all_gather", "bytes"] == 2 * vocabulary + root
    if mesh.tp > 1:
        # out of the embedding and, backward, into it; into the head and, backward, out of it
        assert rest["tp", "reduce_scatter", "bytes"] == 2 * U
        assert rest["tp", "reduce_scatter", "count"] == 2
        heads = rest["tp", "all_gather", "bytes"] - 2 * U
        chunks = rest["tp", "all_gather", "count"] - 2
        assert chunks >= 1 and heads == 3 * config.train.device_batch_size * T * mesh.tp * item
        assert rest["tp", "all_reduce", "count"] == 1, "gradients that tp leaves whole"
    others = {axis for axis, _, _ in rest}
    assert others <= {"fsdp", "tp", "dp_replicate", "batch", "loss", "world"}


def test_doors_are_drawn_in_order() -> None:
    drawn = draw(config_for(RUNS[0]), 4, 0, again=True)

    def pictures(letter: str, axis: str) -> list[tuple[str, str]]:
        return [(d.phase, d.picture) for d in drawn[letter] if d.axis == axis]

    assert (
        pictures("A", "tp")
        == pictures("F", "tp")
        == pictures("M", "tp")
        == [
            (FORWARD, "x[B, T_tp, D] -> x[B, T, D]"),
            (FORWARD, "y[B, T, D]{tp} -> y[B, T_tp, D]"),
            (BACKWARD, "dy[B, T_tp, D] -> dy[B, T, D]"),
            (BACKWARD, "dx[B, T, D]{tp} -> dx[B, T_tp, D]"),
        ]
    )
    assert pictures("A", "fsdp") == [
        (FORWARD, "block[N_fsdp] -> [N]"),
        (BACKWARD, "block[N_fsdp] -> [N]"),
        (STEP, "d block[N]{fsdp} -> [N_fsdp]"),
    ]
    kinds = [d.kind for d in drawn["F"] if d.axis == "tp"]
    assert kinds == ["all_gather", "reduce_scatter"] * 2


def test_experts_are_drawn() -> None:
    drawn = draw(config_for(RUNS[-1]), 16, 0, again=True)["E"]

    def words(phase: str) -> list[str]:
        chosen = [d for d in drawn if d.axis == "ep" and d.phase == phase]
        return [d.picture.partition("[")[0].strip() for d in chosen]

    assert words(FORWARD) == ["counts", "dispatch", "weights and ids", "combine"]
    assert words(BACKWARD) == ["d combine", "d weights", "d dispatch"]
    assert any(d.picture == "x[T_cp·tp, D] -> x[T_cp, D]" for d in drawn), "the shared expert"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "nam56r_base", "--world", "64", "--mesh.tp", "2", "--mesh.ep", "8"]
    words += ["--mesh.cp", "2", "--model.depth", "12", "--data.seq-len", "64"]
    words += ["--train.tokens-per-step", "0"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines()), max(out.splitlines(), key=len)
    for part in (
        "[E_ep, I_efsdp, D]",
        "x[B, T_cp·tp, D] -> x[B, T_cp, D]",
        "dispatch [",
        ": equal",
    ):
        assert part in out
    assert "blocks.2.mixer" in out and "blocks.4.mixer" not in out
    assert main([*words, "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_of_all_ranks"] == found["bytes_of_the_model"]
    assert set(found["collectives"]) == set("AEMR")
    assert sum(p["bytes"] for p in found["parameters"]) == found["bytes_here"]


FP8 = (
    "--precision.dtype bf16 --precision.fp8 torchao --recompute.fp8-wrapper torchao "
    "--train.grad-accum 1 --model.pattern AFE --model.depth 6"
)
GATHERED = (
    f"{FP8} --precision.fp8-recipe tensorwise --precision.fp8-local-scales true "
    "--precision.fp8-all-gather true --mesh.reshard always"
)


def test_what_is_in_fp8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 2 and 3, E and A: of these kinds one block in FP8 and one that isn't."""
    monkeypatch.setenv("COLUMNS", "160")  # a line for each parameter
    assert main(["explain", "tiny", *FP8.split(), "--world", "2"]) == 0
    out = capsys.readouterr().out
    assert "FP8: layers 2-3 of 6 (torchao, rowwise_with_gw_hp)\n" in out
    marked = {line.split()[0] for line in out.splitlines() if " FP8 " in line and "mixer" in line}
    expected = {f"blocks.2.mixer.shared.w{i}.weight" for i in (1, 2, 3)}
    expected |= {f"blocks.2.mixer.experts.w{i}" for i in (1, 2, 3)}
    assert marked == expected | {f"blocks.3.mixer.w{x}.weight" for x in "qkvo"}
    assert "blocks.0.mixer.wq" in out and "blocks.5.mixer.router" in out
    assert "attention, 2 here, 1 in FP8" in out and "dense, 2 here\n" not in out
    assert "dense, 2 here " in out, "no F block"
    assert main(["explain", "tiny", "--world", "2"]) == 0
    assert "FP8" not in capsys.readouterr().out


def test_gathers_in_fp8_add_up_to_a_step() -> None:
    """Of two blocks that travel in FP8 and four that don't, each there and back."""
    size = 4
    config = parse_run(["tiny", *GATHERED.split(), "--mesh.dp_replicate", "2"], size).config
    drawn = draw(config, size, 0, again=True)
    wide = draw(changed(config, precision={"fp8_all_gather": False}), size, 0, again=True)
    expected: Counter[tuple[str, str]] = Counter()
    for layer, letter in enumerate("AFEAFE"):
        for move in (drawn if layer in (2, 3) else wide)[letter]:
            expected[move.axis, move.kind] += move.bytes
    found: Counter[tuple[str, str]] = Counter()
    for key, value in dry_run(config, size, 0, dependencies()).traffic.items():
        found[key.axis, key.kind] += value.bytes
    assert found["fsdp", "all_reduce"] == expected["fsdp", "all_reduce"] == 2 * 4 * (3 + 4)
    bf16 = 2 * 2 * config.model.vocab_size * config.model.dim  # embedding and head
    root = found["fsdp", "all_gather"] - expected["fsdp", "all_gather"] - bf16
    fp32 = found["fsdp", "reduce_scatter"] - expected["fsdp", "reduce_scatter"] - 2 * bf16
    assert root == fp32 > 0, "what the root gathers, it reduces"


def test_one_rank_moves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tiny", "--model.depth", "2"]) == 0
    out = capsys.readouterr().out
    assert "nothing moves" in out and "[Q, D]" in out and ": equal" in " ".join(out.split())


def test_the_plan_has_the_rows_of_a_models_features_alone() -> None:
    plain, full = (
        {(row["table"], row["name"]) for row in plan_rows(preset(name))}
        for name in ("tiny", "tiny_full")
    )
    for feature in FEATURES.values():
        assert not any(name.startswith(feature.below) for _, name in plain)
        own = {("parameter", feature.below + n) for row in feature.parameters for n in row.names}
        assert own <= full
    assert ("enters", "top") in full - plain and ("leaves", "blocks.*.engram.conv") in full - plain
    assert ("parameter", "embed.weight") in plain & full
