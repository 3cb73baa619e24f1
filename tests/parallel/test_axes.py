"""Ranks of every derived axis, by hand: whose sums a loss, a row or a stage is."""

from __future__ import annotations

from itertools import product

import pytest
import torch.distributed as dist

from megacpp.config.schema import Config, MeshConfig
from parallel.simulate.fake import fake_world

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DERIVED = {
    "batch": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "row": ("cp", "tp"),
    "folded": ("dp_shard", "cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
PLACES = list(product(range(2), repeat=len(AXES)))  # coordinates of 32 ranks, in order


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_a_derived_axis_has_the_ranks_that_differ_along_it(rank: int) -> None:
    mesh = MeshConfig(**dict.fromkeys(AXES, 2))
    with fake_world(Config(mesh=mesh), len(PLACES), rank) as world:
        found = {axis: dist.get_process_group_ranks(world.group(axis)) for axis in DERIVED}
        degrees = {axis: world.degree(axis) for axis in DERIVED}
    for axis, over in DERIVED.items():
        fixed = [i for i, name in enumerate(AXES) if name not in over]
        ours = [
            other
            for other, place in enumerate(PLACES)
            if all(place[i] == PLACES[rank][i] for i in fixed)
        ]
        assert (found[axis], degrees[axis]) == (ours, 2 ** len(over)), axis
