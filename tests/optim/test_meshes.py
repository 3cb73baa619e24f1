"""Both optimizers and the gradient norm on every mesh equal one process (forked gloo ranks).

Parameters are cut as the trainer cuts them: tensor and expert parallelism by DTensors on one axis,
then FSDP2 over what is left. Which cells a rank holds is read off the parameters themselves: before
training they hold the number of each cell. So nothing here relies on the optimizer's own account
of boxes, nor on torch's, which is wrong for shards that are uneven twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megacpp.config.schema import MeshConfig
from megacpp.torch_extras import local_part
from optim.clip import clip_gradients
from optim.initial_state import Width
from optim.muon_adamw import MuonAdamW
from optim.newton_schulz import Coefficients
from optim.ownership import MatrixView
from parallel.mesh import World
from parallel.start import join
from tests.collectives import Collective, CollectiveCounter
from tests.ranks import on_worlds, run_ranks
from tests.together import Together

CPU = torch.device("cpu")
STEPS, MAX_NORM = 3, 0.5
WHOLE, EXPERTS = MatrixView(), MatrixView(batched=True)


@dataclass(frozen=True)
class Case:
    """Parameter: its shape, its view by Muon (None: AdamW's), and the sharded dims.

    `dim` over tp, or over ep if it has three dims, then `fsdp_dim` by FSDP2.
    """

    shape: tuple[int, ...]
    view: MatrixView | None = WHOLE
    dim: int | None = 0
    fsdp_dim: int = 0

    @property
    def routed(self) -> bool:
        return len(self.shape) == 3


# Even and uneven cuts, once and twice; ranks without a row; blocks across borders and along them;
# more and fewer experts than ranks.
CASES = {
    "rows": Case((8, 12)),
    "rows_uneven": Case((9, 5)),
    "rows_few": Case((3, 8)),
    "rows_large": Case((130, 70)),
    "blocks": Case((22, 6), MatrixView((5, 5, 5, 3, 4))),
    "heads": Case((16, 6), MatrixView((4,) * 4)),
    "cols": Case((6, 8), dim=1),
    "cols_uneven": Case((5, 7), dim=1),
    "cols_blocks": Case((12, 8), MatrixView((1,) * 8 + (4,)), dim=1),
    "whole": Case((7, 5), dim=None),
    "whole_few": Case((2, 9), dim=None),
    "experts": Case((8, 4, 6), EXPERTS),
    "experts_few": Case((5, 2, 4), EXPERTS),
    "experts_rows": Case((4, 8, 6), EXPERTS, fsdp_dim=1),
    "experts_uneven_rows": Case((5, 4, 3), EXPERTS, fsdp_dim=1),
    "embed": Case((11, 6), None),
    "norm": Case((9,), None, dim=None),
    "bias": Case((6,), None),
}


@dataclass(frozen=True)
class Setting:
    """Numeric types, and how much of the matrices a rank may send at once."""

    dtype: torch.dtype = torch.float64
    wire: Width = "auto"
    momentum: Width = "auto"
    bucket_bytes: int = 1 << 20  # all matrices are one wave
    nesterov: bool = True
    cautious: bool = False
    coefficients: Coefficients = "quintic"


SETTINGS = {
    "fp64": Setting(),
    "fp32, bf16 momentum, waves": Setting(torch.float32, "fp32", "bf16", 160),
    "bf16 wire, waves": Setting(torch.float32, "bf16", "bf16", 80, cautious=True),
    "bf16 wire, fp32 momentum": Setting(
        torch.float32, "bf16", "fp32", 1 << 20, nesterov=False, coefficients="polar_express"
    ),
}
# Mesh, and exchange groups of Muon: parameters on one set of ranks share two all-to-alls a wave.
MESHES = {
    "fsdp2": (MeshConfig(dp_shard=2), 1),
    "tp2": (MeshConfig(dp_shard=1, tp=2), 1),
    "ep2": (MeshConfig(dp_shard=2, ep=2), 1),
    "fsdp3": (MeshConfig(dp_shard=3), 1),
    "tp3": (MeshConfig(dp_shard=1, tp=3), 1),
    "ep3": (MeshConfig(dp_shard=3, ep=3), 1),
    "fsdp4": (MeshConfig(dp_shard=4), 1),
    "hsdp2x2": (MeshConfig(dp_replicate=2, dp_shard=2), 1),
    "ddp2_tp2": (MeshConfig(dp_replicate=2, dp_shard=1, tp=2), 1),
    "fsdp2_tp2": (MeshConfig(dp_shard=2, tp=2), 1),
    "cp2_tp2": (MeshConfig(dp_shard=1, cp=2, tp=2), 1),
    "ep2_efsdp2": (MeshConfig(dp_shard=4, ep=2), 1),
    "ep4": (MeshConfig(dp_shard=4, ep=4), 1),
    "fsdp2_tp2_ep2": (MeshConfig(dp_shard=2, tp=2, ep=2), 1),
    "fsdp4_tp2_ep2": (MeshConfig(dp_shard=4, tp=2, ep=2), 1),
    "fsdp2_tp4_ep8": (MeshConfig(dp_shard=2, tp=4, ep=8), 1),
    "hsdp2x2_tp2": (MeshConfig(dp_replicate=2, dp_shard=2, tp=2), 1),
    "hsdp2x2_tp2_ep2": (MeshConfig(dp_replicate=2, dp_shard=2, tp=2, ep=2), 1),
}


def ranks_of(mesh: MeshConfig) -> int:
    return mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp


def values(name: str, step: int) -> Tensor:
    """Return the values of a parameter (step -1) or its gradient, fp64."""
    g = torch.Generator().manual_seed(100 * list(CASES).index(name) + step + 1)
    return torch.randn(CASES[name].shape, generator=g, dtype=torch.float64)


class Params(nn.Module):
    """Parameters that hold the number of each cell."""

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        super().__init__()
        for name in names:
            shape = CASES[name].shape
            cells = torch.arange(math.prod(shape), dtype=dtype).view(shape)
            self.register_parameter(name, nn.Parameter(cells))


class Model(nn.Module):
    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        super().__init__()
        names = list(names)
        self.dense = Params((name for name in names if not CASES[name].routed), dtype)
        self.experts = Params((name for name in names if CASES[name].routed), dtype)

    def named(self) -> dict[str, nn.Parameter]:
        return {name.rpartition(".")[2]: p for name, p in self.named_parameters()}


def shard(model: Model, world: World) -> None:
    """TP and EP, then FSDP2, as the trainer does it."""
    for params, axis, mesh in (
        (model.dense, "tp", world.meshes["shard"]),
        (model.experts, "ep", world.meshes["expert_shard"]),
    ):
        if world.degree(axis) > 1:
            for name, p in list(params.named_parameters()):
                dim = CASES[name].dim
                placement = Replicate() if dim is None else Shard(dim)
                cut = distribute_tensor(p.detach(), world.meshes[axis], [placement])
                params.register_parameter(name, nn.Parameter(cut))
        dims = {p: CASES[name].fsdp_dim for name, p in params.named_parameters()}
        fully_shard(params, mesh=mesh, shard_placement_fn=lambda p, dims=dims: Shard(dims[p]))


def replica_group(config: MeshConfig) -> dist.ProcessGroup:
    """Return the ranks that hold a pipeline stage once: dp_shard x cp x tp."""
    size, world = config.dp_shard * config.cp * config.tp, ranks_of(config)
    parts = [list(range(first, first + size)) for first in range(0, world, size)]
    group, _ = dist.new_subgroups_by_enumeration(parts)
    assert isinstance(group, dist.ProcessGroup)
    return group


def like(p: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(p, DTensor):
        return local
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


class Training:
    """Model with known gradients; `cells` are the numbers of this rank's cells."""

    def __init__(
        self,
        names: Iterable[str],
        place: Callable[[Model], None] | None = None,
        setting: Setting = Setting(),
    ) -> None:
        self.setting = setting
        self.model = Model(names, setting.dtype)
        if place is not None:
            place(self.model)
        self.params = self.model.named()
        self.cells = {name: local_part(p.detach()).long() for name, p in self.params.items()}
        for name, p in self.params.items():
            local_part(p.detach()).copy_(self.here(name, -1))

    def here(self, name: str, step: int) -> Tensor:
        return values(name, step).flatten()[self.cells[name]].to(self.setting.dtype)

    def give_gradients(self, step: int) -> None:
        for name, p in self.params.items():
            p.grad = like(p, self.here(name, step))

    def optimizer(self, *process_groups: dist.ProcessGroup) -> MuonAdamW:
        groups: list[dict[str, Any]] = []
        x = self.setting
        for name, p in self.params.items():
            group = {"params": [(name, p)], "algorithm": "adamw", "cautious": x.cautious}
            if CASES[name].view is not None:
                lr = 0.02 + 0.01 * list(CASES).index(name)
                more = {"view": CASES[name].view, "lr": lr, "weight_decay": 0.1}
                more |= {"nesterov": x.nesterov, "coefficients": x.coefficients}
                group |= {"algorithm": "muon", **more}
            groups.append(group)
        return MuonAdamW(groups, x.wire, x.momentum, x.bucket_bytes, process_groups=process_groups)

    def train(self, optimizer: MuonAdamW) -> None:
        for step in range(STEPS):
            self.give_gradients(step)
            optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return {name: local_part(p.grad) for name, p in self.params.items() if p.grad is not None}

    def state(self, optimizer: MuonAdamW) -> dict[str, Tensor]:
        """Parameters and everything that is cut as they are."""
        found = {name: local_part(p.detach()) for name, p in self.params.items()}
        for key, t in optimizer.state_tensors().items():
            p = self.params[key.split(".")[0]]
            if not key.endswith(".step"):
                assert type(t) is type(p.data) and t.shape == p.shape
                assert getattr(t, "placements", None) == getattr(p, "placements", None)
                found[key] = local_part(t)
        return found


@dataclass
class Trace:
    """Result of one rank after training, and after clipping the last step's gradients."""

    cells: dict[str, Tensor]
    state: dict[str, Tensor]
    collectives: list[Collective]  # of all steps
    buckets: int
    norm: float
    gradients: dict[str, Tensor]
    clip_collectives: list[tuple[str, int]]  # kind and numbers


def trace(
    names: Iterable[str],
    world: World | None = None,
    groups: Iterable[dist.ProcessGroup] = (),
    copies: Iterable[str] = (),
    setting: Setting = Setting(),
) -> Trace:
    run = Training(names, None if world is None else lambda model: shard(model, world), setting)
    optimizer = run.optimizer(*groups)
    with CollectiveCounter() as stepping:
        run.train(optimizer)
    state = run.state(optimizer)
    with CollectiveCounter() as clipping:
        norm = clip_gradients(
            run.model.parameters(), MAX_NORM, copies=[run.params[name] for name in copies]
        )
    return Trace(
        run.cells,
        state,
        stepping.calls,
        sum(len(exchange.buckets) for exchange in optimizer.plan().exchanges),
        norm.item(),
        run.gradients(),
        [(call.kind, call.numel) for call in clipping.calls],
    )


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Tensor]]:
    """By setting."""
    return {name: trace(CASES, setting=setting).state for name, setting in SETTINGS.items()}


