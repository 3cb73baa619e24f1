"""Memory of a GPU that no tensor asks for: context, libraries, and what the allocator adds.

Constants, not measurements of this machine: megacpp/memory/calibration.py puts measured ones in
their place once a run has been recorded. On a CPU all of it is 0.
"""

from __future__ import annotations

from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.allocator import allocator_overhead

MIB = 1 << 20
# Driver context and loaded kernels of one process (Hopper, CUDA 12 and 13).
CONTEXT_BYTES = 640 * MIB
# Workspaces of cuBLAS and cuBLASLt on Hopper, a stream each for products and for collectives.
WORKSPACE_BYTES = 64 * MIB
# Channels and buffers of one NCCL communicator among a handful of peers.
COMMUNICATOR_BYTES = 192 * MIB


def on_gpu(config: Config) -> bool:
    """`auto` is a GPU here: who estimates for a CPU says so (`train.device=cpu`)."""
    return config.train.device != "cpu"


def runtime_bytes(config: Config, size: int) -> int:
    """Context, workspaces, and a communicator for every axis that has peers."""
    if not on_gpu(config):
        return 0
    return CONTEXT_BYTES + WORKSPACE_BYTES + communicators(config.mesh, size) * COMMUNICATOR_BYTES


def overhead_bytes(
    config: Config, tensors: int, beside: int, one_layer: int = 0
) -> tuple[int, int]:
    """What the allocator reserves beyond `tensors` bytes: expected, and at most.

    Args:
        beside: in pools of other streams; `one_layer`: of the fullest layer
            (megacpp/memory/allocator.py).
    """
    if not on_gpu(config):
        return 0, 0
    return allocator_overhead(tensors, config.memory.expandable_segments, beside, one_layer)


def communicators(mesh: MeshConfig, size: int) -> int:
    """Groups of ranks that send to each other: all of them, and one for each axis that is used."""
    if size == 1:
        return 0
    shards = mesh.dp_shard * mesh.cp
    used = (mesh.pp, mesh.dp_replicate, shards, mesh.cp, mesh.tp, mesh.ep)
    return 1 + sum(degree > 1 for degree in used)
