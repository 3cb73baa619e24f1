"""What records add to a margin, and how they are found and kept; records are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.calibration import (
    Margin,
    Record,
    Situation,
    compared,
    margin,
    read_records,
    situation,
    write_record,
)

GIB = 1 << 30
HERE = Situation("key8", "family", 8, {"seq_len": 4096})
VERSIONS = {"torch": "2.13.0", "megacpp": "0.1.0"}


def record(measured: float, predicted: float = 100 * GIB, rows: int = 8, **other: object) -> Record:
    given = {"key": f"key{rows}", "family": "family", **other}
    return Record(
        rows=rows,
        predicted_bytes=int(predicted),
        measured_bytes=int(measured),
        components={},
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("percent", [-5, -1, 0, 3, 5])
def test_within_five_percent_an_estimate_is_trusted(percent: int) -> None:
    found = margin(100 * GIB, HERE, [record((100 + percent) * GIB)])
    assert found.trusted and found.extra_bytes == 0 and found.source == "record"
    assert found.residual == percent / 100
    assert "the estimate is trusted" in found.line()


def test_a_miss_widens_the_margin_by_exactly_that_much() -> None:
    found = margin(100 * GIB, HERE, [record(112 * GIB)])
    assert found.extra_bytes == 12 * GIB and not found.trusted and found.residual == 0.12
    assert "12.0% more than estimated" in found.line() and "12.0 GiB more stay free" in found.line()


@pytest.mark.parametrize("measured", [94.9, 60, 1])
def test_an_estimate_that_was_too_large_takes_nothing_off_the_headroom(measured: float) -> None:
    found = margin(100 * GIB, HERE, [record(measured * GIB)])
    assert found.extra_bytes == 0 and not found.trusted
    assert "headroom stays as it is" in found.line()


def test_a_better_estimate_makes_up_for_its_old_record() -> None:
    """The record says what was measured; what was predicted then doesn't matter any more."""
    found = margin(111 * GIB, HERE, [record(112 * GIB)])
    assert found.trusted and found.extra_bytes == 0


def test_trust_needs_every_bucket_that_was_measured() -> None:
    """Two misses that cancel in the sum: the estimate isn't believed, and both are named."""
    parts = {
        "activations": {"predicted": 50 * GIB, "measured": 53 * GIB},
        "optimizer_state": {"predicted": 40 * GIB, "measured": 37 * GIB},
        "batch": {"predicted": 1000, "measured": 3000},  # too little to matter
        "tensors_of_a_step": {"predicted": GIB, "measured": 9 * GIB},  # has its parts beside it
        "runtime_reserved": {"predicted": GIB, "measured": None},
    }
    old = replace(record(101 * GIB), components=parts)
    found = margin(100 * GIB, HERE, [old])
    assert found.residual == 0.01 and not found.trusted and found.extra_bytes == GIB
    assert found.off == (("activations", 3 * GIB), ("optimizer_state", -3 * GIB))
    assert "activations +3.0 GiB" in found.line()
    now = {"activations": 53 * GIB, "optimizer_state": 37 * GIB}
    assert margin(100 * GIB, HERE, [old], now).trusted, "a better estimate of each"
    lump = {"activations": {"predicted": 5, "measured": None}}
    lump["tensors_of_a_step"] = parts["tensors_of_a_step"]
    found = margin(100 * GIB, HERE, [replace(old, components=lump)])
    assert found.off == (("tensors_of_a_step", 8 * GIB),)


def test_the_newest_record_of_a_launch_counts() -> None:
    old, new = record(130 * GIB, written=1.0), record(108 * GIB, written=2.0)
    for records in ([old, new], [new, old]):
        assert margin(100 * GIB, HERE, records).extra_bytes == 8 * GIB


def test_other_batches_inform_and_other_launches_do_not() -> None:
    """8 rows were missed by 12 GiB of 100; for 4 rows both explanations are taken, the worse."""
    four = replace(HERE, key="key4", rows=4)
    found = margin(50 * GIB, four, [record(112 * GIB)])
    assert found.source == "neighbour" and found.rows == 8
    assert found.extra_bytes == 12 * GIB, "bytes that don't shrink with the batch"
    assert "one of 8 rows a device" in found.line()
    sixteen = replace(HERE, key="key16", rows=16)
    assert margin(200 * GIB, sixteen, [record(112 * GIB)]).extra_bytes == 24 * GIB, "a part of it"
    stranger = record(112 * GIB, family="other")
    assert margin(50 * GIB, four, [stranger]) == Margin()
    assert "no launch of this kind" in Margin().line()


