"""The traced step against the allocator of real steps on real ranks, which says what is true.

Every case is two steps of real tensors with the profiler on, on as many gloo ranks as the mesh has,
and one step of fake ones for one of these ranks. The bound is a thousandth. What differs is a few
bytes inside of operators (a mask that is summed, a matrix that is turned over), and that the rows
of an expert are padded where the trace has none to pad.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.cli import trace
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.budget import as_run
from megacpp.memory.components import COMPONENTS
from megacpp.memory.estimate import estimate
from tests.memory.allocator_peak import allocator_peak
from tests.ranks import on_worlds
from tests.together import Together

BASE = "tiny --train.device cpu --model.dim 64 --model.vocab_size 256 --data.seq_len 64"
SELECTIVE = (
    "--recompute.ablock selective --recompute.eblock expert_gemm_only --recompute.norms true "
    "--recompute.mblock conv_bc_only --recompute.rblock recurrence --recompute.mlp true"
)
BLOCKS = (  # of every kind but E
    "--recompute.ablock full --recompute.mblock conv_bc_only "
    "--recompute.rblock full_plus_norms --recompute.fblock full --recompute.norms true"
)
FULL = f"{BLOCKS} --recompute.eblock full"
NONE = "--recompute.eblock none --recompute.mblock none --recompute.rblock none"
ADAMW, TWICE = "--optim.name adamw", "--train.grad_accum 2"
# Ranks, layers, and what else is set.
CASES = [
    (1, "AF", NONE),
    (1, "AE", ADAMW),
    (1, "MM", ""),
    (1, "RR", TWICE),
    (1, "AEMR", f"{NONE} {TWICE}"),
    (1, "AEMF", f"{SELECTIVE} {ADAMW}"),
    (1, "AEMR", f"{FULL} {ADAMW} {TWICE}"),
    (2, "AF", ""),
    (2, "AF", f"--mesh.tp 2 {FULL}"),
    (2, "AE", f"--mesh.ep 2 {ADAMW}"),
    (2, "MM", f"{ADAMW} --mesh.reshard always"),
    (2, "MM", f"--mesh.cp 2 {NONE}"),
    (2, "RR", "--mesh.cp 2"),
    (2, "AEMF", f"--mesh.tp 2 {SELECTIVE}"),
    (2, "AEMR", f"--mesh.cp 2 {SELECTIVE} {ADAMW}"),
    (2, "AEMM", f"--mesh.tp 2 --mesh.ep 2 {BLOCKS} {TWICE}"),
    (4, "AF", f"--mesh.tp 2 {ADAMW} {TWICE}"),
    (4, "AE", f"--mesh.ep 4 {NONE}"),
    (4, "MM", f"--mesh.tp 2 {FULL}"),
    (4, "RR", f"--mesh.reshard always {TWICE}"),
    (4, "AMRF", "--mesh.cp 4"),
    (4, "AEMR", f"--mesh.dp_replicate 2 {SELECTIVE} {ADAMW}"),
    (4, "AEMR", f"--mesh.cp 2 --mesh.ep 2 {BLOCKS}"),
    (4, "AEMF", f"--mesh.tp 2 --mesh.ep 2 {SELECTIVE} --mesh.reshard always {TWICE}"),
    (4, "AEMF", f"--mesh.cp 2 --mesh.tp 2 {ADAMW}"),
    (
        4,
        "AEMF",
        "--mesh.dp_replicate 2 --mesh.ep 2 --train.gradient_sync each --train.grad_accum 2",
    ),
]


def config_of(size: int, pattern: str, flags: str) -> Config:
    layers = f"--model.pattern {pattern} --model.depth {len(pattern)}"
    return parse_run(f"{BASE} {layers} {flags}".split(), size).config


@pytest.fixture(scope="module")
def measured() -> Together[int, list[int]]:
    """By number of the case, what each rank's allocator gave."""

    def play(rank: int, number: int) -> int:
        size = CASES[number][0]
        return allocator_peak(config_of(*CASES[number]), size, rank, number % size)

    def make(numbers: list[int]) -> dict[int, list[int]]:
        return on_worlds(play, {number: CASES[number][0] for number in numbers})

    return Together(__name__, range(len(CASES)), make)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: " ".join(map(str, CASES[n])))
def test_the_allocator_gives_what_was_traced(number: int, measured: dict[int, list[int]]) -> None:
    size, pattern, flags = CASES[number]
    rank = number % size
    stream = trace_step(config_of(size, pattern, flags), size, rank)
    event, peak = stream.peak()
    assert peak == pytest.approx(measured[number][rank], rel=1e-3)
    by_component = stream.by_component(event)
    assert sum(by_component.values()) == peak
    assert set(by_component) <= set(COMPONENTS)


@pytest.mark.parametrize("optimizer", ["muon_adamw", "adamw"])
def test_moments_in_host_memory_are_not_counted(optimizer: str) -> None:
    """A trace of a GPU's step leaves out moments on the host, and has the other bytes unchanged."""
    config = config_of(1, "AF", f"--train.device cuda --optim.name {optimizer}")
    config = as_run(config, "cuda", narrow=True)
    moved = replace(config, optim=replace(config.optim, adamw_state="cpu_offload"))
    streams = [trace_step(c, 1, full=True) for c in (config, moved)]
    here, away = (stream.by_component(len(stream.events) - 1) for stream in streams)
    peak = streams[1].peak()[1]
    assert estimate(moved, 1, detail=False).tensors == pytest.approx(peak, rel=0.005)
    assert away["parameters"] == here["parameters"]
    assert away["optimizer_state"] < here["optimizer_state"]


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_a_pipeline_has_buffers_for_all_microbatches(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of few microbatches has the bytes of all, apart from the scalars of each."""
    flags = f"--mesh.pp 2 --mesh.pp_schedule {schedule} --train.grad_accum 12 --model.dim 256"
    config = config_of(2, "AFAF", flags)
    few = trace_step(config, 2, 1).peak()[1]
    monkeypatch.setattr(trace, "microbatches", lambda config: config.train.grad_accum)
    assert few == pytest.approx(trace_step(config, 2, 1).peak()[1], rel=2e-3)