class Job(NamedTuple):
    """Name of a mesh and of a setting."""

    mesh: str
    setting: str

    @property
    def config(self) -> MeshConfig:
        return MESHES[self.mesh][0]


JOBS = {f"{mesh}-{setting}": Job(mesh, setting) for mesh in MESHES for setting in SETTINGS}
IN_FP64 = {name: job for name, job in JOBS.items() if job.setting == "fp64"}


@functools.cache
def joined(mesh: str) -> tuple[World, list[dist.ProcessGroup]]:
    """Return the world and the exchange groups of a mesh, in a fork of ranks."""
    _clear_sharding_prop_cache()  # it would hand groups of the mesh before to this one
    config, _ = MESHES[mesh]
    return join(config, CPU), [replica_group(config)]


def play(rank: int, job: Job) -> Trace:
    world, groups = joined(job.mesh)
    return trace(fitting(job.config), world, groups, setting=SETTINGS[job.setting])


@pytest.fixture(scope="module")
def ran() -> Together[Job, list[Trace]]:
    def make(jobs: list[Job]) -> dict[Job, list[Trace]]:
        return on_worlds(play, {job: ranks_of(job.config) for job in jobs})

    return Together(__name__, [*JOBS.values()], make)


def fitting(mesh: MeshConfig) -> list[str]:
    """FSDP2 cuts only dim 0 unevenly."""
    shards = ranks_of(mesh) // (mesh.pp * mesh.dp_replicate * mesh.ep)
    return [
        name
        for name, case in CASES.items()
        if case.fsdp_dim == 0 or case.shape[case.fsdp_dim] % shards == 0
    ]


