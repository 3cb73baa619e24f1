"""Audits leave no trace in a step, and find and name one flipped bit of one rank's gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.blocks.experts.router import Router
from megacpp.config.schema import MeshConfig, RunConfig
from megacpp.state.rng import rng_state
from parallel.audit import AuditedBoundary, _digest
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.parallel.parity import Run, batches_of, config_of, gradients, world_of
from tests.ranks import on_worlds, run_ranks
from tests.together import Together

ONE = MeshConfig(dp_shard=1)
MESHES = {
    "one": ONE,
    "dp": MeshConfig(dp_shard=2),
    "ddp": MeshConfig(dp_replicate=2, dp_shard=1),
    "tp": MeshConfig(dp_shard=1, tp=2),
    "cp": MeshConfig(dp_shard=1, cp=2),
    "ep": MeshConfig(dp_shard=2, ep=2),
    "pp": MeshConfig(dp_shard=1, pp=2),
    "four": MeshConfig(dp_shard=4),
    "hsdp": MeshConfig(dp_replicate=2, dp_shard=2, ep=2),
    "dp_tp": MeshConfig(dp_shard=2, tp=2),
    "zbv": MeshConfig(dp_shard=1, pp=2, pp_schedule="zbv"),
    "dualpipev": MeshConfig(dp_shard=1, pp=2, pp_schedule="dualpipev"),
    "dualpipe": MeshConfig(dp_shard=1, pp=2, pp_schedule="dualpipe"),
}
BAD = range(1), range(1, 2)  # runs of an audit: the first, the second
HIT = "norm.weight"  # of the first block, in each stage of a pipeline


def run_on(name: str) -> Run:
    return Run("plain", MESHES[name], accum=4 if name in ("zbv", "dualpipev", "dualpipe") else 2)


def audited(run: Run, world: Any) -> AuditedBoundary:
    """A boundary that audits every step."""
    config = dataclasses.replace(config_of(run), run=RunConfig(audit_every=1))
    return AuditedBoundary(build_model(config, world), world, config)


def traces(rank: int, run: Run) -> list[str]:
    """Names of what an audit changed."""
    world, config = world_of(rank, run), config_of(run)
    plain = AccumulationBoundary(build_model(config, world), world, config)
    both = plain, audited(run, world)
    seen: list[dict[str, Any]] = []
    for boundary in both:
        torch.manual_seed(3)
        sums = boundary.accumulate(batches_of(0, world, run))
        routers = [m for m in boundary.model.modules() if isinstance(m, Router)]
        seen.append(
            {name: part.local for name, part in gradients(boundary.model).items()}
            | {f"counts {n}": r.tokens_per_expert.clone() for n, r in enumerate(routers)}
            | {"sums": torch.stack([sums.loss_sum, sums.nll_sum]), "along": sums.along}
            | {"generator": torch.rand(3)}
        )
        seen[-1] |= {f"losses {n}": s.loss_sums.clone() for n, s in enumerate(boundary.sources)}
    assert both[1]._audit["differs"] == "" and both[1]._audit["audit_s"] > 0
    assert seen[0].keys() == seen[1].keys()
    return [name for name in seen[0] if not torch.equal(seen[0][name], seen[1][name])]


def flip(grad: Tensor) -> None:
    """Flip the lowest bit of one number."""
    local = getattr(grad, "_local_tensor", grad)
    local.detach().view(-1).view(torch.uint8)[0] ^= 1


@contextmanager
def planted(boundary: AuditedBoundary, bad: range) -> Iterator[str]:
    """Flip a bit of one gradient in these runs of an audit; yield the gradient's name."""
    calls, digests = {"run": -1}, boundary._digests

    def counted(*args: Any) -> Tensor:
        calls["run"] += 1
        return digests(*args)

    boundary._digests = counted  # type: ignore[method-assign]
    name, p = next((n, p) for n, p in boundary.model.named_parameters() if n.endswith(HIT))
    if not boundary.world.parallel:
        p.register_post_accumulate_grad_hook(
            lambda p: flip(p.grad) if calls["run"] in bad and p.grad is not None else None
        )
        yield name
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    FSDPParam: Any = _fsdp_param.FSDPParam
    read = FSDPParam.unsharded_grad_data.fget  # what a backward has made, before it is reduced
    modules = dict(boundary.model.named_modules())

    def spoiled(self: Any) -> Tensor:
        grad, info = read(self), self._module_info
        if calls["run"] in bad and (info.module, info.param_name) == (
            modules[name.rpartition(".")[0]],
            name.rpartition(".")[2],
        ):
            flip(grad)
        return grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParam, "unsharded_grad_data", property(spoiled))
        yield name


