"""A forward that runs out of memory: what it kept until then is told apart, and why it grew.

Real models and real steps; an error is raised in the middle of the last block's forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacpp.blocks.experts.module
from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.watch import StepWatch
from megacpp.blocks.experts.router import Router
from megacpp.blocks.mamba3.module import Mamba3Scan
from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
)
from megacpp.memory.snapshot import Snapshot, compare, file_name, read_snapshot
from megacpp.model.short_conv import Convolve, ShortConv
from megacpp.run.failure import report
from megacpp.run.forensics import Forensics
from megacpp.run.oom import oom_screen
from optim.build import build_optimizer
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.start import join
from tests.model.small import small
from tests.ranks import run_ranks
from tests.run.test_forensics import run
from tests.synthetic import ragged_batch

CPU = torch.device("cpu")
T = 64


class Rig:
    """A small run whose steps are all followed."""

    def __init__(
        self, folder: Path, model: ModelConfig, policy: CheckpointingPolicy, world: World
    ) -> None:
        mesh = MeshConfig(dp_shard=world.size, ep=world.size)
        memory = MemoryConfig(snapshot_every=1, snapshot_gap=0)
        config = Config(model=model, memory=memory, mesh=mesh, recompute=policy)
        self.world = world
        self.model = build_model(config, world, ActivationCheckpointing(config))
        self.optimizer = build_optimizer(self.model, config, world.holders)
        self.boundary = AccumulationBoundary(self.model, world, config)
        rank = world.coordinate("batch")
        watch = partial(StepWatch, self.model, self.optimizer)
        self.forensics = Forensics(folder, config, rank, CPU, watch)

    def step(self, number: int) -> None:
        rank = self.world.coordinate("batch")
        self.forensics.begin(number)
        self.boundary.accumulate([ragged_batch([2 * rank, 2 * rank + 1], T)])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.boundary.finish_step()
        self.forensics.end(number)

    def failing(self, module: nn.Module, number: int) -> Snapshot:
        """The snapshot of a step in which there is no room right behind a module's forward."""

        def fails(*_: Any) -> None:
            raise MemoryError("no room")

        hook = module.register_forward_hook(fails)
        try:
            with pytest.raises(MemoryError) as caught:
                self.step(number)
            return self.found(caught.value)
        finally:
            hook.remove()

    def found(self, error: BaseException) -> Snapshot:
        """At the error, whose frames hold what the forward had made."""
        assert error.__traceback__ is not None
        return self.forensics.at_error()


def alone(folder: Path, model: ModelConfig, policy: CheckpointingPolicy = KEEP) -> Rig:
    return Rig(folder, model, policy, World(0, 1, CPU))


def with_experts(pattern: str = "AMRFE", top_k: int = 4) -> ModelConfig:
    """Experts whose rows are more than all else."""
    base = small(pattern)
    return replace(base, moe=replace(base.moe, top_k=top_k, hidden_dim=64))


@pytest.mark.parametrize("policy", [KEEP, PER_BLOCK], ids=["keep", "by kind"])
@pytest.mark.parametrize("pattern", ["AMRFE", "AMERFEA"])
def test_the_last_e_block_s_rows_are_dispatch_and_earlier_blocks_activations(
    tmp_path: Path, policy: CheckpointingPolicy, pattern: str
) -> None:
    """The buckets of blocks that are done are those of a whole step, to the byte."""
    rig = alone(tmp_path, with_experts(pattern), policy)
    for number in range(2):
        rig.step(number)
    whole = read_snapshot(tmp_path / "memory/step-2.json")
    last = pattern.rindex("E")
    found = rig.failing(rig.model.get_submodule(f"blocks.{last}.mixer.experts"), 2)
    assert found.followed and found.where == f"forward blocks.{last}"
    moving = {k: v for k, v in found.most.items() if k not in ("parameters", "optimizer_state")}
    if policy == KEEP or pattern == "AMRFE":  # else an earlier E block's rows are made again
        assert max(moving, key=lambda name: moving[name]) == "moe_routing/dispatch"
    assert found.most.get("workspace", 0) < 0.1 * sum(moving.values())
    done = {f"activations/{letter}{part}" for letter in "MRF" for part in ("", " scan", " conv")}
    for bucket in done & whole.most.keys():
        assert found.most[bucket] == whole.most[bucket], bucket
    assert found.most["batch"] <= whole.most["batch"]
    assert found.most["moe_routing/router"] == whole.most["moe_routing/router"]
    # Gate, up and down of the last E block are there; what follows them isn't.
    assert found.most["moe_routing/dispatch"] >= 0.8 * whole.most["moe_routing/dispatch"]


