"""AdamW equals torch's own fused one, on plain parameters and on shards; cautious decay by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from megacpp.torch_extras import local_part
from optim.adamw import adamw_update
from optim.initial_state import new_state
from tests.ranks import run_ranks

SHAPES = [(7,), (5, 3), (1, 9), (64, 33), (2, 3, 4), (1,), (0, 3)]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in SHAPES]


class Stepper:
    """Minimal optimizer around `adamw_update`: holds state, counts steps."""

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        self.group, self.params = {**OPTIONS, **options}, params
        self.states = [{"step": torch.zeros(()), **new_state(p, "fp32")} for p in params]

    def step(self) -> None:
        active = [
            (p, s) for p, s in zip(self.params, self.states, strict=True) if p.grad is not None
        ]
        for _, state in active:
            state["step"] += 1
        adamw_update(self.group, [p for p, _ in active], [s for _, s in active])


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_torch_bit_for_bit(dtype: torch.dtype, tensor_lr: bool) -> None:
    ours, theirs = ([nn.Parameter(t) for t in tensors(0, dtype)] for _ in range(2))
    lr = torch.tensor(0.01) if tensor_lr else 0.01
    our = Stepper(ours, lr=lr, cautious=False)
    their = torch.optim.AdamW(theirs, **{**OPTIONS, "lr": lr}, fused=True)
    for step in range(5):
        for params in (ours, theirs):
            for i, (p, grad) in enumerate(zip(params, tensors(step + 1, dtype), strict=True)):
                p.grad = None if (i, step) == (2, 1) else grad  # one sleeps through one step
        our.step()
        their.step()
    for a, state, b in zip(ours, our.states, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in their.state[b].items():
            assert torch.equal(state[key], value), key


def test_parameters_of_two_dtypes_in_one_group() -> None:
    narrow, wide = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64))
    stepper = Stepper([narrow, wide])
    for p in (narrow, wide):
        p.grad = torch.full_like(p, 0.5)
    stepper.step()
    # By hand: decay to 1 - 0.01 * 0.1, and a first step of lr * sign (m / sqrt(v) = 1).
    assert torch.allclose(wide, torch.tensor(0.999 - 0.01, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(narrow.double(), wide, atol=1e-6)
    assert [s["exp_avg"].dtype for s in stepper.states] == [torch.float32, torch.float64]


def test_narrow_weights_are_refused() -> None:
    with pytest.raises(AssertionError, match="bfloat16"):
        new_state(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), "fp32")


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cautious_decay_entry_by_entry(dtype: torch.dtype, tensor_lr: bool) -> None:
    """Against scalar arithmetic; a third of the gradients is zero at first, so that u is too."""
    params = [nn.Parameter(t) for t in tensors(0, dtype)]
    lr = torch.tensor(0.01, dtype=torch.float64) if tensor_lr else 0.01
    stepper = Stepper(params, lr=lr, cautious=True, weight_decay=0.5)
    want = [[(w, 0.0, 0.0) for w in p.flatten().tolist()] for p in params]
    decayed = set()
    for step in (1, 2, 3):
        for i, (p, grad) in enumerate(zip(params, tensors(step, dtype), strict=True)):
            grad.flatten()[:: 3 if step == 1 else 10**6] = 0
            p.grad = grad
            for j, g in enumerate(grad.flatten().tolist()):
                w, m, v = want[i][j]
                m, v = 0.9 * m + (1 - 0.9) * g, 0.95 * v + (1 - 0.95) * g * g
                u = m / (1 - 0.9**step) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
                decay = 0.5 * w if u * w >= 0 else 0.0
                decayed.add((u > 0, u < 0, decay != 0))
                want[i][j] = (w - 0.01 * (u + decay), m, v)
        stepper.step()
    assert decayed >= {(a, not a, d) for a in (True, False) for d in (True, False)}
    assert (False, False, True) in decayed and (False, False, False) not in decayed
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    for p, state, rows in zip(params, stepper.states, want, strict=True):
        for got, column in ((p, 0), (state["exp_avg"], 1), (state["exp_avg_sq"], 2)):
            values = torch.tensor([row[column] for row in rows], dtype=torch.float64)
            distance = (got.detach().double().flatten() - values).abs()
            assert (distance <= limit * max([1.0, *map(abs, values.tolist())])).all()


def test_cautious_without_decay_is_the_fused_kernel() -> None:
    ours, theirs = ([nn.Parameter(t) for t in tensors(0, torch.float32)] for _ in range(2))
    for params, cautious in ((ours, True), (theirs, False)):
        stepper = Stepper(params, cautious=cautious, weight_decay=0.0)
        for p, grad in zip(params, tensors(1, torch.float32), strict=True):
            p.grad = grad
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shards_equal_one_device(dtype: torch.dtype, cautious: bool) -> None:
    """Uneven and empty shards, without any communication.

    The kernel computes the last elements of a shard one by one and the others by vectors, which
    may round a multiply-add differently: a few last places.
    """

    def train(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        params = [nn.Parameter(place(t)) for t in tensors(0, dtype)]
        stepper = Stepper(params, cautious=cautious)
        for step in range(3):
            for p, grad in zip(params, tensors(step + 1, dtype), strict=True):
                p.grad = place(grad)
            stepper.step()
        for p, state in zip(params, stepper.states, strict=True):
            assert type(state["exp_avg"]) is type(p.data)
            assert not state["exp_avg"].requires_grad
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
            assert torch.equal(g, w) or (g - w).abs().max() <= limit * w.abs().max()


def test_shards_have_the_bits_of_torch_on_the_same_shards() -> None:
    """torch.optim.AdamW(fused=True) on DTensors, which takes its dispatch for each parameter."""

    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))

        def cut(t: Tensor) -> Tensor:
            return distribute_tensor(t.clone(), mesh, [Shard(0)], src_data_rank=None)

        # torch's own wants a row on every rank
        wanted = [i for i, shape in enumerate(SHAPES) if shape[0] >= world]
        both = [[nn.Parameter(cut(tensors(0, torch.float32)[i])) for i in wanted] for _ in range(2)]
        ours, theirs = (
            Stepper(both[0], cautious=False),
            torch.optim.AdamW(both[1], **OPTIONS, fused=True),
        )
        for step in range(3):
            grads = tensors(step + 1, torch.float32)
            for params in both:
                for p, i in zip(params, wanted, strict=True):
                    p.grad = cut(grads[i])
            ours.step()
            theirs.step()
        for a, state, b in zip(both[0], ours.states, both[1], strict=True):
            assert torch.equal(local_part(a.detach()), local_part(b.detach()))
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(local_part(state[key]), local_part(theirs.state[b][key]))

    run_ranks(body, 2)