def test_the_nearest_batch_counts_and_of_two_as_near_the_worse() -> None:
    two = replace(HERE, key="key2", rows=2)
    near, far = record(51 * GIB, 50 * GIB, rows=4), record(150 * GIB, rows=8)
    assert margin(25 * GIB, two, [far, near]).rows == 4
    assert margin(25 * GIB, two, [near]).trusted, "1 GiB of 25 is within 5 %"
    one, four = record(16 * GIB, 12 * GIB, rows=1), record(53 * GIB, 50 * GIB, rows=4)
    for records in ([one, four], [four, one]):
        assert margin(25 * GIB, two, records).rows == 1


def resolved(*flags: str, world: int = 8) -> Config:
    return parse_run(["nam56r_base", *flags], world).config


LOCAL = ("--precision.fp8-local-scales", "true")


def key(config: Config, device: str = "NVIDIA H200", size: int = 8, **versions: str) -> Situation:
    return situation(config, size, device, VERSIONS | versions)


@pytest.mark.parametrize(
    "flags",
    [
        "--mesh.tp 2",
        "--mesh.ep 4",
        "--mesh.reshard never",
        "--model.depth 13",
        "--data.seq-len 8192",
        "--recompute.ablock full",
        "--optim.adamw-state 8bit",
        "--optim.name adamw --optim.qk-clip 0",
        "--precision.dtype fp32",
        "--train.gradient-sync each",
        "--kernels.attention reference",
        "--kernels.mamba3 reference",
        "--precision.fp8 torchao",
        "--optim.adamw-layers wo",
        "--memory.expandable-segments false",
    ],
)
def test_what_memory_depends_on_makes_another_launch(flags: str) -> None:
    plain, other = key(resolved()), key(resolved(*flags.split()))
    assert plain.key != other.key and plain.family != other.family


def test_what_memory_does_not_depend_on_makes_none() -> None:
    plain = key(resolved())
    same = "--run.steps 7 --run.dir elsewhere --optim.lr 1e-4 --memory.headroom 0.2 --run.seed 1"
    assert key(resolved(*same.split())) == plain
    for other in (
        key(resolved(), device="NVIDIA H100"),
        key(resolved(world=16), size=16),
        key(resolved(), torch="2.14.0"),
        key(resolved(), triton="3.8.0"),
        key(resolved(), **{"cuda driver": "575.1"}),
        situation(resolved(), 8, "NVIDIA H200", VERSIONS, "PYTORCH_ALLOC_CONF=backend:x"),
    ):
        assert other.family != plain.family
    eight = ["--precision.fp8", "torchao"]
    layers = key(resolved(*eight)), key(resolved(*eight, "--precision.fp8-layers", "A"))
    recipe = key(resolved(*eight, "--precision.fp8-recipe", "tensorwise", *LOCAL))
    gather = [*eight, "--precision.fp8-recipe", "tensorwise", *LOCAL, "--precision.fp8-all-gather"]
    assert len({found.family for found in (*layers, recipe, key(resolved(*gather)))}) == 4


def test_batches_are_neighbours() -> None:
    two = key(resolved())
    four = key(resolved("--train.device-batch-size", "4"))
    assert two.family == four.family and two.key != four.key
    assert (two.rows, four.rows) == (2, 4)
    staged = "--mesh.pp 2 --train.device-batch-size 8".split()
    whole, cut = (key(resolved(*staged, *n.split())) for n in ("", "--train.num-chunks 4"))
    assert whole.family == cut.family and whole.key != cut.key
    assert (whole.rows, cut.rows) == (8, 2)


def test_records_are_kept_whole_and_bad_ones_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "calibration"
    assert read_records(folder) == ([], ())
    both = compared(
        {"parameters": 4}, {"parameters": 5, "workspace": None}, ["parameters", "batch"]
    )
    assert both == {
        "parameters": {"predicted": 4, "measured": 5},
        "batch": {"predicted": 0, "measured": None},
    }
    kept = replace(record(112 * GIB), components=both)
    write_record(folder, replace(kept, measured_bytes=1), HERE)
    path = write_record(folder, kept, HERE, ranks=8)
    assert path == folder / "key8.json" and [p.name for p in folder.iterdir()] == ["key8.json"]
    content = json.loads(path.read_text())
    assert content["residual"] == 0.12 and content["about"] == HERE.about and content["ranks"] == 8
    for name, text in (
        ("torn", path.read_text()[:50]),
        ("list", "[]"),
        ("words", json.dumps(content | {"measured_bytes": "many"})),
        ("rows", json.dumps(content | {"rows": 0})),
        ("few", json.dumps({"key": "k"})),
    ):
        (folder / f"{name}.json").write_text(text)
    found, bad = read_records(folder)
    assert found == [kept]
    assert bad == ("few.json", "list.json", "rows.json", "torn.json", "words.json")
    line = replace(margin(100 * GIB, HERE, found), unreadable=bad).line()
    assert "unreadable and left out: few.json" in line