def test_a_step_that_is_not_recorded_is_said_to_be_unknown(tmp_path: Path) -> None:
    """Bytes that outlive the step are no growth since a recorded step's peak."""
    rig = alone(tmp_path, with_experts())
    for number in range(2):
        rig.step(number)
    rig.step(2)
    rig.forensics.every = 1000
    found = rig.failing(rig.model.get_submodule("blocks.4.mixer.experts"), 3)
    assert not found.followed and found.step == 4
    screen = oom_screen(MemoryError("no room"), tmp_path, rig.forensics)
    assert "grown in step 4: not known, the step wasn't recorded" in screen
    assert "no component is larger" not in screen and "from step 2 to 3" in screen
    written = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())
    assert written["largest_growth"]["steps"] == [2, 3], "of recorded steps alone"


def test_no_setting_is_offered_where_no_step_can_be_recorded(tmp_path: Path) -> None:
    """With compiled blocks all snapshots are of what outlives a step, so they are comparable."""
    rig = alone(tmp_path, with_experts())
    rig.forensics.follows = False
    for number in range(2):
        rig.step(number)
    found = rig.failing(rig.model.get_submodule("blocks.4.mixer.experts"), 2)
    assert not found.followed and found.step == 3
    screen = oom_screen(MemoryError("no room"), tmp_path, rig.forensics)
    assert "grown in step 3: not known, no step of this run can be recorded" in screen
    assert "memory.snapshot_every" not in screen and "grown from step 2 to the error" in screen
    written = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())
    assert written["largest_growth"]["steps"] == [2, 3]


def test_what_is_written_at_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A snapshot that can be read and compared, this rank's summary, and one line of blame."""
    rig = alone(tmp_path, with_experts())
    for number in range(2):
        rig.step(number)
    found = rig.failing(rig.model.get_submodule("blocks.4.mixer.experts"), 2)
    stored = read_snapshot(tmp_path / "memory" / f"error-{file_name(3)}")
    assert stored == found and found.step == 3
    assert sum(found.at_peak.values()) == found.peak_bytes > 0
    written = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())
    assert written["error"]["where"] == "forward blocks.4" and written["error"]["step"] == 3
    assert written["error"]["largest_bucket"] == "moe_routing/dispatch"
    assert written["error"]["largest_bucket_bytes"] == found.most["moe_routing/dispatch"]
    assert len(written["peak_reserved_bytes"]) == 1 and written["peak_resident_bytes"][0] > 0
    screen = oom_screen(MemoryError("no room"), tmp_path, rig.forensics)
    assert "largest in forward blocks.4: moe_routing/dispatch " in screen
    table = {line.split()[0] for line in screen.splitlines() if line.startswith("  ")}
    assert {"activations", "moe_routing"} <= table
    again = rig.forensics.at_error()
    assert again is found, "the first error counts"


