"""Optimizer state in torch's own form, by torch's distributed checkpoints, between meshes.

A model of every letter is trained, saved with `get_optimizer_state_dict` and `dcp.save`, loaded on
the next mesh and saved again: four ranks of fsdp, fsdp x tp, one process, experts apart, replicas.
Every whole tensor must survive every move, in its dtype, and so must learning rates.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from megacpp.config.schema import MeshConfig
from megacpp.lessons.muon import build, ranks_of, wholes
from megacpp.model.hybrid import HybridLM
from optim.muon_adamw import MuonAdamW
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ROUTE = {
    "fsdp4": MeshConfig(dp_shard=4),
    "fsdp2 tp2": MeshConfig(dp_shard=2, tp=2),
    "one": MeshConfig(dp_shard=1),
    "efsdp2 ep2": MeshConfig(dp_shard=4, ep=2),
    "hsdp2x2": MeshConfig(dp_replicate=2, dp_shard=2),
}
RATE = 0.0123


def load(model: HybridLM, optimizer: MuonAdamW, source: Path, options: Any) -> None:
    content = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(content, checkpoint_id=source)
    set_optimizer_state_dict(model, optimizer, content["optim"], options=options)


def visit(
    rank: int, world: int, mesh: MeshConfig, source: Path | None, target: Path, flat: bool
) -> dict[str, Tensor]:
    """Trains, or loads over other values; saves; returns all whole tensors."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(mesh)
    for step in range(2):
        for p in model.parameters():
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + p.numel()))
            local = p.to_local() if isinstance(p, DTensor) else p
            p.grad = torch.full_like(p, 0.1) if local.numel() == 0 else p.detach() * (g.mean() + 1)
        optimizer.step()
    if source is None:
        for group in optimizer.param_groups:
            group["lr"] = RATE
    else:
        assert all(group["lr"] != RATE for group in optimizer.param_groups)
        for name, t in optimizer.state_tensors().items():
            t.fill_(-1.0 if not name.endswith("step") else 77.0)
        load(model, optimizer, source, options)
    assert [group["lr"] for group in optimizer.param_groups] == [RATE] * len(optimizer.param_groups)
    content = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(content, checkpoint_id=target)
    found = {k: t for k, t in wholes(model, optimizer).items() if k in optimizer.state_tensors()}
    optimizer.zero_grad()
    optimizer.step()  # the next step finds everything in place
    return found


@pytest.mark.parametrize("flat", [False, True], ids=["by group", "flat"])
def test_state_survives_every_move(tmp_path: Path, flat: bool) -> None:
    want: dict[str, Tensor] = {}
    source: Path | None = None
    for i, (name, mesh) in enumerate(ROUTE.items()):
        target = tmp_path / str(i)
        body = functools.partial(visit, mesh=mesh, source=source, target=target, flat=flat)
        size = ranks_of(mesh)
        of_ranks = [body(0, 1)] if size == 1 else run_ranks(body, size)
        want = want or of_ranks[0]
        for found in of_ranks:
            assert found.keys() == want.keys()
            for key, value in want.items():
                assert torch.equal(found[key], value), (name, key)
                assert found[key].dtype == value.dtype
        source = target
    kinds = {key.rpartition(".")[2]: value.dtype for key, value in want.items()}
    fp32 = torch.float32
    assert kinds == {
        "momentum": torch.bfloat16,
        "exp_avg": fp32,
        "exp_avg_sq": fp32,
        "step": fp32,
    }
    assert all(value.count_nonzero() for value in want.values())
