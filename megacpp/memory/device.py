"""Memory of a GPU outside of tensors: context, libraries, and the allocator's overhead.

The figures are constants, not measurements of this machine: megacpp/memory/calibration.py replaces
them once a run has been recorded. On a CPU all of them are 0.
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
    """Return whether the estimate is for a GPU; `auto` is, only `train.device=cpu` is not."""
    return config.train.device != "cpu"


def runtime_bytes(config: Config, size: int) -> int:
    """Return bytes of context, workspaces, and a communicator for every axis with peers."""
    if not on_gpu(config):
        return 0
    return CONTEXT_BYTES + WORKSPACE_BYTES + communicators(config.mesh, size) * COMMUNICATOR_BYTES


def overhead_bytes(
    config: Config, tensors: int, beside: int, one_layer: int = 0
) -> tuple[int, int]:
    """Return bytes that the allocator reserves beyond `tensors` bytes: expected, and at most.

    Args:
        config: says whether segments are expandable.
        tensors: bytes of tensors at the fullest moment.
        beside: bytes in pools of other streams (megacpp/memory/allocator.py).
        one_layer: bytes of the fullest layer.
    """
    if not on_gpu(config):
        return 0, 0
    return allocator_overhead(tensors, config.memory.expandable_segments, beside, one_layer)


def communicators(mesh: MeshConfig, size: int) -> int:
    """Return the number of process groups: one of all ranks, and one for each axis in use."""
    if size == 1:
        return 0
    shards = mesh.dp_shard * mesh.cp
    used = (mesh.pp, mesh.dp_replicate, shards, mesh.cp, mesh.tp, mesh.ep)
    return 1 + sum(degree > 1 for degree in used)
