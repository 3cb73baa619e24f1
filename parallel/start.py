"""Start of the ranks: their device, process group and meshes (mesh.py names the axes)."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacpp.config.environment import ranks_started
from megacpp.config.schema import MeshConfig
from megacpp.errors import config_error
from parallel.mesh import DENSE, World

TIMEOUT = timedelta(minutes=10)  # of a collective, where nothing watches over hangs
SPARSE = ("pp", "dp_replicate", "efsdp", "ep")


def world_size() -> int:
    """Ranks that torchrun started (1 without torchrun)."""
    return ranks_started(os.environ)


def pick_device(wanted: str) -> torch.device:
    """Return the device; `auto` is this rank's GPU if the machine has one, else the CPU.

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


def start(
    config: MeshConfig,
    device: torch.device,
    store: dist.Store | None = None,
    timeout: timedelta = TIMEOUT,
) -> World:
    """Start the process group (gloo on CPU, NCCL on GPU) and build the meshes.

    One process starts nothing. `config.dp_shard` must be resolved (not -1). All communicators of
    NCCL are made here: later only some ranks of a group may be there for its first message. So what
    a rank issues on one of them is carried out in that order, messages between two ranks too, and
    torch would warn of this in every pipeline.

    Args:
        config: degrees of the axes.
        device: of this rank.
        store: where the ranks meet; by default the one that the launcher's environment names.
        timeout: of a collective.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() == 1:
        return World(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if device.type == "cuda" else None
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    _allow_sockets()
    where: dict[str, Any] = {}
    if store is not None:
        where = {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size()}
    dist.init_process_group(backend, timeout=timeout, device_id=own, **where)
    return join(config, device, timeout)


def _allow_sockets() -> None:
    """Open as many files as the system lets this process: a group of gloo has one to each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system may grant less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def join(config: MeshConfig, device: torch.device, timeout: timedelta = TIMEOUT) -> World:
    """Return the world of this process in the default process group, which exists already."""
    meshes = build_meshes(config, device.type, timeout)
    return World(dist.get_rank(), dist.get_world_size(), device, meshes)


def build_meshes(
    config: MeshConfig, device_type: str, timeout: timedelta = TIMEOUT
) -> dict[str, DeviceMesh]:
    """All axes and views over the default process group.

    With one shard per replica the replica axis takes the shards' place: FSDP2 skips its
    reduce-scatter, in which gradients are counted and cleaned, on an axis of size 1.
    """
    c = config
    folded = c.dp_shard * c.cp * c.tp
    size = c.pp * c.dp_replicate * folded
    assert size == dist.get_world_size(), f"{config} on {dist.get_world_size()} ranks"
    assert folded % c.ep == 0, f"ep={c.ep} of {folded} ranks"
    world = init_device_mesh(device_type, (size,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp), DENSE)
    sparse = world._unflatten(0, (c.pp, c.dp_replicate, folded // c.ep, c.ep), SPARSE)
    meshes = {name: dense[name] for name in DENSE}
    meshes |= {name: sparse[name] for name in ("efsdp", "ep")}
    meshes["world"] = world
    meshes["batch"] = dense["dp_replicate", "dp_shard"]._flatten("batch")
    meshes["fsdp"] = dense["dp_shard", "cp"]._flatten("fsdp")
    meshes["loss"] = dense["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    meshes["row"] = dense["cp", "tp"]._flatten("row")
    meshes["folded"] = dense["dp_shard", "cp", "tp"]._flatten("folded")
    meshes["stage"] = dense["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage")
    replicas = meshes["dp_replicate"]
    if dist.get_backend() != "fake":
        # Their groups don't take over the timeout of the default one. Public from torch 2.15 on.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for mesh in meshes.values():
            set_timeout(timeout, mesh.get_group())
    meshes["shard"] = _with_replicas(replicas, meshes["fsdp"])
    meshes["expert_shard"] = _with_replicas(sparse["dp_replicate"], meshes["efsdp"])
    return meshes


def _with_replicas(replicas: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP2: one axis unless both are larger than 1."""
    if replicas.size() == 1:
        return shards
    return replicas if shards.size() == 1 else DeviceMesh._concatenate([replicas, shards])
