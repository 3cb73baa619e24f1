"""Training state with every dtype and shape that matters, on any number of ranks."""

from __future__ import annotations

import torch
import torch._dynamo  # FSDP2 imports it; ranks that are forked afterwards needn't (1.5 s each)
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Toy(nn.Module):
    """Rows: 5 and 3 (uneven and, on four ranks, empty shards), 1 (empty on any other rank)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.last = nn.Linear(3, 1)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def toy_model(seed: int) -> Toy:
    """Return the same values on any number of ranks, sharded with FSDP2 if there are several."""
    torch.manual_seed(seed)
    model = Toy()
    model.get_buffer("counts").add_(seed)
    if world_size() > 1:
        mesh = init_device_mesh("cpu", (world_size(),))
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=mesh)
    return model


def toy_state(seed: int) -> dict[str, Tensor]:
    """Model and optimizer-like tensors: fp32, fp64, bf16, int64, bool, 0-dim, empty, strided."""
    model = toy_model(seed)
    state: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    state["model.counts"] = model.get_buffer("counts")
    draw = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        for kind, dtype in (
            ("momentum", torch.float32),
            ("second", torch.bfloat16),
            ("master", torch.float64),
        ):
            full = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(dtype)
            state[f"optim.{name}.{kind}"] = like(full, p)
        state[f"optim.{name}.step"] = torch.tensor(float(seed))
    state["optim.updates"] = torch.tensor(2**40 + seed)
    state["optim.flags"] = torch.tensor([True, False, seed % 2 == 0])
    state["optim.nothing"] = torch.empty(0, 4)
    state["optim.strided"] = torch.randn(3, 4, generator=draw).t()
    return state


def like(full: Tensor, p: Tensor) -> Tensor:
    """`full` sharded as `p` is."""
    if not isinstance(p, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    local = full[offset[0] : offset[0] + shape[0]].clone()
    return DTensor.from_local(
        local, p.device_mesh, p.placements, shape=full.shape, stride=full.stride()
    )


def local(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what this rank holds: all of a plain tensor, its shard of a DTensor."""
    return {
        name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in state.items()
    }


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in dtype, shape or any bit (NaN equals itself)."""
    assert a.keys() == b.keys()
    return [n for n in a if a[n].dtype != b[n].dtype or _bytes(a[n]) != _bytes(b[n])]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _bytes(t: Tensor) -> tuple[tuple[int, ...], bytes]:
    raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(t.shape), raw
