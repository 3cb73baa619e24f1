"""Gradient norm and clipping against torch's, on one rank and over shards and replicas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megacpp.torch_extras import local_part
from optim.clip import clip_gradients
from tests.ranks import run_ranks

SHAPES = [(7,), (5, 3), (1, 9), (16, 33), ()]


def module(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.ParameterList:
    """Parameters with gradients; one parameter has none."""
    g = torch.Generator().manual_seed(5)
    params = [
        nn.Parameter(torch.zeros(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(SHAPES)
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
    return nn.ParameterList([*params, nn.Parameter(torch.zeros(3))])


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_torch(dtype: torch.dtype, max_norm: float) -> None:
    ours, theirs = module(dtypes=(dtype,)), module(dtypes=(dtype,))
    norm = clip_gradients(ours.parameters(), max_norm)
    want = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    eps = torch.finfo(dtype).eps
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(want.item(), rel=4 * eps)
    for g, w in zip(grads(ours), grads(theirs), strict=True):
        assert (g - w).abs().max() <= 4 * eps * w.abs().max()
    if max_norm == 1e6:
        assert all(map(torch.equal, grads(ours), grads(module(dtypes=(dtype,)))))


def test_by_hand() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))])
    model[0].grad, model[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([2.0])
    assert clip_gradients(model.parameters(), 0.3).item() == pytest.approx(3.0)
    assert model[0].grad.tolist() == pytest.approx([0.1, 0.2], rel=1e-6)
    assert clip_gradients(model.parameters(), 0.0).item() == pytest.approx(
        0.3, rel=1e-6
    )  # only measured


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (100.0, 1.0), (2.5, 0.5)])
def test_the_loss_scale_is_divided_out_clipped_or_not(max_norm: float, factor: float) -> None:
    """Gradients of norm 5 of a loss times 1024."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    model[0].grad = 1024 * torch.tensor([3.0, 4.0])
    assert clip_gradients(model.parameters(), max_norm, loss_scale=1024.0).item() == 5.0
    want = factor * torch.tensor([3.0, 4.0])
    assert torch.allclose(grads(model)[0], want, rtol=1e-6, atol=0)


def test_mixed_dtypes_and_no_gradients() -> None:
    model = module(dtypes=(torch.float32, torch.float64, torch.bfloat16))
    want = torch.cat([g.double().flatten() for g in grads(model)]).norm().item()
    assert clip_gradients(model.parameters(), want / 2).item() == pytest.approx(want, rel=1e-6)
    assert clip_gradients(model.parameters(), 0.0).item() == pytest.approx(want / 2, rel=2.0**-8)
    assert clip_gradients(nn.Linear(2, 2).parameters(), 1.0).item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_are_reported_and_left(value: float) -> None:
    model = module()
    grads(model)[1][2, 1] = value
    before = [g.clone() for g in grads(model)]
    assert not clip_gradients(model.parameters(), 0.5).isfinite()
    for g, b in zip(grads(model), before, strict=True):
        assert torch.equal(g.nan_to_num(7, 7, 7), b.nan_to_num(7, 7, 7))


def test_squares_of_large_norms_do_not_overflow() -> None:
    """Four norms of 1.2e19 fit fp32, and so does their joint 2.4e19, but not its square."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
    for p in model:
        p.grad = torch.tensor([1.2e19])
    assert clip_gradients(model.parameters(), 1.0).item() == pytest.approx(2.4e19, rel=1e-6)
    assert grads(model)[0].item() == pytest.approx(0.5, rel=1e-6)


def test_replicas_shards_and_plain_tensors_count_once() -> None:
    """Two replicas of two shards, a DTensor on all ranks, and a plain tensor: every cell once."""

    def body(rank: int, world: int) -> tuple[float, list[Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model, reduced = module(), []
        ways = [
            [Replicate(), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate()] * 2,
            [Shard(0), Replicate()],
        ]
        params = []
        for p, way in zip(model, [*ways, None], strict=False):
            assert isinstance(p, nn.Parameter) and p.grad is not None
            if way is not None:
                grad = distribute_tensor(p.grad, mesh, way)
                p = nn.Parameter(distribute_tensor(p.data, mesh, way))
                p.grad = grad
            params.append(p)
        plain = dist.all_reduce
        dist.all_reduce = lambda t, **kw: (reduced.append(t.numel()), plain(t, **kw))
        norm = clip_gradients(nn.ParameterList(params), 0.5).item()
        assert reduced == [1], "one scalar crosses the ranks"
        full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
        return norm, full

    single = module()
    want = clip_gradients(single.parameters(), 0.5).item()
    for norm, full in run_ranks(body, 4):
        assert norm == pytest.approx(want, rel=1e-6)
        for g, w in zip(full, grads(single), strict=True):
            assert (g - w).abs().max() <= 1e-6 * w.abs().max()


def test_fsdp_shards_equal_torch_on_one_rank() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 7)).double()

    x_BD = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def body(rank: int, world: int) -> tuple[float, list[Tensor]]:
        model = build()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
        (model(x_BD[rank::world]).square().sum() * world).backward()  # FSDP2 divides by ranks
        norm = clip_gradients(model.parameters(), 0.5)
        return norm.item(), [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]

    model = build()
    model(x_BD).square().sum().backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for norm, full in run_ranks(body, 2):
        assert norm == pytest.approx(want, rel=1e-13)
        for g, p in zip(full, model.parameters(), strict=True):
            assert p.grad is not None
            assert (g - p.grad).abs().max() < 1e-13
    assert local_part(x_BD) is x_BD
