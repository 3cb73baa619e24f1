"""Snapshots of real steps, and the screen of a run that is out of memory."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import parallel.boundary
from checkpointing.tracing.watch import StepWatch
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, MemoryConfig
from megacpp.memory.snapshot import (
    Snapshot,
    as_text,
    file_name,
    most_by_bucket,
    read_snapshot,
    snapshots_of,
)
from megacpp.memory.stream import Stream, StreamBlock
from megacpp.run.failure import report
from megacpp.run.forensics import Forensics, allocator_state
from megacpp.run.oom import oom_screen, out_of_memory
from tests.launch import Done, forked
from tests.test_run import ADAMW, SMALL, records

CPU = torch.device("cpu")
MIB = 1 << 20


class FakeWatch:
    """Recorder of a step with given allocations."""

    def __init__(self, **bytes_by_component: int) -> None:
        self.sizes, self.entered = bytes_by_component, False

    def __enter__(self) -> FakeWatch:
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.entered = False

    def stream(self) -> Stream:
        found = Stream()
        for component, size in self.sizes.items():
            found.allocate(StreamBlock(size, component, "blocks.0"))
        return found

    def rest(self) -> dict[str, int]:
        return {"parameters": self.sizes["parameters"]}


def watched(folder: Path, watch: FakeWatch, rank: int = 0, **memory: int) -> Forensics:
    config = replace(Config(), memory=MemoryConfig(**memory))  # type: ignore[arg-type]
    return Forensics(folder, config, rank, CPU, lambda: watch)


def test_the_default_looks_at_few_steps(tmp_path: Path) -> None:
    found = watched(tmp_path, FakeWatch(parameters=1))
    assert [s + 1 for s in range(2500) if found.due(s)] == [1000, 1100, 2000, 2100]
    never = watched(tmp_path, FakeWatch(parameters=1), snapshot_every=0)
    assert not any(never.due(s) for s in range(2500))
    each = watched(tmp_path, FakeWatch(parameters=1), snapshot_every=1)
    assert [s for s in range(4) if each.due(s)] == [1, 2, 3], "the first makes things that stay"


def test_growth_between_a_snapshot_and_the_next_is_told(tmp_path: Path) -> None:
    watch = FakeWatch(parameters=100 * MIB, moe_routing=10 * MIB)
    run = watched(tmp_path, watch, snapshot_every=4, snapshot_gap=2)
    said = {}
    for step in range(12):
        run.begin(step)
        assert watch.entered == (step + 1 in (4, 6, 8, 10, 12))
        if step == 9:
            watch.sizes["moe_routing"] = 60 * MIB
        said[step + 1] = run.end(step)
    assert [step for step, lines in said.items() if lines] == [10]
    assert "from step 8 to 10 moe_routing/dispatch grew by 50.0 MiB to 60.0 MiB" in said[10][0]
    assert "some expert is hot" in said[10][0] and "Fix: " in said[10][0]
    run.close(lambda table: table, 1)
    growth = json.loads((tmp_path / "memory/summary.json").read_text())["largest_growth"]
    assert growth["bucket"] == "moe_routing/dispatch" and growth["grown_bytes"] == 50 * MIB
    assert growth["steps"] == [4, 12] and growth["cause"] == "dispatch"


def test_other_ranks_keep_their_oldest_and_newest_snapshots(tmp_path: Path) -> None:
    run = watched(tmp_path, FakeWatch(parameters=1), 3, snapshot_every=1, snapshot_gap=0)
    for step in range(9):
        run.begin(step)
        run.end(step)
    assert [s.step for s in snapshots_of(tmp_path / "memory", 3)] == [2, 8, 9]


def test_every_rank_is_in_the_summary(tmp_path: Path) -> None:
    tables = []
    for rank in range(3):
        watch = FakeWatch(parameters=100 * MIB)
        run = watched(tmp_path, watch, rank, snapshot_every=1)
        for step in range(1, 3):
            run.begin(step)
            run.end(step)
            watch.sizes["gradients"] = rank * 10 * MIB
        run.close(lambda table: tables.append(table.clone()) or table, 3)
    total = torch.stack(tables).sum(0)
    watched(tmp_path, FakeWatch(parameters=1)).close(lambda table: table.copy_(total), 3)
    found = json.loads((tmp_path / "memory/summary.json").read_text())
    assert len(found["peak_reserved_bytes"]) == 3 and all(found["peak_resident_bytes"])
    assert found["largest_growth"]["rank"] == 2
    assert found["largest_growth"]["bucket"] == "gradients"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate "
                      "memory: you tried to allocate 99 bytes."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory"), False),
    ],
    ids=["class", "host", "cpu allocator", "shapes", "another class"],
)  # fmt: skip
def test_what_is_out_of_memory(error: Exception, is_one: bool) -> None:
    assert out_of_memory(error) == is_one


def test_torch_still_says_that_there_is_no_memory_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert out_of_memory(caught.value)


def test_the_screen_of_a_run_that_ran_out(tmp_path: Path) -> None:
    estimate = {
        "components": {"parameters": 90 * MIB, "activations": 400 * MIB},
        "point": 490 * MIB,
    }
    (tmp_path / "launch.json").write_text(json.dumps({"memory": {"estimate": estimate}}))
    watch = FakeWatch(parameters=100 * MIB, activations=500 * MIB)
    run = watched(tmp_path, watch, snapshot_every=2, snapshot_gap=1)
    for step in range(1, 3):
        run.begin(step)
        run.end(step)
    run.begin(3)
    watch.sizes["activations"] = 800 * MIB
    shown = oom_screen(MemoryError("no room"), tmp_path, run).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in shown if line.startswith("  ")}
    assert table["parameters"] == ["90.0", "MiB", "100.0", "MiB"]
    assert table["activations"][2:] == ["0.78", "GiB"] and table["all"][2:] == ["0.88", "GiB"]
    assert "grown since the fullest moment of step 3: activations 0.29 GiB" in shown
    assert any(line.startswith("what helps") for line in shown) and len(shown) < 40
    assert any("--" in line for line in shown[shown.index("what helps, cheapest first") :])


def test_nothing_is_known_and_the_screen_says_so(tmp_path: Path) -> None:
    shown = oom_screen(MemoryError(), tmp_path)
    assert "nothing was predicted" in shown and "it failed before there was a model" in shown
    assert "there was no snapshot yet" in shown


def test_one_rank_of_a_machine_shows_its_screen_and_all_write_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert report(MemoryError("no room"), tmp_path) == 1
    shown = capsys.readouterr().err
    assert shown.count("what helps") == 1 and shown.count("MemoryError: no room") == 2
    for rank in range(2):
        assert "what helps" in (tmp_path / f"failures/oom-rank-{rank}.txt").read_text()


def test_a_watch_leaves_nothing_behind() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    watch = StepWatch(model, optimizer)
    parameters = 2 * 4 * (64 + 8)
    assert watch.rest() == {
        "parameters": parameters,
        "optimizer_state": 2 * parameters + 4 * 4,  # moments, and a count of steps each
    }
    with watch:
        step()
    stream = watch.stream()
    by_component = stream.by_component(stream.peak()[0])
    assert by_component["parameters"] == parameters
    assert by_component["gradients"] == parameters
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None, "parameters outlive it and must not hold it"
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


# ---- in a real run ------------------------------------------------------------------------------

FLAGS = [*SMALL, *ADAMW, "--run.eval-rows", "8", "--checkpoint.every", "0", "--run.steps", "5"]


STEADY = ("parameters", "optimizer_state", "activations/A", "activations/F")


def run(corpus: Path, folder: Path, *flags: str) -> Done:
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", "2", "--run.tensorboard", "false"]
    return forked("tiny", *FLAGS, *paths, *batch, *flags)


@pytest.mark.slow
def test_a_followed_step_is_what_the_trace_foretold_and_changes_no_bit(
    corpus: Path, tmp_path: Path
) -> None:
    plain, followed = tmp_path / "plain", tmp_path / "followed"
    assert run(corpus, plain).returncode == 0
    done = run(corpus, followed, "--memory.snapshot-every", "2", "--memory.snapshot-gap", "1")
    assert done.returncode == 0, done.stderr
    assert [r["loss"] for r in records(plain)] == [r["loss"] for r in records(followed)]
    assert not list((plain / "memory").glob("step-*"))
    taken = snapshots_of(followed / "memory")
    assert [s.step for s in taken] == [2, 3, 4, 5]
    flags = [*FLAGS, "--train.device-batch-size", "2"]
    stream = trace_step(parse_run(["tiny", *flags], 1).config, 1)
    foretold = most_by_bucket(stream, "AMERF")
    # Before torch 2.13 a trace has attention's sums in fp32, a step in fp64 (pytorch#185539).
    steady = [n for n in STEADY if n != "activations/A" or torch.__version__ >= "2.13"]
    for one in taken:
        assert sum(one.at_peak.values()) == one.peak_bytes
        # What documents and routers decide is left out: a trace has rows of one document each.
        for name in steady:
            assert one.most[name] == foretold[name], name
    assert (followed / "memory/summary.json").exists()


@pytest.mark.slow
def test_a_run_that_runs_out_of_memory_shows_where_it_went(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_step, calls = parallel.boundary.AccumulationBoundary.check_step, []

    def fourth_fails(self: object, *arguments: object) -> object:
        calls.append(0)
        if len(calls) == 4:
            torch.empty(1 << 58, dtype=torch.uint8)
        return check_step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(parallel.boundary.AccumulationBoundary, "check_step", fourth_fails)
    folder = tmp_path / "run"
    done = run(corpus, folder, "--memory.snapshot-every", "2", "--memory.snapshot-gap", "1")
    assert done.returncode == 1
    screen = (folder / "failures/oom-rank-0.txt").read_text()
    assert screen.strip() in done.stderr
    assert "error: rank 0: RuntimeError: [enforce fail" in done.stderr
    assert "DefaultCPUAllocator: can't allocate" in screen
    live = {line.split()[0] for line in screen.splitlines() if line.startswith("  ")}
    assert {"parameters", "gradients", "optimizer_state", "all"} <= live
    assert "grown since the fullest moment of step 3: " in screen
    assert "grown from step 2 to 3: " in screen
    assert read_snapshot(folder / "memory" / file_name(3)).followed


def test_a_snapshot_of_what_only_rests(tmp_path: Path) -> None:
    """Compiled blocks hide what they allocate."""
    watch = FakeWatch(parameters=7, activations=9)
    config = parse_run(["tiny", "--train.compile", "aot_eager"], 1).config
    config = replace(config, memory=MemoryConfig(snapshot_every=2))
    found = Forensics(tmp_path, config, 0, CPU, lambda: watch)
    found.begin(1)
    assert not watch.entered
    found.end(1)
    one = read_snapshot(tmp_path / "memory/step-2.json")
    assert not one.followed and one.most == {"parameters": 7}
    assert as_text(one) == as_text(Snapshot(**vars(one)))


def test_what_the_allocator_of_a_gpu_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names that torch.cuda.memory_stats gives them."""
    stats = {
        "allocated_bytes.all.peak": 70,
        "allocated_bytes.all.current": 40,
        "reserved_bytes.all.peak": 100,
        "inactive_split_bytes.all.current": 9,
        "active_bytes.large_pool.current": 38,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    found = Snapshot(1, **allocator_state(torch.device("cuda"), resting=30))
    assert found.overhead_bytes == 30 and found.loose_bytes == 10 and found.split_bytes == 9
    assert (found.retries, found.ooms, found.pools["large active"]) == (2, 1, 38)
    assert found.buckets() == {"allocator_overhead": 30, "loose": 10}
    assert allocator_state(CPU, resting=30) == {}


def test_an_error_is_blamed_on_no_bucket_that_rests(tmp_path: Path) -> None:
    """Weights and optimizer state are there before a step: what grew in it is smaller here."""
    watch = FakeWatch(parameters=100 * MIB, optimizer_state=90 * MIB, workspace=2 * MIB)
    run = watched(tmp_path, watch, snapshot_every=5)
    run.begin(4)
    run.at_error()
    error = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())["error"]
    assert (error["largest_bucket"], error["largest_bucket_bytes"]) == ("workspace", 2 * MIB)


