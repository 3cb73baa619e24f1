"""Muon on a small model of any mesh, and on matrices of any shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp.config.schema import Config, MeshConfig, PrecisionConfig
from megacpp.lessons.mesh_models import models
from megacpp.model.hybrid import HybridLM
from optim.build import build_optimizer
from optim.muon_adamw import MuonAdamW
from optim.ownership import MatrixView
from parallel.build import build_model
from parallel.mesh import World
from parallel.start import join

CPU = torch.device("cpu")
MARKS = {"alltoall_base_": ">", "_fused_adamw_": "A", "baddbmm": "n"}  # of operators
Shapes = Sequence[tuple[int, ...]]


def ranks_of(mesh: MeshConfig) -> int:
    """Return the number of ranks of a mesh."""
    return mesh.dp_replicate * mesh.dp_shard * mesh.tp


def build(mesh: MeshConfig) -> tuple[HybridLM, MuonAdamW]:
    """Return a small model of every letter on a mesh, and its optimizer."""
    config = Config(model=models()["plain"], mesh=mesh, precision=PrecisionConfig("fp32"))
    world = World(0, 1, CPU) if ranks_of(mesh) == 1 else join(mesh, CPU)
    model = build_model(config, world)
    return model, build_optimizer(model, config, world.holders)


def wholes(model: HybridLM, optimizer: MuonAdamW) -> dict[str, Tensor]:
    """Return parameters and optimizer state, each whole."""
    own = dict(model.named_parameters()) | optimizer.state_tensors()
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in own.items()
    }


class MuonCalls(TorchDispatchMode):
    """Order of what an optimizer step calls, and the bytes that it sends to other ranks.

        with MuonCalls() as seen:
            optimizer.step()
        print(seen.order, seen.sent)

    Attributes:
        order: `>` for each all-to-all, `n` for Newton-Schulz, `A` for AdamW; of several equal
            calls in a row only all-to-alls are repeated.
        sent: bytes of all-to-alls without those that stay on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order, self.sent = "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call, and make it."""
        mark = MARKS.get(func.overloadpacket.__name__, "")
        if mark == ">":
            sent, sizes = args[1], list(args[4])
            del sizes[dist.get_rank()]
            self.sent += sent.itemsize * sum(sizes)
        if mark == ">" or mark != self.order[-1:]:
            self.order += mark
        return func(*args, **(kwargs or {}))


def matrices_by_rank(optimizer: MuonAdamW, ranks: int) -> list[str]:
    """Return the matrices that each rank orthogonalises, by the names of their parameters.

    Brackets hold those that stay where they are, with their number.
    """
    momenta = [name for name in optimizer.state_tensors() if name.endswith(".momentum")]
    names = [
        name.removesuffix(".momentum").split("mixer.")[-1].removesuffix(".weight")
        for name in momenta
    ]
    found: list[list[str]] = [[] for _ in range(ranks)]
    for exchange in optimizer.plan().exchanges:
        for job in exchange.jobs:
            name = names[job.parameter]
            for rank in (job.owner,) if job.moves else job.holders:
                found[rank].append(name if job.moves else f"({job.count} {name})")
    return [" ".join(own) for own in found]


def optimizer_of(
    shapes: Shapes, mesh: DeviceMesh | None, placements: Sequence[Any] = (), **settings: Any
) -> MuonAdamW:
    """Return Muon over zeros with gradients; every stack is one of experts."""
    params = []
    for shape in shapes:
        w, g = torch.zeros(shape), torch.randn(shape)
        if mesh is not None:
            w, g = (distribute_tensor(t, mesh, placements) for t in (w, g))
        p = nn.Parameter(w)
        p.grad = g
        params.append(p)
    views = [MatrixView(batched=len(shape) == 3) for shape in shapes]
    return MuonAdamW([{"params": params, "views": views, "algorithm": "muon"}], **settings)


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a process group in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
