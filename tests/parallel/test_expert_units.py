"""FSDP2's units of experts: which dim their weights are cut along, and when they are fetched."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from megacpp.config.arguments import parse_run
from parallel.simulate.collective_log import CollectiveLog
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

FLAGS = "--model.pattern E --model.depth 1 --model.dim 32 --data.seq-len 32".split()


@pytest.mark.parametrize(
    ("experts", "dim"), [(8, 0), (12, 0), (4, 1)], ids=["each", "uneven", "fewer than ranks"]
)
def test_experts_are_cut_whole_unless_they_are_too_few(experts: int, dim: int) -> None:
    words = ["tiny", *FLAGS, "--model.moe.num-experts", str(experts), "--mesh.tp", "2"]
    config = as_trained(parse_run(words, 8).config)
    with fake_world(config, 8) as world:
        model = planned_model(config, world)
        experts_of = [p for name, p in model.named_parameters() if ".experts." in name]
        cut = [p.placements for p in experts_of if isinstance(p, DTensor)]
    assert len(cut) == 3 and all(found == (Shard(dim),) for found in cut), cut


def test_experts_are_fetched_before_their_rows_travel() -> None:
    """Their gather is issued with the block's: it hides behind the router and the dispatch."""
    config = as_trained(parse_run(["tiny", *FLAGS, "--mesh.ep", "2"], 4).config)
    with fake_world(config, 4) as world:
        model = planned_model(config, world)
        with fake_tensors(), CollectiveLog(world.meshes) as log:
            model.to_empty(device=torch.device("cpu")).train()
            FakeBoundary(model, world, config).accumulate([fake_batch(config)])
    first = [(call.kind, call.axis) for call in log.calls]
    assert first.index(("all_gather", "efsdp")) < first.index(("all_to_all", "ep")), first