def spoiled(rank: int, run: Run, guilty: int, bad: range) -> tuple[str, str]:
    """Name of the gradient, on the guilty rank, and of what differed."""
    world = world_of(rank, run)
    boundary = audited(run, world)
    with planted(boundary, bad) if rank == guilty else nullcontext("") as name:
        boundary.accumulate(batches_of(0, world, run))
    return name, boundary._audit["differs"]


@dataclass(frozen=True)
class Job:
    """A step on a mesh: without a fault, or with one on a rank, in some runs of the audit."""

    name: str
    guilty: int = -1
    bad: range = range(0)


ALWAYS = Job("four", 2, range(3))  # the rank is wrong


def bad_at_the_end(name: str, bad: range) -> Job:
    return Job(name, run_on(name).world - 1, bad)


def play(rank: int, job: Job) -> Any:
    run = run_on(job.name)
    return spoiled(rank, run, job.guilty, job.bad) if job.bad else traces(rank, run)


SOUND = {name: Job(name) for name in MESHES}
FLIPPED = {
    f"{name}-{when}": bad_at_the_end(name, bad)
    for when, bad in zip(("first", "again"), BAD, strict=True)
    for name in MESHES
}


@functools.cache
def results() -> Together[Job, list[Any]]:
    """Return what each job found; meshes of one size share a fork of ranks."""

    def make(jobs: list[Job]) -> dict[Job, list[Any]]:
        return on_worlds(play, {job: run_on(job.name).world for job in jobs})

    return Together(__name__, [*SOUND.values(), *FLIPPED.values()], make)


@pytest.mark.parametrize("job", SOUND.values(), ids=SOUND)
def test_an_audit_leaves_no_trace(job: Job) -> None:
    assert results()[job] == [[]] * run_on(job.name).world


@pytest.mark.parametrize("job", FLIPPED.values(), ids=FLIPPED)
def test_a_flipped_bit_is_found_and_named(job: Job) -> None:
    found, guilty = results()[job], job.guilty
    words = f"{found[guilty][0]} on rank {guilty} differs when it is computed again"
    assert {said for _, said in found} == {f"the gradient of {words}"}


def test_a_rank_that_is_always_wrong_is_named_among_four() -> None:
    found = results()[ALWAYS]
    assert {said for _, said in found} == {
        f"the gradient of {found[2][0]} on rank 2 differs when it is computed again"
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    """Flip bits of a slice of a matrix, which is neither contiguous nor aligned."""
    whole_RX = torch.arange(5 * 40_003).view(5, -1).to(dtype)
    t_RX = whole_RX[:, 3:40_000]
    before, flips = int(_digest(t_RX)), 0
    assert before != int(_digest(t_RX.flip(1))) and before != int(_digest(t_RX.flip(0)))
    for place in range(0, 5 * 39_997, 9_973):
        for bit in (0, 7, 8 * dtype.itemsize - 1):
            (row, column), words = divmod(place, 39_997), whole_RX.view(torch.uint8)
            at = (3 + column) * dtype.itemsize + bit // 8
            words[row, at] ^= 1 << bit % 8
            assert int(_digest(t_RX)) != before
            flips += 1
            words[row, at] ^= 1 << bit % 8
    assert int(_digest(t_RX)) == before and flips > 60


def test_rng_is_the_same_in_both_runs() -> None:
    """A microbatch that draws numbers draws the same ones again."""
    run = run_on("one")
    world = world_of(0, run)
    boundary = audited(run, world)
    accumulate, drawn = AccumulationBoundary.accumulate, []

    def drawing(self: AccumulationBoundary, *args: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return accumulate(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AccumulationBoundary, "accumulate", drawing)
        before = rng_state()
        boundary.accumulate(batches_of(0, world, run))
    assert len(drawn) == 3 and len(set(drawn)) == 1
    assert before != rng_state()


@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=2), MeshConfig(dp_shard=1, tp=2)], ids=str)
def test_weights_that_are_not_trained_have_no_gradients_to_compare(mesh: MeshConfig) -> None:
    """Audit a sparse warm-up, which trains the indexer alone."""

    def differs(rank: int, world: int) -> str:
        run = Run("sparse_gqa_warmup", mesh)
        boundary = audited(run, world_of(rank, run))
        boundary.accumulate(batches_of(0, boundary.world, run))
        assert boundary._audit["audit_s"] > 0
        return boundary._audit["differs"]

    assert run_ranks(differs, 2) == ["", ""]
