"""A pipeline besides its numbers: what a rank holds, what it refuses, how it fails, dry runs."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
import torch.testing._internal.distributed.fake_pg  # the fake backend registers itself
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.model.stages import (
    enough_microbatches,
    owners,
    split_layers,
    stage_ids,
    stage_parts,
    stages_per_rank,
)
from parallel.build import build_model, plan_model
from parallel.mesh import World
from parallel.pipeline import SCHEDULES as SCHEDULE_CLASSES
from parallel.pipeline import Pipeline
from parallel.stages import keep_parts, make_stages
from parallel.start import join
from tests.parallel.test_pipeline import (
    CPU,
    SCHEDULES,
    Case,
    Schedule,
    batches_of,
    build,
    config_of,
)
from tests.ranks import RankError, run_ranks

# ---- what a rank holds --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_share_the_model_without_a_gap(schedule: Schedule, tied: bool) -> None:
    """Names, rules and values of every rank are those of the whole model, each tensor somewhere."""
    case = Case(2, schedule, 4, tied)
    config = config_of(case)
    alone = build_model(config, World(0, 1, CPU))
    values = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    seen = set()
    for rank in range(case.pp):
        with torch.device("meta"):
            model = HybridLM(config.model).double()
        parts = stage_parts(config.model, config.mesh, rank)
        keep_parts(model, parts)
        stages = make_stages(model, parts)
        model.to_empty(device=CPU)
        initialise(model, model.init_rules(), config.run.seed)
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(t, values[name]), name
            seen.add(name)
        own = {id(p) for stage in stages for p in stage.parameters()}
        assert own == {id(p) for p in model.parameters()}, "stages run what the rank holds"
    assert seen == values.keys()


def test_a_tied_weight_is_one_parameter_of_a_planned_stage() -> None:
    """Before it has memory as well: a dry run counts it once, and shards it."""
    case = Case(2, "1f1b", 4, tied=True, shards=2)

    def body(rank: int, _world: int) -> tuple[bool, bool]:
        model = plan_model(config_of(case), join(case.mesh, CPU))
        one = model.embed.weight is getattr(model, "head", model.embed).weight
        return one, isinstance(model.embed.weight, DTensor)

    assert run_ranks(body, case.world) == [(True, True)] * 4


def test_another_number_of_microbatches_makes_another_schedule() -> None:
    """Losses of four microbatches are those of the first two and of the last two."""
    case = Case(2, "1f1b", 4)

    def body(rank: int, _world: int) -> list[float]:
        world = join(case.mesh, CPU)
        pipeline = Pipeline(build(case, world)[1], world, config_of(case))
        every = batches_of(0, case)
        shares = every, every[:2], every[2:]
        sums = [pipeline.accumulate(b, torch.ones(len(b)).double())[0].item() for b in shares]
        return sums

    first, last = run_ranks(body, case.world)
    assert first == last and abs(first[0] - first[1] - first[2]) < 1e-12 * first[0]


def test_a_step_begins_without_what_one_that_failed_left() -> None:
    case = Case(2, "1f1b", 4)
    config = config_of(case)
    with torch.device("meta"):
        model = HybridLM(config.model)
    (stage,) = make_stages(model, stage_parts(config.model, config.mesh, 0))
    stage.taken.append(torch.zeros(1))
    stage.handed.append(torch.zeros(1))
    stage.expect([])
    assert not stage.taken and not stage.handed


# ---- when something is wrong --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_that_raises_ends_every_rank(schedule: Schedule, tmp_path: Path) -> None:
    """Its own error is the one that is heard; peers, which wait for it, end as well."""
    log, said = tmp_path / "log", tmp_path / "said"
    said.mkdir()
    case = Case(2, schedule, 4)
    split = split_layers(config_of(case).model, 2 * stages_per_rank(schedule))

    def fails(*_: object) -> None:
        raise ValueError("layer 5 is on fire")

    def body(rank: int, _world: int) -> None:
        logging.getLogger(schedules.__name__).addHandler(logging.FileHandler(log))
        world = join(case.mesh, CPU)
        model, stages = build(case, world)
        if "5" in model.blocks:
            model.blocks["5"].register_forward_pre_hook(fails)
        pipeline = Pipeline(stages, world, config_of(case))
        try:
            pipeline.accumulate(batches_of(0, case), torch.ones(case.microbatches).double())
        except Exception as error:
            (said / str(rank)).write_text(f"{type(error).__name__}: {error}")
            raise

    with pytest.raises(RankError):
        run_ranks(body, case.world)
    heard = {path.name: path.read_text() for path in said.iterdir()}
    guilty = str(owners(schedule, 2)[[5 in layers for layers in split].index(True)])
    assert heard.pop(guilty) == "ValueError: layer 5 is on fire"
    (peer,) = heard.values()
    assert "peer" in peer, "the other rank's connection broke"
    assert log.read_text() == "", "the schedule's account of all actions"


@pytest.mark.parametrize("pp", [2, 4])
def test_rules_refuse_what_torch_refuses(pp: int) -> None:
    """Numbers of microbatches, by making the schedules of rank 0."""

    def accepts(schedule: Schedule, microbatches: int) -> bool:
        num_stages = 2 * pp if stages_per_rank(schedule) > 1 else pp
        stages = [
            PipelineStage(nn.Identity(), i, num_stages, CPU) for i in stage_ids(schedule, pp, 0)
        ]
        try:
            SCHEDULE_CLASSES[schedule](stages if len(stages) > 1 else stages[0], microbatches)  # type: ignore[arg-type]
        except ValueError:
            return False
        return True

    def body(rank: int, _world: int) -> list[tuple[str, int]]:
        numbers = itertools.product((*SCHEDULES, "dualpipe"), range(1, 4 * pp))
        wrong = [(str(s), n) for s, n in numbers if accepts(s, n) != enough_microbatches(s, pp, n)]
        return wrong if rank == 0 else []

    assert run_ranks(body, pp, backend="fake")[0] == []


# ---- without peers ------------------------------------------------------------------------------


def test_a_rank_runs_dry_alone() -> None:
    """Fake process group, fake tensors: a rank of any schedule runs its step without the others.

    The rank without the head: the loss looks at a value on a CPU, which a fake tensor lacks.
    """

    def body(rank: int, _world: int) -> list[tuple[Schedule, bool, set[int]]]:
        return [dry_step(schedule, rank) for schedule in SCHEDULES if rank != head_of(schedule)]

    def head_of(schedule: Schedule) -> int:
        return owners(schedule, 2)[-1]

    found = [result for of_rank in run_ranks(body, 2, backend="fake") for result in of_rank]
    assert {schedule for schedule, *_ in found} == set(SCHEDULES)
    assert all(graded and forwards == {4} for _, graded, forwards in found)


def dry_step(schedule: Schedule, rank: int) -> tuple[Schedule, bool, set[int]]:
    """Schedule, whether every parameter got a gradient, how often each block ran."""
    case = Case(2, schedule, 4, cuts="AMRF")
    config, world, batches = config_of(case), join(case.mesh, CPU), batches_of(0, case)
    with torch.device("meta"):
        model = HybridLM(config.model).double()
    parts = stage_parts(config.model, config.mesh, rank)
    keep_parts(model, parts)
    stages = make_stages(model, parts)
    forwards: Counter[str] = Counter()
    for key, block in model.blocks.items():
        block.register_forward_hook(lambda *_, key=key: forwards.update([key]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        divisors = torch.full((len(batches),), 10.0, dtype=torch.float64)
        Pipeline(stages, world, config, dry=True).accumulate(batches, divisors)
        if "2.12" <= torch.__version__ < "2.15":
            with pytest.raises(Exception, match="local_scalar_dense"):  # ranks vote without it
                Pipeline(stages, world, config).accumulate(batches, divisors)
    graded = all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    return schedule, graded, set(forwards.values())
