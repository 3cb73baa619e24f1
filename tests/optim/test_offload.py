"""AdamW with moments on the host: bit-equal to the CPU's fused kernel, wherever weights live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megacpp.errors import ConfigError
from megacpp.torch_extras import local_part
from optim.adamw import adamw_update
from optim.initial_state import new_state
from optim.offload import new_offloaded_state, offloaded_update
from tests.ranks import run_ranks

GROUP: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7,), (64, 33), (1,), (0, 3), (2, 3, 4)]


def tensors(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in SHAPES]


def steps_on_the_host(params: list[Tensor], group: dict[str, Any], grads: list[list[Any]]) -> None:
    """Run the reference: fused AdamW on the CPU, on plain copies of local shards, copied back."""
    twins = [nn.Parameter(local_part(p.detach()).cpu().clone()) for p in params]
    states = [{"step": torch.zeros(()), **new_state(p, "fp32")} for p in twins]
    for some in grads:
        for twin, state, grad in zip(twins, states, some, strict=True):
            twin.grad = local_part(grad).cpu().clone()
            state["step"] += 1
        adamw_update(group, list(twins), states)
    for p, twin in zip(params, twins, strict=True):
        local_part(p.detach()).copy_(twin.detach())


@pytest.mark.parametrize("options", [{}, {"cautious": True}, {"lr": torch.tensor(0.02)}])
def test_equals_the_fused_kernel(options: dict[str, Any]) -> None:
    group = {**GROUP, **options}
    ours, theirs = ([nn.Parameter(t) for t in tensors(0)] for _ in range(2))
    states = [{"step": torch.zeros(()), **new_offloaded_state(p, force=True)} for p in ours]
    for step in (1, 2, 3):
        for p, state, grad in zip(ours, states, tensors(step), strict=True):
            p.grad = grad
            state["step"] += 1
        offloaded_update(group, list(ours), states)
        for p, grad in zip(ours, tensors(step), strict=True):
            assert p.grad is not None and torch.equal(p.grad, grad)
    steps_on_the_host(list(theirs), group, [list(tensors(step)) for step in (1, 2, 3)])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert a.numel() == 0 or not torch.equal(a, tensors(0)[SHAPES.index(tuple(a.shape))])
    offloaded_update(group, [], [])


def test_shards() -> None:
    def body(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))

        def place(t: Tensor) -> Tensor:
            return distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)

        ours, theirs = ([nn.Parameter(place(t)) for t in tensors(0)] for _ in range(2))
        states = [{"step": torch.zeros(()), **new_offloaded_state(p, force=True)} for p in ours]
        for p, state in zip(ours, states, strict=True):
            moment = state["exp_avg"]
            assert isinstance(moment, DTensor) and isinstance(p, DTensor)
            assert moment.shape == p.shape and moment.placements == p.placements
            p.grad = place(torch.ones(p.shape))
            state["step"] += 1
        offloaded_update(GROUP, list(ours), states)
        grads = [[place(torch.ones(p.shape)) for p in theirs]]
        steps_on_the_host(list(theirs), GROUP, grads)
        pairs = zip(ours, theirs, strict=True)
        return [torch.stack([(local_part(a) == local_part(b)).all() for a, b in pairs])]

    for (equal,) in run_ranks(body, 2):
        assert equal.all()


def test_a_cpu_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"^optim.adamw_state=cpu_offload: .*Fix: .*fp32"):
        new_state(nn.Parameter(torch.zeros(3)), "cpu_offload")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_a_gpu() -> None:
    ours, theirs = ([nn.Parameter(t.cuda()) for t in tensors(0)] for _ in range(2))
    states = [{"step": torch.zeros((), device="cuda"), **new_state(p, "cpu_offload")} for p in ours]
    for step in (1, 2, 3):
        for p, state, grad in zip(ours, states, tensors(step), strict=True):
            assert state["exp_avg"].device.type == "cpu" and state["exp_avg"].is_pinned()
            p.grad = grad.cuda()
            state["step"] += 1
        adamw_update(GROUP, list(ours), states)
    steps_on_the_host(list(theirs), GROUP, [list(tensors(step)) for step in (1, 2, 3)])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
