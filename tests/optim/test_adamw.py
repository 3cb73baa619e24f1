"""AdamW equals torch's own fused one, on plain parameters and on shards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from optim.adamw import AdamW
from tests.ranks import run_ranks

SHAPES = [(7,), (5, 3), (1, 9), (64, 33), (2, 3, 4), (1,)]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in SHAPES]


def grouped(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_torch_bit_for_bit(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(t) for t in tensors(0, dtype)] for _ in range(2))
    our, their = (
        AdamW(grouped(ours), **OPTIONS),
        torch.optim.AdamW(grouped(theirs), **OPTIONS, fused=True),
    )
    for step in range(5):
        for params in (ours, theirs):
            for i, (p, grad) in enumerate(zip(params, tensors(step + 1, dtype), strict=True)):
                p.grad = None if (i, step) == (2, 1) else grad  # one sleeps through one step
        our.step()
        their.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in their.state[b].items():
            assert torch.equal(our.state[a][key], value), key
    assert our.state[ours[2]]["step"] == 4 and our.state[ours[0]]["step"] == 5


def test_parameters_of_two_dtypes_in_one_group() -> None:
    narrow, wide = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64))
    optimizer = AdamW([narrow, wide], **OPTIONS)
    for p in (narrow, wide):
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    # By hand: decay to 1 - 0.01 * 0.1, and a first step of lr * sign (m / sqrt(v) = 1).
    assert torch.allclose(wide, torch.tensor(0.999 - 0.01, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(narrow.double(), wide, atol=1e-6)


def test_loaded_state_goes_on_counting() -> None:
    def run(optimizer: AdamW, params: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            for p, grad in zip(params, tensors(step + 1, torch.float64), strict=True):
                p.grad = grad
            optimizer.step()

    params = [nn.Parameter(t) for t in tensors(0, torch.float64)]
    optimizer = AdamW(grouped(params), **OPTIONS)
    run(optimizer, params, range(2))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    fresh = AdamW(grouped(others), **OPTIONS)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, range(2, 4))
    run(fresh, others, range(2, 4))
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other) and fresh.state[other]["step"] == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shards_equal_one_device(dtype: torch.dtype) -> None:
    """Uneven and empty shards, without any communication.

    The kernel computes the last elements of a shard one by one and the others by vectors, which
    may round a multiply-add differently: a few last places.
    """

    def train(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        params = [nn.Parameter(place(t)) for t in tensors(0, dtype)]
        optimizer = AdamW(grouped(params), **OPTIONS)
        for step in range(3):
            for p, grad in zip(params, tensors(step + 1, dtype), strict=True):
                p.grad = place(grad)
            optimizer.step()
        assert all(type(optimizer.state[p]["exp_avg"]) is type(p.data) for p in params)
        return [p.detach() for p in params]

    def body(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))
        with CommDebugMode() as comms:
            placed = train(lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None))
        assert comms.get_total_counts() == 0
        return [t.full_tensor() for t in placed if isinstance(t, DTensor)]

    want = train(lambda t: t)
    limit = 4 * torch.finfo(dtype).eps
    for got in run_ranks(body, 2):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert (g - w).abs().max() <= limit * w.abs().max()
