"""QK-clip on every mesh against one process: the same weights, on forked gloo ranks.

fp64 at 1e-12 is a wrong formula; what one process doesn't change is compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.blocks.attention.logits import Statistic
from megacpp.config.schema import Config, MeshConfig, PrecisionConfig, TrainConfig
from megacpp.model.init import Slice
from optim.qk_clip import QKClip
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.start import join
from tests.optim.qk_clip_cases import model_config
from tests.ranks import LONG_S, run_ranks
from tests.synthetic import micro_rows, ragged_batch

CPU = torch.device("cpu")
ROWS, T, ACCUM = 8, 16, 2  # rows of a step, tokens of a row, microbatches
ONE = MeshConfig(dp_shard=1)


@dataclass(frozen=True)
class Case:
    attention: str
    statistic: Statistic = "bound"
    mesh: MeshConfig = ONE


@dataclass
class Clipped:
    """Weights (parts of them, on a mesh) before and after two steps, and the reports."""

    start: dict[str, Slice]
    parameters: dict[str, Slice]
    reports: list[dict[str, float]]


def shards(**degrees: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **degrees})  # type: ignore[arg-type]


HEADS, RING = shards(cp=2, cp_attention="heads"), shards(cp=2, cp_attention="ring")
TWO = (
    shards(dp_shard=2),
    shards(dp_replicate=2),
    shards(tp=2),
    shards(pp=2),
    shards(cp=2, cp_attention="all_gather"),
    RING,
    HEADS,
)
FOUR = (
    shards(dp_shard=4),  # cuts inside heads
    shards(dp_shard=2, tp=2),
    shards(dp_replicate=2, dp_shard=2),
    dataclasses.replace(RING, pp=2),
    shards(pp=2, tp=2),
)
KINDS = ("gqa", "mla")
CASES = {
    2: [Case(kind, "bound", mesh) for kind in KINDS for mesh in TWO]
    + [Case(kind, "max", mesh) for kind in KINDS for mesh in TWO if mesh.cp * mesh.tp > 1],
    4: [Case(kind, "bound", mesh) for kind in KINDS for mesh in FOUR]
    + [Case("gqa_eight_heads", "bound", dataclasses.replace(HEADS, tp=2))],
}
# In both steps some heads are above, and some are not.
TAU = {"gqa": {"bound": 15.35, "max": 7.6}, "mla": {"bound": 15.35, "max": 5.0}}


def parts_of(model: nn.Module) -> dict[str, Slice]:
    """Copies of what this rank holds."""
    found = {n: shard_slice(p.detach()) for n, p in model.named_parameters()}
    return {n: dataclasses.replace(part, local=part.local.clone()) for n, part in found.items()}


def clip_on(rank: int, case: Case) -> Clipped:
    """Two steps of two microbatches; gradients are made, no optimizer uses them."""
    world = World(0, 1, CPU) if case.mesh == ONE else join(case.mesh, CPU)
    config = Config(
        model=model_config(case.attention),
        mesh=case.mesh,
        precision=PrecisionConfig("fp64"),
        train=TrainConfig(device_batch_size=1),
    )
    model = build_model(config, world)
    boundary = AccumulationBoundary(model, world, config)
    calls: list[torch.Size] = []

    def reduce_max(flat: Tensor) -> Tensor:
        calls.append(flat.shape)
        if world.parallel:
            dist.all_reduce(flat, dist.ReduceOp.MAX)
        return flat

    tau = TAU[config.model.attention.kind][case.statistic]
    clip = QKClip(model, tau, reduce_max, case.statistic)
    start, reports = parts_of(model), []
    for step in range(2):
        rows = range(step * ROWS, (step + 1) * ROWS)
        shares = micro_rows(rows, world, ROWS // (ACCUM * world.degree("batch")))
        boundary.accumulate([ragged_batch(share, T, 48) for share in shares])
        reports.append(clip.clip().figures())
        clip.tau *= 0.98  # a head that sees a token again is now at tau up to its last bit
    assert len(calls) == 2 and calls[0] == calls[1]
    return Clipped(start, parts_of(model), reports)


def all_on(rank: int, _world: int, cases: list[Case]) -> list[Clipped]:
    return [clip_on(rank, case) for case in cases]


@pytest.mark.parametrize("size", CASES)
def test_every_mesh_clips_like_one_process(size: int) -> None:
    references: dict[Case, Clipped] = {}
    of_ranks = run_ranks(all_on, size, CASES[size], timeout_s=LONG_S)
    for number, case in enumerate(CASES[size]):
        key = dataclasses.replace(case, mesh=ONE)
        if key not in references:
            references[key] = clip_on(0, key)
        want, found = references[key], [results[number] for results in of_ranks]
        assert all(0 < r["n_clipped"] < r["n_total"] for r in want.reports), want.reports
        assert {n for f in found for n in f.parameters} == want.parameters.keys()
        for of_rank in found:
            check(of_rank, want)
            for got, expected in zip(of_rank.reports, want.reports, strict=True):
                assert abs(got.pop("max_logit") / expected["max_logit"] - 1) <= 1e-12, case
                assert got.items() <= expected.items(), case


def check(found: Clipped, want: Clipped) -> None:
    """Compare a rank's shards with one process; bit for bit where it clips none."""
    for name, part in found.parameters.items():
        box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))
        before, after = want.start[name].local[box], want.parameters[name].local[box]
        assert torch.equal(found.start[name].local, before), name
        most = 1e-12 * want.parameters[name].local.abs().max()
        assert ((part.local - after).abs() <= most).all(), name
        same = before == after
        assert torch.equal(part.local[same], before[same]), name
