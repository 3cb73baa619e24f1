"""A gradient that isn't finite on one rank: seen before ranks add up, agreed on, costs one step.

Forked gloo ranks and tests/parallel/parity.py. Something is poisoned in one microbatch of one step
on one rank; a run from which that step is left out must then be the same run, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megacpp.config.arguments import parse_run
from megacpp.config.schema import MeshConfig
from megacpp.errors import NonFiniteError
from megacpp.model.hybrid import HybridLM
from megacpp.run.step_status import StepStatus
from megacpp.torch_extras import local_part
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model, stages_of
from parallel.mesh import World
from parallel.simulate.fake import fake_world, planned_model
from parallel.step_sums import NonFiniteGuard, StepSums
from parallel.watched_units import REST, watched_units
from tests.figures import Record
from tests.parallel.parity import Run, batches_of, config_of, world_of
from tests.ranks import on_worlds
from tests.together import Together

BAD, STEPS = 1, 3  # of three steps the second
Where = Literal["loss", "activation", "expert", "shard", "value", "forward"]
CHOICES = ("expert_bias", "null_bias", "null_score")  # that a step's counts move
UNTAKEN = ("shard", "value", "forward")  # a sum or a loss is bad: nothing to go on with
Policy = Literal["skip", "sanitize", "raise", "off"]

ONE, FSDP = MeshConfig(dp_shard=1), MeshConfig(dp_shard=2)
MESHES = {
    "one process": ONE,
    "fsdp2": FSDP,
    "dp_replicate2": MeshConfig(dp_replicate=2, dp_shard=1),
    "tp2": MeshConfig(dp_shard=1, tp=2),
    "cp2": MeshConfig(dp_shard=1, cp=2),
    "ep2": MeshConfig(dp_shard=2, ep=2),  # one shard of each expert: FSDP2 has nothing to reduce
    "pp2": MeshConfig(dp_shard=1, pp=2),
    "hsdp2x2": MeshConfig(dp_replicate=2, dp_shard=2),
    "fsdp2 tp2 ep2": MeshConfig(dp_shard=2, tp=2, ep=2),
    "pp2 fsdp2": MeshConfig(dp_shard=2, pp=2),
}


@dataclass(frozen=True)
class Case:
    """A run of three steps, of which one may be poisoned on the last rank, or left out."""

    mesh: str
    where: Where | None = "activation"
    value: Literal["nan", "inf", "-inf"] = "nan"  # nan is no key of a dictionary: it isn't itself
    policy: Policy = "skip"
    without: bool = False  # leave the bad step out
    sync: Literal["defer", "each", "resident"] = "defer"
    model: str = "plain"
    guilty: int = -1  # the rank, from the end

    @property
    def run(self) -> Run:
        return Run(self.model, MESHES[self.mesh], accum=2, optimizer="muon_adamw", sync=self.sync)

    def __str__(self) -> str:
        return f"{self.mesh} {self.model} {self.where} {self.value} {self.policy} {self.sync}"


@dataclass
class Seen:
    """What a rank saw: statuses, states between steps, what was raised."""

    statuses: list[StepStatus]
    states: list[dict[str, Tensor]]
    raised: str = ""
    where: str = ""


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    """A gradient hook that spoils three entries."""

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[:3] = value
        return grad

    return hook


def poison(model: HybridLM, case: Case) -> list[Any]:
    """Hooks on this rank's model that spoil the first backward that passes."""
    left, value = [1], float(case.value)
    hook = _times(value) if case.where == "loss" else poisoned(value)

    def once(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def first(grad: Tensor) -> Tensor:
            left[0] -= 1
            return hook(grad) if left[0] >= 0 else grad

        return first

    def on_output(module: nn.Module, args: Any, out: Any) -> Any:
        if case.where == "value":  # what is logged, not what is learned from
            left[0] -= 1
            wrong = value if left[0] >= 0 else 0.0
            return dataclasses.replace(out, loss_sum=out.loss_sum + wrong)
        if case.where == "forward":  # as a model that has left the range: its loss and all behind
            left[0] -= 1
            return hook(out) if left[0] >= 0 else None
        t = out.loss_sum if case.where == "loss" else out
        t = out[0] if case.where == "expert" else t
        t.register_hook(once(hook))
        return None

    if case.where == "shard":  # after the reduction, as if the sum itself had overflowed
        p = next(p for name, p in model.named_parameters() if name.endswith("w2"))

        def spoil(p: Tensor) -> None:
            left[0] -= 1
            if left[0] >= 0 and p.grad is not None:
                local_part(p.grad).view(-1)[:3] = value

        return [p.register_post_accumulate_grad_hook(spoil)]
    blocks = model.blocks
    module: nn.Module = {
        "loss": lambda: model.head,
        "value": lambda: model.head,
        "activation": lambda: next(iter(blocks.values())),
        "forward": lambda: next(iter(blocks.values())),
        "expert": lambda: next(m for n, m in model.named_modules() if n.endswith("mixer.experts")),
    }[case.where or "activation"]()
    return [module.register_forward_hook(on_output)]


def _times(value: float) -> Callable[[Tensor], Tensor]:
    return lambda grad: grad * value


def tensors_of(model: HybridLM, optimizers: Any) -> dict[str, Tensor]:
    """Return everything that a step may change, on this rank."""
    found = dict(model.named_parameters()) | optimizers.state_tensors()
    saved = model.state_dict().keys()  # buffers too, but for what a step counts and forgets
    return found | {n: b for n, b in model.named_buffers() if n in saved}


def state_of(model: HybridLM, optimizers: Any) -> dict[str, Tensor]:
    """Return copies of everything that a step may change, on this rank."""
    tensors = tensors_of(model, optimizers)
    return {name: local_part(t).detach().clone() for name, t in tensors.items()}


class Prepared:
    """A model before its bad step, to which it is set back for each case of the same model.

    Before all others comes the run without a bad step (`jobs`): a bad step that changed anything
    that isn't set back would show as a difference from that run.
    """

    def __init__(self, rank: int, case: Case) -> None:
        self.run, self.world = case.run, world_of(rank, case.run)
        config = config_of(case.run)
        train = dataclasses.replace(config.train, nonfinite=case.policy)
        config = dataclasses.replace(config, train=train)
        self.model = build_model(config, self.world)
        self.boundary = AccumulationBoundary(self.model, self.world, config)
        self.optimizers = build_optimizer(self.model, config, self.world.holders)
        self.seen = Seen([], [state_of(self.model, self.optimizers)])
        for step in range(BAD):
            self.step(step, self.seen)

    def step(self, step: int, seen: Seen, case: Case | None = None) -> None:
        """Make a step as train.py does, poisoned by a case on this rank."""
        boundary = self.boundary
        hooks = poison(self.model, case) if case else []
        sums: StepSums = boundary.accumulate(batches_of(step, self.world, self.run))
        for hook in hooks:
            hook.remove()
        norm = clip_gradients(
            self.model.parameters(), 1.0, copies=boundary.copies, along=sums.along
        )
        seen.statuses.append(boundary.check_step(sums, norm))
        if step == BAD:
            seen.where = boundary.where()
        if seen.statuses[-1].healthy:
            self.optimizers.step()
        self.optimizers.zero_grad()
        boundary.finish_step(seen.statuses[-1])
        seen.states.append(state_of(self.model, self.optimizers))

    @torch.no_grad()
    def set_back(self, policy: Policy) -> Seen:
        """Return what was seen before the bad step, in the state of then."""
        self.boundary.train = dataclasses.replace(self.boundary.train, nonfinite=policy)
        self.optimizers.zero_grad()
        for source in self.boundary.sources:
            source.forget()
        for name, t in tensors_of(self.model, self.optimizers).items():
            local_part(t).copy_(self.seen.states[-1][name])
        return Seen([*self.seen.statuses], [*self.seen.states])


@functools.lru_cache(maxsize=1)
def prepared(rank: int, case: Case) -> Prepared:
    """Kept from one job to the next, whose cases are in order."""
    return Prepared(rank, case)


def group(case: Case) -> Case:
    """The case whose model others use: of any place and, but for `off`, any policy."""
    return dataclasses.replace(without(case), policy="off" if case.policy == "off" else "skip")


def play(rank: int, case: Case) -> Seen:
    """The run of a case on one rank."""
    run = prepared(rank, group(case))
    seen = run.set_back(case.policy)
    guilty = case.where is not None and rank == run.world.size + case.guilty
    try:
        for step in range(BAD, STEPS):
            if step != BAD or not case.without:
                run.step(step, seen, case if step == BAD and guilty else None)
    except NonFiniteError as error:
        seen.raised = str(error)
    return seen


def cases() -> list[Case]:
    found = [Case(mesh) for mesh in MESHES]
    found += [
        Case("fsdp2", "loss"),
        Case("pp2 fsdp2", "loss", "inf"),
        Case("one process", "expert", "-inf"),
        Case("fsdp2 tp2 ep2", "expert", "inf"),
        Case("hsdp2x2", "expert"),
        Case("fsdp2", "shard"),
        Case("ep2", "shard", "inf"),
        Case("pp2", model="tied", guilty=-2),
        Case("fsdp2", "value"),
        Case("tp2", "value"),
        Case("fsdp2 tp2 ep2", "value", "inf"),
        Case("fsdp2", sync="each"),
        Case("hsdp2x2", sync="resident"),
        Case("one process", "forward", "inf"),  # nobody to agree with; a loss that is no NaN
        Case("fsdp2", "forward", model="nulls"),  # scores of nulls are measured over what is bad
        Case("ep2", "forward"),  # who goes to which rank is chosen by what is bad
        Case("pp2 fsdp2", "forward"),  # only the last stage knows the loss
        Case("pp2", model="ahead"),
    ]
    places: tuple[Where, ...] = ("loss", "activation", "expert", "shard")
    policies: tuple[Policy, ...] = ("sanitize", "raise")
    for policy in policies:
        found += [
            Case(mesh, where, policy=policy) for mesh in ("fsdp2", "hsdp2x2") for where in places
        ]
        found += [Case(mesh, policy=policy) for mesh in ("one process", "ep2")]
        found += [
            Case("tp2", "value", policy=policy),
            Case("fsdp2", "forward", policy=policy),  # gradients and the loss, at once
            Case("fsdp2", "loss", "inf", policy),
            Case("fsdp2 tp2 ep2", "expert", "inf", policy),
            Case("hsdp2x2", "activation", "-inf", policy),
            Case("pp2 fsdp2", "loss", "inf", policy),
        ]
    found += [Case(mesh, policy="off") for mesh in ("one process", "fsdp2", "pp2 fsdp2")]
    return [*found, Case("fsdp2", policy="sanitize", model="nulls")]


def without(case: Case) -> Case:
    """The run that never makes the bad step."""
    return Case(case.mesh, None, without=True, sync=case.sync, model=case.model)


def jobs(cases: Sequence[Case]) -> list[Case]:
    """Each model's cases together, behind the run that never makes the bad step."""
    groups: dict[Case, dict[Case, None]] = {}
    for case in cases:
        groups.setdefault(group(without(case)), {without(case): None})
        groups.setdefault(group(case), {})[case] = None
    return [case for of_group in groups.values() for case in of_group]


@functools.cache
def results() -> Together[Case, list[Seen]]:
    def make(some: list[Case]) -> dict[Case, list[Seen]]:
        return on_worlds(play, {case: case.run.world for case in jobs(some)})

    return Together(__name__, cases(), make, lambda case: [without(case)])


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", [c for c in cases() if c.policy == "skip"], ids=str)
def test_one_bad_rank_costs_one_step(case: Case, record_property: Record) -> None:
    """Nothing moves in the bad step, on any rank; afterwards it is as if it had never been."""
    for seen, other in zip(results()[case], results()[without(case)], strict=True):
        assert [v.healthy for v in seen.statuses] == [True, False, True]
        before, after = seen.states[BAD], seen.states[BAD + 1]
        assert equal(before, after) and not equal(after, seen.states[BAD + 2])
        assert equal(seen.states[-1], other.states[-1])
        assert len({v.nonfinite for s in results()[case] for v in s.statuses[BAD : BAD + 1]}) == 1
        if case.where in ("shard", "value"):  # after a reduction nobody could have seen it before
            assert seen.statuses[BAD].nonfinite == (3 if case.mesh == "ep2" else 0)
        else:
            assert seen.statuses[BAD].nonfinite > 0
            assert torch.isfinite(torch.tensor(seen.statuses[BAD].grad_norm))
            assert f"rank {case.run.world + case.guilty}: " in seen.where
        assert all(v.nonfinite == 0 for i, v in enumerate(seen.statuses) if i != BAD)
    record_property("steps with a NaN or Inf on one rank, left out on all, the rest bit for bit", 1)


def test_where_it_was() -> None:
    """Only the rank that was poisoned is named where only its own gradients are touched."""
    for mesh in ("fsdp2", "hsdp2x2"):
        first, *_, last = (s.where for s in results()[Case(mesh)])
        assert first == last and first.startswith(f"rank {Case(mesh).run.world - 1}: ")
        assert "; rank" not in first and "blocks.0" in first
    of_experts = [c for c in cases() if (c.mesh, c.where, c.policy) == ("ep2", "shard", "skip")]
    for case in of_experts:  # no unit has these
        assert results()[case][0].where == "rank 1: blocks.2.mixer.experts.w2 (3)"
    assert of_experts


def test_a_tied_weight_is_looked_at_before_its_ends_add_up() -> None:
    """Each end of the pipeline has a gradient of it; the first stage's own is bad."""
    (first, *_) = results()[Case("pp2", model="tied", guilty=-2)]
    assert first.where.startswith("rank 0: embed.weight") and "rank 1" not in first.where


@pytest.mark.parametrize("case", [c for c in cases() if c.policy == "sanitize"], ids=str)
def test_training_on_what_is_left(case: Case) -> None:
    """Taken with zeros in place of what wasn't finite; not if a sum or the loss itself is so."""
    for seen in results()[case]:
        taken = case.where not in UNTAKEN
        assert [v.healthy for v in seen.statuses] == [True, taken, True]
        assert (seen.statuses[BAD].nonfinite > 0) == (taken or case.where == "forward")
        before, after = seen.states[BAD], seen.states[BAD + 1]
        assert equal(before, after) != taken
        for name in (name for name in before if name.endswith(CHOICES)):
            assert before[name].any() and torch.equal(before[name], after[name]), "choices are not"
            assert not torch.equal(after[name], seen.states[-1][name]), "of a clean step they are"
        assert all(t.isfinite().all() for state in seen.states for t in state.values())


@pytest.mark.parametrize("case", [c for c in cases() if c.policy == "raise"], ids=str)
def test_raising_names_the_rank(case: Case, record_property: Record) -> None:
    for seen in results()[case]:
        assert len(seen.statuses) == BAD and "Fix:" in seen.raised
        if case.where not in ("shard", "value"):
            assert f"rank {case.run.world - 1}: " in seen.raised
    record_property("ranks named by train.nonfinite=raise", 1)


@pytest.mark.parametrize("case", [c for c in cases() if c.policy == "off"], ids=str)
def test_without_a_look_the_norm_still_leaves_the_step_out(case: Case) -> None:
    """On every rank alike; nobody can say where it was, and sound steps are the same bits."""
    for seen, other in zip(results()[case], results()[without(case)], strict=True):
        assert [v.healthy for v in seen.statuses] == [True, False, True]
        assert seen.statuses[BAD].nonfinite == 0 and not seen.statuses[BAD].finite
        assert not math.isfinite(seen.statuses[BAD].grad_norm) and seen.where == ""
        assert equal(seen.states[BAD], seen.states[BAD + 1])
        assert equal(seen.states[-1], other.states[-1])


def test_without_a_look_nothing_is_watched() -> None:
    model = nn.Linear(6, 4)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    guard = NonFiniteGuard(model, World(0, 1, torch.device("cpu")), looks=False)  # type: ignore[arg-type]
    guard.clean_unreduced()
    assert not guard.names and guard.total == 0 and guard.found() == {}
    assert all(p.grad is not None and p.grad.isnan().all() for p in model.parameters())


def test_nothing_is_read_before_the_verdict() -> None:
    """Counting, cleaning, the norm and clipping, as on a GPU: meta tensors have no value to read.

    Only a CPU, which has nothing to wait for, looks first.
    """
    model = nn.Linear(6, 4, device="meta")
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    guard = NonFiniteGuard(model, World(0, 1, torch.device("meta")))  # type: ignore[arg-type]
    guard.reset()
    guard.clean_unreduced()
    along = torch.stack([guard.total])
    norm = clip_gradients(model.parameters(), 1.0, along=along, loss_scale=2.0)
    with pytest.raises(RuntimeError, match="meta"):
        norm.item()


def test_the_rest_of_each_stage_has_a_name() -> None:
    """Two stages of a rank: each has a root unit, and both are told apart from blocks."""
    words = "tiny --model.depth 4 --mesh.pp 2 --mesh.pp-schedule interleaved".split()
    config = parse_run(words, 4).config
    with fake_world(config, 4) as world:
        model = planned_model(config, world)
        units, _ = watched_units(model, world, stages_of(model))
    names = [name for name, _ in units]
    assert len(set(names)) == len(names)
    roots = [name for name in names if name.startswith(REST)]
    assert roots == [f"{REST} of stage {index}" for index in (0, 2)]