def norm_of(names: Iterable[str], step: int = STEPS - 1) -> float:
    return torch.cat([values(name, step).flatten() for name in names]).norm().item()


def check_state(traces: list[Trace], want: dict[str, Tensor]) -> None:
    """Muon's to the bit; AdamW's kernel rounds the last elements of a shard in another way."""
    for one in traces:
        for key, got in one.state.items():
            name = key.split(".")[0]
            ours = want[key].flatten()[one.cells[name]]
            assert got.shape == ours.shape and got.dtype == ours.dtype
            if CASES[name].view is None:
                most = 1e-15 if got.dtype == torch.float64 else 1e-6
                assert got.numel() == 0 or (got - ours).abs().max() <= most, key
            else:
                assert torch.equal(got, ours), key


def check_clipped(traces: list[Trace], names: Iterable[str]) -> None:
    """Each cell of the named gradients counts once, all gradients are scaled by one factor."""
    want = norm_of(names)
    assert want > 2 * MAX_NORM
    for one in traces:
        assert abs(one.norm - want) <= 1e-12 * want
        assert one.clip_collectives == [("all_reduce", 1)]
        for name, got in one.gradients.items():
            ours = values(name, STEPS - 1).flatten()[one.cells[name]] * (MAX_NORM / (want + 1e-6))
            assert got.numel() == 0 or (got - ours).abs().max() <= 1e-12 * ours.abs().max()


