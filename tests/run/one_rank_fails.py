"""Run in which one rank raises while the others wait for it in a collective (test_failure.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megacpp.config.arguments import Resolved, parse_or_exit

RESOLVED = parse_or_exit("one_rank_fails.py")

import torch

from megacpp.run.failure import guarded
from megacpp.run.rank_store import RankStore
from parallel.start import pick_device, start


def main(resolved: Resolved, _: RankStore) -> None:
    world = start(resolved.config.mesh, pick_device("cpu"))
    for step in range(5):
        if step == 3 and world.rank == 1:
            torch.ones(2, 3) @ torch.ones(2, 3)
        world.sum(torch.ones(4), "world")
        if world.is_main:
            print("step", step, flush=True)


guarded(main, RESOLVED)