def test_any_failure_leaves_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has nothing to do with memory; no other rank is waited for."""
    rig = alone(tmp_path, with_experts())
    rig.step(0)
    try:
        forensics = rig.forensics  # as train.py holds it
        forensics.begin(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    except RuntimeError as error:
        assert report(error, tmp_path) == 1
    written = json.loads((tmp_path / "memory/summary-rank-0.json").read_text())
    assert written["error"]["step"] == 2 and written["largest_growth"] is None


def test_a_changed_chunk_is_told_from_a_hot_expert_mid_forward(tmp_path: Path) -> None:
    """A scan in chunks of 4 instead of 16 keeps more states, in the middle of a forward too."""
    base = small("EAMM")
    model = replace(base, mamba3=replace(base.mamba3, chunk_size=16))
    rig = alone(tmp_path, model)
    for number in range(2):
        rig.step(number)
    for scan in rig.model.modules():
        if isinstance(scan, Mamba3Scan):
            scan.chunk_size = 4
    found = rig.failing(rig.model.get_submodule("blocks.3.mixer.scan"), 2)
    told = compare(read_snapshot(tmp_path / "memory/step-2.json"), found)
    assert told.cause.name == "ssm_state" and told.largest.bucket == "activations/M scan"


def test_a_larger_convolution_is_told_from_a_changed_chunk_mid_forward(tmp_path: Path) -> None:
    """16 taps instead of 4: the reference keeps each tap of a token (torch's keeps its input)."""
    base = small("EAMM")
    rig = alone(tmp_path, replace(base, mamba3=replace(base.mamba3, conv_kernel=4)))
    for convolve in rig.model.modules():
        if isinstance(convolve, Convolve):
            convolve.kernels = replace(convolve.kernels, short_conv="reference")
    for number in range(2):
        rig.step(number)
    for conv in rig.model.modules():
        if isinstance(conv, ShortConv):
            conv.weight = nn.Parameter(torch.zeros(conv.num_channels, 1, 16))
    found = rig.failing(rig.model.get_submodule("blocks.3.mixer.scan"), 2)
    told = compare(read_snapshot(tmp_path / "memory/step-2.json"), found)
    assert told.cause.name == "convolution" and told.largest.bucket == "activations/M conv"
    assert found.where == "forward blocks.3"


def hot_rank(rank: int, size: int, folder: Path) -> dict[str, str | None]:
    """Two ranks with half of the experts each: from some step on all tokens go to rank 0."""
    rig = Rig(
        folder / str(rank),
        with_experts("AME", top_k=2),
        KEEP,
        join(MeshConfig(dp_shard=2, ep=2), CPU),
    )
    for number in range(2):
        rig.step(number)
    before = read_snapshot(folder / str(rank) / "memory" / file_name(2, rank))
    for router in rig.model.modules():
        if isinstance(router, Router):
            router.expert_bias[: len(router.expert_bias) // 2] += 100.0
    found = rig.failing(rig.model.get_submodule("blocks.2.mixer.experts"), 2)
    told = compare(before, found)
    return {"cause": told.cause.name, "bucket": told.largest.bucket}


def test_a_hot_expert_is_told_mid_forward(tmp_path: Path) -> None:
    hot, cold = run_ranks(hot_rank, 2, tmp_path)
    assert hot == {"cause": "dispatch", "bucket": "moe_routing/dispatch"}
    assert cold["cause"] == "steady"


def test_following_changes_no_bit_and_leaves_no_hook(tmp_path: Path) -> None:
    """Gradients with and without the watch, with recompute regions; afterwards nothing watches."""
    gradients = []
    for follows in (False, True):
        rig = alone(tmp_path / str(follows), with_experts("AMERFE"), PER_BLOCK)
        watch = StepWatch(rig.model, rig.optimizer)
        if follows:
            watch.__enter__()
        rig.boundary.accumulate([ragged_batch([0, 1], T)])
        if follows:
            watch.__exit__(None, None, None)
        gradients.append([p.grad for p in rig.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    assert all(map(torch.equal, *gradients))
    x = torch.ones(2, requires_grad=True)
    y = (x * x).grad_fn
    saved = y._saved_self  # type: ignore[union-attr]
    assert saved is x, "no hook stands between"


@pytest.mark.slow
def test_a_run_whose_last_e_block_has_no_room(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.py` as a whole: the fourth step fails between the experts' products."""
    product: Callable[..., Tensor] = megacpp.blocks.experts.module.out_of_experts
    calls: list[int] = []

    def fourth_fails(*arguments: Any) -> Tensor:
        values = not arguments[1].is_meta  # which a trace of the block has
        calls.extend([0] * values)
        if values and len(calls) == 4:
            torch.empty(1 << 58, dtype=torch.uint8)
        return product(*arguments)

    monkeypatch.setattr(megacpp.blocks.experts.module, "out_of_experts", fourth_fails)
    folder = tmp_path / "run"
    wide = "--model.pattern AMRFE --model.moe.top-k 4 --model.moe.hidden-dim 128".split()
    every = "--memory.snapshot-every 2 --memory.snapshot-gap 1 --train.grad-accum 1".split()
    done = run(corpus, folder, *wide, *every)
    assert done.returncode == 1
    screen = (folder / "failures/oom-rank-0.txt").read_text()
    assert "largest in forward blocks.4: moe_routing/dispatch " in screen
    found = read_snapshot(folder / "memory" / f"error-{file_name(4)}")
    assert found.where == "forward blocks.4"
    share = found.most.get("workspace", 0) / found.peak_bytes
    assert share < 0.1, "nothing that is kept is called a temporary"
    written = json.loads((folder / "memory/summary-rank-0.json").read_text())
    assert written["error"]["largest_bucket"] == "moe_routing/dispatch"
