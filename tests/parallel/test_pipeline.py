"""A pipeline is one process: every schedule, loss, gradient and parameter, in fp64.

Forked gloo ranks, a hybrid of every letter with auxiliary losses, ragged documents and label
masks (some microbatches have no label at all). Both sides add up the same microbatches in the same
order, so 1e-12 is a wrong formula.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
import torch.testing._internal.distributed.fake_pg  # the fake backend registers itself
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megacpp.blocks.experts.router import Router
from megacpp.config.schema import Config, MeshConfig, PrecisionConfig
from megacpp.data.batches import Batch
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, initialise
from megacpp.model.stages import (
    stage_parts,
)
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import shard_model, shard_slice
from parallel.mesh import World
from parallel.pipeline import Pipeline
from parallel.stages import Stage, keep_parts, make_stages, second_copies
from parallel.start import join
from tests.differences import largest, relative
from tests.model.small import small
from tests.parallel.parity import gradients, slices
from tests.ranks import on_worlds
from tests.synthetic import ragged_batch, without_labels
from tests.together import Together

CPU = torch.device("cpu")
T, STEPS = 8, 3  # tokens of a row, optimizer steps
PATTERN = "AMERFEMR"
Schedule = Literal[
    "1f1b", "gpipe", "interleaved", "interleaved_zb", "looped_bfs", "zbv", "dualpipev", "dualpipe"
]
# dualpipe, which holds every stage twice: test_dualpipe.py
SCHEDULES: tuple[Schedule, ...] = (
    *("gpipe", "1f1b", "interleaved", "interleaved_zb", "looped_bfs", "zbv", "dualpipev"),
)
HELD_OUT = range(1000, 1003)
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A pipeline to compare: ranks, schedule, microbatches of one row each (per data rank)."""

    pp: int
    schedule: Schedule
    microbatches: int
    tied: bool = False
    shards: int = 1
    cp: int = 1
    silent: bool = False  # no label anywhere
    cuts: str = PATTERN
    reshard: Literal["always", "never"] = "never"

    @property
    def mesh(self) -> MeshConfig:
        return MeshConfig(pp=self.pp, dp_shard=self.shards, cp=self.cp, pp_schedule=self.schedule)

    @property
    def world(self) -> int:
        return self.pp * self.shards * self.cp

    @property
    def sharded(self) -> bool:
        return self.shards * self.cp > 1

    @property
    def alone(self) -> Case:
        """The same on one process, with the same microbatches."""
        total, letters = self.microbatches * self.shards, self.cuts.replace("|", "")
        return Case(1, "1f1b", total, self.tied, silent=self.silent, cuts=letters)

    def __str__(self) -> str:
        extra = [
            "tied" * self.tied,
            f"fsdp{self.shards}-{self.reshard}" * (self.shards > 1),
            f"cp{self.cp}" * (self.cp > 1),
            "silent" * self.silent,
            self.cuts * (self.cuts != PATTERN),
        ]
        return " ".join([f"pp{self.pp} {self.schedule} x{self.microbatches}", *filter(None, extra)])


CASES = [
    *(Case(2, s, 4) for s in SCHEDULES),
    *(Case(2, s, 5) for s in ("zbv", "dualpipev")),
    Case(2, "gpipe", 1),
    Case(2, "interleaved", 3),
    Case(2, "zbv", 1),
    Case(4, "gpipe", 3),
    Case(4, "1f1b", 4),
    Case(4, "interleaved", 4),
    Case(4, "zbv", 3),
    Case(4, "dualpipev", 8),
    *(Case(2, s, 4, tied=True) for s in SCHEDULES),
    Case(4, "interleaved", 4, tied=True),
    *(Case(2, s, 4, shards=2) for s in SCHEDULES),
    *(Case(2, s, 4, shards=2, reshard="always") for s in ("1f1b", "interleaved")),
    *(Case(2, s, 4, shards=2, tied=True) for s in ("1f1b", "interleaved", "zbv", "dualpipev")),
    *(Case(2, s, 4, silent=True) for s in ("1f1b", "zbv", "dualpipev")),
    # Blocks that look at one token at a time need no context parallelism of their own.
    *(Case(2, s, 4, cp=2, cuts="FEFEEFEF") for s in ("1f1b", "zbv")),
    Case(2, "1f1b", 4, cuts="AMERFEM|R"),
    Case(2, "dualpipev", 4, cuts="A|MERF|E|MR"),
]


