"""Offload on meshes: same gradients to the bit, and gathered or cut parameters never move."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from checkpointing.apply import ActivationCheckpointing
from checkpointing.offload import Offloader
from megacpp.config.schema import KEEP, CheckpointingPolicy, MeshConfig
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.parallel.parity import CPU, Run, Slices, batches_of, config_of, gradients, world_of
from tests.ranks import run_ranks

MESHES = {
    "fsdp": Run("plain", MeshConfig(dp_shard=2, reshard="always"), accum=2, dtype="fp32"),
    "tp": Run("plain", MeshConfig(dp_shard=1, tp=2), accum=2, dtype="fp32"),
    "pp": Run("plain", MeshConfig(dp_shard=1, pp=2), accum=4, dtype="fp32"),
}


def one_step(
    run: Run, rank: int, policy: CheckpointingPolicy
) -> tuple[Slices, ActivationCheckpointing]:
    config = dataclasses.replace(config_of(run), recompute=policy)
    world, ac = world_of(rank, run), ActivationCheckpointing(config, CPU)
    if ac.offloader is not None:  # small tensors, and all of them leave
        ac.offloader = Offloader(64, 1 << 26, CPU, window_bytes=0)
    model = build_model(config, world, ac)
    AccumulationBoundary(model, world, config).accumulate(batches_of(0, world, run))
    return gradients(model), ac


def body(rank: int, world_size: int, run: Run) -> list[tuple[int, int]]:
    """Bytes out and back, with offload of the arguments of regions, and of all saved tensors."""
    plain, _ = one_step(run, rank, dataclasses.replace(KEEP, rblock="none"))
    found: list[tuple[int, int]] = []
    for offload in ("block_inputs", "saved_tensors"):
        policy = dataclasses.replace(KEEP, offload=offload, ablock="full", fblock="full")  # type: ignore[arg-type]
        moved, ac = one_step(run, rank, policy)
        assert all(torch.equal(moved[n].local, plain[n].local) for n in plain), offload
        assert ac.offloader is not None
        traffic = ac.offloader.traffic
        found.append((traffic.out_bytes, traffic.back_bytes))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_and_traffic(mesh: str) -> None:
    run = MESHES[mesh]
    # One process with the same rows in each microbatch, of which it then has more.
    microbatches = run.accum * run.mesh.dp_shard
    alone = body(0, 1, dataclasses.replace(run, mesh=MeshConfig(dp_shard=1), accum=microbatches))
    found = run_ranks(functools.partial(body, run=run), 2, timeout_s=120)
    assert sum(blocks[0] for blocks, _ in found) > 0, "a stage may have no block that runs again"
    for blocks, everything in found:
        assert everything[0] > blocks[0]
        assert everything[0] == everything[1] and blocks[0] == blocks[1]
        if mesh == "fsdp":
            for ours, whole in zip((blocks, everything), alone, strict=True):
                assert 2 * ours[0] == whole[0], "no gathered parameter among what moved"
