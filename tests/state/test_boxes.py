"""Shards that placements describe are those that ranks hold, by value.

FSDP2 shards what an inner axis has sharded, which placements write as `_StridedShard`. Here tensors
are sharded by scattering them, so no offset was computed before they are saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megacpp.config.schema import MeshConfig
from megacpp.errors import CheckpointError
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint
from parallel.mesh import World
from parallel.start import join
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = [(rows, 6) for rows in (2, 4, 6, 10, 14, 18)] + [(4,), (6, 1, 2)]
MESHES = {
    "fsdp2 tp2": MeshConfig(dp_shard=2, tp=2),
    "replicas2 tp2": MeshConfig(dp_replicate=2, dp_shard=1, tp=2),
    "efsdp2 ep2": MeshConfig(dp_shard=4, ep=2),
    "replicas2 efsdp1 ep2": MeshConfig(dp_replicate=2, dp_shard=2, ep=2),
}


def whole_tensors() -> dict[str, tuple[Tensor, Shard | Replicate, int]]:
    """Values, placement inside, dim that FSDP2 cuts: evenly, unevenly, into empty parts."""
    found: dict[str, tuple[Tensor, Shard | Replicate, int]] = {}
    for shape in SHAPES:
        full = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
        name = "x".join(map(str, shape))
        found |= {f"rows {name}": (full, Shard(0), 0), f"whole {name}": (full, Replicate(), 0)}
        if len(shape) == 2:
            found[f"columns {name}"] = (full, Shard(1), 0)
    stack = torch.arange(1.0, 1.0 + 4 * 4 * 3).view(4, 4, 3)
    return found | {"stack": (stack, Shard(0), 1)}


def cut(world: World, axis: str, full: Tensor, inside: Shard | Replicate, dim: int) -> DTensor:
    """Return a tensor scattered over `axis`, then sharded by FSDP2."""
    module = nn.Module()
    cut_inside = distribute_tensor(full, world.meshes[axis], [inside])
    module.register_parameter("p", nn.Parameter(cut_inside))
    mesh = world.meshes["shard" if axis == "tp" else "expert_shard"]
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    p = module._parameters["p"]
    assert isinstance(p, DTensor)
    return p


@pytest.mark.parametrize("name", MESHES)
def test_boxes_by_value(tmp_path: Path, name: str) -> None:
    mesh = MESHES[name]
    axis = "tp" if mesh.tp > 1 else "ep"  # the one that cuts first

    def body(rank: int, size: int) -> set[str]:
        world = join(mesh, CPU)
        tensors = {n: cut(world, axis, *args) for n, args in whole_tensors().items()}
        save_checkpoint(tmp_path, 0, tensors, {}, keep=1)
        before = {name: t.to_local().detach().clone() for name, t in tensors.items()}
        for t in tensors.values():
            t.to_local().detach().zero_()
        load_checkpoint(tmp_path / "step-000000", tensors)
        assert all(torch.equal(t.to_local(), before[name]) for name, t in tensors.items())
        return {str(t.placements[-2:]) for t in tensors.values()}

    placements = set().union(*run_ranks(body, mesh.dp_replicate * mesh.dp_shard * mesh.tp))
    strided = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert placements >= {strided, "(Shard(dim=0), Shard(dim=1))", "(Shard(dim=1), Shard(dim=0))"}
    back = {name: torch.zeros_like(full) for name, (full, *_) in whole_tensors().items()}
    load_checkpoint(tmp_path / "step-000000", back)
    for name, (full, *_) in whole_tensors().items():
        assert torch.equal(back[name], full), name


def test_boxes_that_are_not_as_said_are_refused(tmp_path: Path) -> None:
    """Nine rows on two inner ranks are 5 and 4, four shards of these 2, 2, 1, 0 and 1, 1, 1, 1.

    Read from the left (torch 2.13), the placements give the last row to the wrong inner rank.
    """

    def body(rank: int, size: int) -> list[str]:
        world = join(MeshConfig(dp_shard=4, tp=2), CPU)
        wrong = cut(world, "tp", torch.arange(9.0), Shard(0), 0)
        errors = []
        with pytest.raises(CheckpointError) as saving:
            save_checkpoint(tmp_path, 1, {"x": wrong}, {}, keep=1)
        errors.append(str(saving.value))
        path = save_checkpoint(tmp_path, 2, {"x": torch.zeros(9)}, {}, keep=1)
        with pytest.raises(CheckpointError) as loading:
            load_checkpoint(path, {"x": wrong})
        return [*errors, str(loading.value)]

    saving, loading = zip(*run_ranks(body, 8), strict=True)
    for lines in (saving, loading):
        assert len(set(lines)) == 1 and "\n" not in lines[0]
        assert "x of [9] is (0,) under (_StridedShard(dim=0, sf=2), Shard(dim=0))" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000002"]
