"""Models with optimizers on any mesh, filled with values that depend on name and place alone.

What is saved, loaded or exported on one mesh must be what one process holds, so every tensor gets
values that are a function of its name and of the global index: no mesh is needed to know them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping

import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from megacpp.blocks.mtp.config import MTPConfig
from megacpp.config.schema import Config, MeshConfig, ModelConfig, OptimConfig, PrecisionConfig
from megacpp.model.init import Normal, Slice, initialise, tensor_key, uniform, whole
from megacpp.state.tensors import model_tensors
from optim.build import build_optimizer
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.start import join
from tests.model.small import small

CPU = torch.device("cpu")


def model_config(experts: int = 4, tied: bool = False, ahead: int = 0) -> ModelConfig:
    """Two E blocks on different stages; sizes divide by four, what is left of them doesn't."""
    base = small("AEME")
    return dataclasses.replace(
        base,
        vocab_size=44,
        tie_embeddings=tied,
        mtp=MTPConfig(depths=ahead, hidden_dim=24),
        attention=dataclasses.replace(base.attention, num_kv_heads=4),
        moe=dataclasses.replace(base.moe, num_experts=experts, shared_hidden_dim=20),
    )


def config_of(mesh: MeshConfig, model: ModelConfig) -> Config:
    return Config(
        model=model, mesh=mesh, precision=PrecisionConfig("fp32"), optim=OptimConfig(name="adamw")
    )


def world_of(mesh: MeshConfig, world: int) -> World:
    return World(0, 1, CPU) if world == 1 else join(mesh, CPU)


def part(t: Tensor) -> Slice:
    return shard_slice(t) if isinstance(t, DTensor) else whole(t)


def state_of(config: Config, world: World) -> dict[str, Tensor]:
    """Model and optimizer by the names under which a run saves them."""
    model = build_model(config, world)
    tensors = {f"model.{name}": t for name, t in model_tensors(model).items()}
    state = build_optimizer(model, config).state_tensors()
    return tensors | {f"optim.{name}": t for name, t in state.items()}


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Values by name and global index."""
    for name, t in tensors.items():
        if t.dim() == 0:
            t.fill_(float(uniform(torch.tensor(seed), tensor_key(seed, name))))
        else:
            initialise_one(name, t, seed)


def initialise_one(name: str, t: Tensor, seed: int) -> None:
    holder = torch.nn.Module()
    holder.register_buffer("values", t.detach())
    initialise(holder, {"values": Normal(1.0)}, tensor_key(seed, name), part)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of every whole tensor; every rank that holds a part must call it."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {}
    for name, t in tensors.items():
        full = (t.full_tensor() if isinstance(t, DTensor) else t).detach().contiguous()
        content = full.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(f"{full.dtype} {full.shape}".encode() + content).hexdigest()
    return found


def merged(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """Digests of all ranks' tensors; those that several ranks hold must be equal."""
    found: dict[str, str] = {}
    for of_rank in of_ranks:
        for name, digest in of_rank.items():
            assert found.setdefault(name, digest) == digest, name
    return found