@dataclass
class Trace:
    """What a run was on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Slice]] = field(default_factory=list)  # of every step
    tensors: dict[str, Slice] = field(default_factory=dict)  # parameters and buffers at the end
    held_out: list[float] = field(default_factory=list)
    forwards: Counter[str] = field(default_factory=Counter)  # of every block


def config_of(case: Case) -> Config:
    model = dataclasses.replace(
        small(case.cuts.replace("|", "")), tie_embeddings=case.tied, pattern=case.cuts
    )
    over_tokens = 0.0 if set(case.cuts) <= set("FE|") else 1e-2  # of a row: not with a part of it
    moe = dataclasses.replace(
        model.moe, sequence_loss=over_tokens, balance_loss=over_tokens, z_loss=1e-2
    )
    model = dataclasses.replace(model, moe=moe, init_std=0.1, z_loss=1e-3)
    return Config(model=model, mesh=case.mesh, precision=PrecisionConfig("fp64"))


def batches_of(step: int, case: Case, share: int = 0) -> list[Batch]:
    """Microbatch m of data rank r is row `m * shards + r` of the step."""
    first = step * case.microbatches * case.shards + share
    rows = range(first, first + case.microbatches * case.shards, case.shards)
    batches = [ragged_batch([row], T) for row in rows]
    return [without_labels(batch) for batch in batches] if case.silent else batches


def local(t: Tensor) -> Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def build(case: Case, world: World) -> tuple[HybridLM, list[Stage]]:
    """Prune, cut, shard, materialise, initialise."""
    config = config_of(case)
    with torch.device("meta"):
        model = HybridLM(config.model).double()
    parts = stage_parts(config.model, config.mesh, world.coordinate("pp"))
    keep_parts(model, parts)
    stages = make_stages(model, parts)
    if case.sharded:
        for stage in stages:
            shard_model(stage, world, torch.float64, case.reshard)
        model.tie()
    model.to_empty(device=CPU)
    initialise(model, model.init_rules(), 42, shard_slice)
    return model.train(), stages


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """AdamW on local parts: element by element, so parts are enough."""
    parameters = list(model.parameters())
    shards = [local(p) for p in parameters]
    optimizer = optimizer or torch.optim.AdamW(shards, lr=1e-2, weight_decay=0.1)
    for known, p in zip(optimizer.param_groups[0]["params"], parameters, strict=True):
        assert p.grad is not None and known.data_ptr() == local(p).data_ptr()
        known.grad = local(p.grad)
    optimizer.step()
    model.zero_grad()
    return optimizer


def piped(rank: int, case: Case) -> Trace:
    world, trace, optimizer, places = join(case.mesh, CPU), Trace(), None, {}
    model, stages = build(case, world)
    pipeline = Pipeline(stages, world, config_of(case))
    for key, block in model.blocks.items():
        block.register_forward_hook(lambda *_, key=key: trace.forwards.update([key]))
    routers = [m for m in model.modules() if isinstance(m, Router)]
    for step in range(STEPS):
        batches = batches_of(step, case, world.coordinate("batch"))
        counts = torch.tensor([b.ids_BT.numel() for b in batches]).sum()
        valid = torch.tensor([b.num_targets for b in batches]).sum()
        tokens, valid = (int(world.sum(n, "batch")) for n in (counts, valid))
        for router in routers:
            router.aux_scale.fill_(1 / tokens)
        loss, _ = pipeline.accumulate(batches, torch.full((len(batches),), max(1, valid)).double())
        pipeline.sync_copies()
        trace.losses.append(world.sum(loss, "loss").item() / max(1, valid))
        trace.gradients.append(gradients(model, places))
        trace.norms.append(norm(model, world))
        optimizer = step_of(model, optimizer)
        for router in routers:
            world.sum(router.tokens_per_expert, "stage")
            router.update_bias()
        if step == 1:
            trace.held_out = evaluate(model, pipeline, world, case)
    trace.tensors = slices(
        {**dict(model.named_parameters()), **dict(model.named_buffers())}, places
    )
    assert all(isinstance(p, DTensor) == case.sharded for p in model.parameters())
    return trace


def norm(model: HybridLM, world: World) -> float:
    """Of all gradients, each counted once."""
    copies = {id(p) for p in second_copies(model)}
    own = [local(p.grad) for p in model.parameters() if p.grad is not None and id(p) not in copies]
    square = torch.stack([g.square().sum() for g in own]).sum()
    return world.sum(square, "world").sqrt().item()


def evaluate(model: HybridLM, pipeline: Pipeline, world: World, case: Case) -> list[float]:
    model.eval()
    batches = [ragged_batch([row], T) for row in HELD_OUT]
    found = pipeline.evaluate(batches)
    assert all(isinstance(p, DTensor) == case.sharded for p in model.parameters()), "still gathered"
    assert not any(pipeline.evaluate([])), "every evaluation counts its own batches"
    model.train()
    return (world.sum(found, "loss") / case.shards).tolist()  # all rows on each


@functools.cache
def reference(case: Case) -> Trace:
    """One process."""
    config, world = config_of(case), World(0, 1, CPU)
    model, trace, optimizer = build_model(config, world), Trace(), None
    boundary = AccumulationBoundary(model, world, config)
    for step in range(STEPS):
        sums = boundary.accumulate(batches_of(step, case))
        trace.losses.append(sums.loss_sum.item() / max(1, sums.valid_tokens))
        trace.gradients.append(gradients(model))
        trace.norms.append(norm(model, world))
        optimizer = step_of(model, optimizer)
        boundary.finish_step()
        if step == 1:
            held_out = boundary.evaluate([ragged_batch([row], T) for row in HELD_OUT])
            trace.held_out = [held_out.loss_sum.item(), held_out.nll_sum.item()]
    trace.tensors = slices({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return trace


@functools.cache
def results() -> Together[Case, list[Trace]]:
    make = lambda some: on_worlds(piped, {case: case.world for case in some})  # noqa: E731
    return Together(__name__, CASES, make)


def error(found: dict[str, Slice], expected: dict[str, Slice]) -> float:
    """Largest difference of a tensor, relative to its largest entry."""
    apart = []
    for key, part in found.items():
        whole = expected[key].local
        box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))
        apart.append(relative(part.local, whole[box], whole))
    return largest(apart)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipeline_is_one_process(case: Case) -> None:
    """Losses, gradients, norms of 3 AdamW steps, parameters and routers after, evaluation."""
    expected = reference(case.alone)
    traces = results()[case]
    per_run = STEPS * case.microbatches + len(HELD_OUT)
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)
        assert trace.held_out == pytest.approx(expected.held_out, rel=TOLERANCE)
        assert set(trace.forwards.values()) == {per_run}, "each microbatch once"
        for found, target in zip(trace.gradients, expected.gradients, strict=True):
            assert error(found, target) <= TOLERANCE
        assert error(trace.tensors, expected.tensors) <= TOLERANCE
    names = Counter(name for trace in traces for name in trace.tensors)
    twice = {"embed.weight"} if case.tied and case.schedule not in ("zbv", "dualpipev") else set()
    copies = case.world // case.pp
    assert names == {n: copies * (2 if n in twice else 1) for n in expected.tensors}
    if case.silent:
        for found in (g for trace in traces for g in trace.gradients):
            assert all(part.local.norm() > 0 for name, part in found.items() if "router" in name), (
                "auxiliary losses reach routers without the loss of the head"
            )