@pytest.mark.parametrize("job", IN_FP64.values(), ids=IN_FP64)
def test_every_cell_is_on_some_rank(ran: Together[Job, list[Trace]], job: Job) -> None:
    for case in fitting(job.config):
        here = torch.cat([one.cells[case].flatten() for one in ran[job]]).unique()
        assert torch.equal(here, torch.arange(math.prod(CASES[case].shape))), case


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_parameters_and_state_equal_one_process(
    ran: Together[Job, list[Trace]], one_process: dict[str, dict[str, Tensor]], job: Job
) -> None:
    check_state(ran[job], one_process[job.setting])


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_two_exchanges_per_wave_set_of_ranks_and_step(
    ran: Together[Job, list[Trace]], job: Job
) -> None:
    x = SETTINGS[job.setting]
    for one in ran[job]:
        expected = "all_to_all", torch.bfloat16 if x.wire == "bf16" else x.dtype
        found = [(call.kind, call.dtype) for call in one.collectives]
        assert found == [expected] * (2 * one.buckets * STEPS)
        if x.bucket_bytes == 1 << 20:
            assert one.buckets == MESHES[job.mesh][1]
        else:
            assert one.buckets >= 4


@pytest.mark.parametrize("job", IN_FP64.values(), ids=IN_FP64)
def test_norm_and_clipping_equal_one_process(ran: Together[Job, list[Trace]], job: Job) -> None:
    check_clipped(ran[job], fitting(job.config))


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(pp=2, dp_shard=2),
        MeshConfig(pp=2, dp_shard=2, tp=2),
        MeshConfig(pp=2, dp_replicate=2, dp_shard=1, tp=2, ep=2),
    ],
    ids=["pp2_fsdp2", "pp2_fsdp2_tp2", "pp2_ddp2_tp2_ep2"],
)
def test_pipeline_stages(config: MeshConfig, one_process: dict[str, dict[str, Tensor]]) -> None:
    """Ranks hold different parameters, and the second stage a copy of the first one's embedding."""
    names = fitting(config)
    others = [name for name in names if name != "embed"]
    stages = [["embed", *others[::2]], [*others[1::2], "embed"]]

    def body(rank: int, world: int) -> Trace:
        joined = join(config, CPU)
        stage, groups = joined.coordinate("pp"), [replica_group(config), joined.group("stage")]
        return trace(stages[stage], joined, groups, ["embed"] * stage)

    traces = run_ranks(body, ranks_of(config))
    check_state(traces, one_process["fp64"])
    check_clipped(traces, names)


def test_a_non_finite_gradient_on_one_rank_stops_all() -> None:
    config = MeshConfig(dp_shard=2, tp=2)

    def body(rank: int, world: int) -> bool:
        joined = join(config, CPU)
        run = Training(["rows", "cols", "norm"], lambda model: shard(model, joined))
        run.give_gradients(0)
        if rank == 3:
            run.gradients()["cols"][1, 2] = math.inf
        before = {name: g.clone() for name, g in run.gradients().items()}
        norm = clip_gradients(run.model.parameters(), MAX_NORM)
        after = run.gradients()
        return not norm.isfinite() and all(torch.equal(after[n], g) for n, g in before.items())

    assert all(run_ranks(body, 4))