def test_an_error_on_a_gpu_leaves_the_allocators_own_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"reserved_bytes.all.peak": 7})
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped.append)
    run = watched(tmp_path, FakeWatch(parameters=100 * MIB))
    run.device = torch.device("cuda")
    run.begin(4)
    run.at_error()
    assert dumped == [str(tmp_path / "memory/error-step-5-rank-0.pickle")]
    written = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())
    assert written["peak_reserved_bytes"] == [7] and written["error"]["step"] == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_every_figure() -> None:
    device = torch.device("cuda")
    kept = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    found = Snapshot(1, **allocator_state(device, resting=0))
    assert found.loose_bytes >= kept.nbytes and found.reserved_bytes >= found.allocated_bytes > 0
    assert set(allocator_state(device, 0)["pools"]) >= {"large active", "small reserved"}


def test_the_screen_of_a_gpu_tells_what_the_allocator_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched(tmp_path, FakeWatch(parameters=100 * MIB))
    run.device = torch.device("cuda")
    monkeypatch.setattr("megacpp.run.oom.compute_dtype", lambda precision, device: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * MIB, 4096 * MIB))
    stats = {"reserved_bytes.all.peak": 350 * MIB, "inactive_split_bytes.all.current": 40 * MIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    shown = oom_screen(error, tmp_path, run)
    rows = {" ".join(line.split()) for line in shown.splitlines()}
    assert {"parameters 100.0 MiB", "not told apart 0.20 GiB", "all 0.29 GiB"} <= rows
    assert "device 4.00 GiB, free 5.0 MiB; allocator: reserved 0.34 GiB" in shown
    assert "in blocks partly used 40.0 MiB, 0 retries" in shown
