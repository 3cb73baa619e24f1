"""The ranks of a run as a DeviceMesh, or one process without a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacpp.config import MeshConfig
from megacpp.errors import config_error

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Attributes:
        mesh: axes `(dp_replicate, dp_shard)` or `(dp_shard,)`; None for one process, where no
            process group exists and nothing is sharded.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh axis; empty for one process."""
        if self.mesh is None:
            return {}
        names = self.mesh.mesh_dim_names or ()
        return dict(zip(names, self.mesh.shape, strict=True))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` over all ranks, in place (one all-reduce; none on one process)."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def close(self) -> None:
        """Waits for all ranks and ends the process group; safe on one process."""
        if self.mesh is not None and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def in_a_group() -> bool:
    """Whether this process has joined its peers."""
    return dist.is_initialized()


def world_size() -> int:
    """Ranks that torchrun started (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device(wanted: str) -> torch.device:
    """`auto` is this rank's GPU if the machine has one, else the CPU.

    Raises:
        ConfigError: more local ranks than GPUs, or no GPU where one is wanted.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not found):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= found:
        raise config_error(
            "train.device",
            wanted,
            f"local rank {index} needs a GPU of its own ({found} found)",
            "start one rank per GPU, or use --train.device cpu",
        )
    return torch.device("cuda", index)


def start(config: MeshConfig, device: torch.device) -> World:
    """Starts the process group (gloo on CPU, NCCL on GPU) and builds the mesh of a resolved config.

    One process starts nothing. `config.dp_shard` must be resolved (not -1).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() == 1:
        return World(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=own)
    return World(dist.get_rank(), dist.get_world_size(), device, build_mesh(config, device))


def build_mesh(config: MeshConfig, device: torch.device) -> DeviceMesh:
    """The data axes. With one shard per replica the replica axis takes the shards' place:

    FSDP2 skips its reduce-scatter, the seam for looking at gradients, on an axis of size 1.
    """
    if config.dp_replicate == 1 or config.dp_shard == 1:
        return init_device_mesh(
            device.type, (config.dp_replicate * config.dp_shard,), mesh_dim_names=("dp_shard",)
        )
    return init_device_mesh(
        device.type,
        (config.dp_replicate, config.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )


def micro_rows(rows: Sequence[int], world: World, device_batch_size: int) -> list[Sequence[int]]:
    """This rank's rows of each microbatch, from the global rows of one step.

    Microbatch m of rank r holds rows `[(m * size + r) * b, ... + b)`: any split of the same
    global rows into ranks and microbatches covers each row once.
    """
    stride = world.size * device_batch_size
    first = world.rank * device_batch_size
    return [rows[s + first : s + first + device_batch_size] for s in range(0, len(rows), stride)]
