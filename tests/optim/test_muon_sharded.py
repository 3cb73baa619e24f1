"""Muon on FSDP2 shards equals Muon on one device, bit for bit (forked gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from optim.local import local_part
from optim.muon import Muon
from optim.newton_schulz import newton_schulz_flops
from optim.ownership import Item, Layout, MatrixView, Ownership, choose_owners, items_of
from tests.ranks import run_ranks

# Even and uneven cuts, ranks without a row, blocks across borders, more and fewer experts than
# ranks, and one matrix large enough to be solved alone.
MATRICES: list[tuple[tuple[int, ...], MatrixView]] = [
    ((8, 12), MatrixView()),
    ((12, 8), MatrixView()),
    ((7, 5), MatrixView()),
    ((2, 9), MatrixView()),
    ((130, 70), MatrixView()),
    ((22, 6), MatrixView((5, 5, 5, 3, 4))),
    ((12, 6), MatrixView((1,) * 12)),
    ((3, 6, 4), MatrixView(batched=True)),
    ((8, 2, 5), MatrixView(batched=True)),
]
STEPS = 3


def values(kind: str, number: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(1000 * number + 10 * step + len(kind))
    return torch.randn(MATRICES[number][0], generator=g, dtype=torch.float64).to(dtype)


def train(
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
    iteration_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Parameters and momenta after a few steps, this rank's part."""
    params = [nn.Parameter(place(values("w", i, dtype))) for i in range(len(MATRICES))]
    groups = [
        {"params": [p], "view": view, "lr": 0.02 + 0.01 * i}
        for i, (p, (_, view)) in enumerate(zip(params, MATRICES, strict=True))
    ]
    optimizer = Muon(groups, weight_decay=0.1, dtype=iteration_dtype)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = place(values("grad", i, dtype, step))
        optimizer.step()
    momenta = [optimizer.state[p]["momentum"] for p in params]
    assert all(type(m) is type(p.data) for m, p in zip(momenta, params, strict=True))
    return [t.detach() for t in (*params, *momenta)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_one_device_bit_for_bit(world: int, dtype: torch.dtype) -> None:
    def body(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))
        placed = train(dtype, lambda t: distribute_tensor(t, mesh, [Shard(0)]))
        return [t.full_tensor() for t in placed if isinstance(t, DTensor)]

    want = train(dtype, lambda t: t)
    for got in run_ranks(body, world):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)


def test_bf16_iterations_travel_in_bf16_and_are_equal_too() -> None:
    def body(rank: int, world: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (world,))
        sent: list[torch.dtype] = []
        plain = dist.all_to_all_single

        def spy(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(output.dtype)
            return plain(output, *args, **kwargs)

        dist.all_to_all_single = spy
        placed = train(
            torch.float32,
            lambda t: distribute_tensor(t, mesh, [Shard(0)]),
            torch.bfloat16,
        )
        assert sent == [torch.bfloat16] * (2 * STEPS), "two exchanges a step, narrow"
        return [t.full_tensor() for t in placed if isinstance(t, DTensor)]

    want = train(torch.float32, lambda t: t, torch.bfloat16)
    for got in run_ranks(body, 2):
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)


def test_replicas_and_replicated_parameters() -> None:
    """Two replicas of two shards; replicated parameters need no exchange."""

    def body(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        hybrid = train(torch.float64, lambda t: distribute_tensor(t, mesh, [Replicate(), Shard(0)]))
        copies = train(
            torch.float64, lambda t: distribute_tensor(t, mesh, [Replicate(), Replicate()])
        )
        assert all(isinstance(t, DTensor) for t in (*hybrid, *copies))
        return [t.full_tensor() for t in hybrid], [local_part(t) for t in copies]  # type: ignore[attr-defined]

    want = train(torch.float64, lambda t: t)
    for hybrid, copies in run_ranks(body, 4):
        for h, c, w in zip(hybrid, copies, want, strict=True):
            assert torch.equal(h, w) and torch.equal(c, w)


def test_a_model_under_fully_shard() -> None:
    """The parameters and gradients that FSDP2 itself makes, on uneven shards."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Linear(6, 15, bias=False), nn.Tanh(), nn.Linear(15, 7, bias=False)]
        return nn.Sequential(*layers).double()

    def run(model: nn.Module, x_BD: Tensor) -> None:
        optimizer = Muon(model.parameters(), view=MatrixView())
        for _ in range(STEPS):
            model(x_BD).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(rank: int, world: int) -> list[Tensor]:
        model = build()
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        for module in (model[0], model[2], model):
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        run(model, torch.ones(1, 6, dtype=torch.float64) * (rank == 0))
        return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]

    model = build()
    run(model, torch.ones(1, 6, dtype=torch.float64))
    for got in run_ranks(body, 2):
        for g, w in zip(got, model.parameters(), strict=True):
            assert torch.equal(g, w)


def test_no_exchange_where_every_matrix_lies_on_one_rank() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        stack = nn.Parameter(distribute_tensor(torch.randn(4, 3, 5), mesh, [Shard(0)]))
        heads = nn.Parameter(distribute_tensor(torch.randn(8, 5), mesh, [Shard(0)]))
        optimizer = Muon(
            [
                {"params": [stack], "view": MatrixView(batched=True)},
                {"params": [heads], "view": MatrixView((4, 4))},
            ]
        )
        for p in (stack, heads):
            p.grad = torch.ones_like(p)
        dist.all_to_all_single = None  # calling it would raise
        optimizer.step()

    run_ranks(body, 2)


def test_other_shardings_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        p = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)]))
        p.grad = torch.ones_like(p)
        with pytest.raises(AssertionError, match="sharded on dim 0"):
            Muon([p]).step()

    run_ranks(body, 2)


def test_items_by_hand() -> None:
    """Rows 0-9 on two ranks (5 each): blocks 2 2 | 4 (across) | 1 1."""
    items = items_of(7, (2, 2, 4, 1, 1), cols=3, bounds=((0, 5), (5, 10)))
    assert items == [
        Item(7, 0, 2, 2, 3, holders=(0, 0), owner=0),
        Item(7, 4, 1, 4, 3, holders=(0, 1), owner=0),
        Item(7, 8, 2, 1, 3, holders=(1, 1), owner=1),
    ]
    assert [item.moves for item in items] == [False, True, False]
    assert items[0].cost == 2 * newton_schulz_flops(2, 3)


def test_owners_by_hand() -> None:
    """Costs 100 (fixed on rank 0), then 60, 50, 30, 20 to move: ranks end at 130 and 130."""

    def item(number: int, sides: int, holders: tuple[int, int]) -> Item:
        return Item(number, 0, sides, 1, 1, holders, holders[0])  # cost: sides * flops(1, 1)

    items = [item(0, 10, (0, 0))]
    items += [item(i, n, (0, 1)) for i, n in enumerate((6, 3, 5, 2), start=1)]
    owned = choose_owners(items, 2)
    assert [i.owner for i in owned] == [0, 1, 0, 1, 1]
    assert [replace(i, owner=0) for i in owned] == [replace(i, owner=0) for i in items]


def test_the_work_is_spread_evenly() -> None:
    shapes = [(768, 768)] * 24 + [(3072, 768)] * 12 + [(768, 3072)] * 12 + [(1000, 640)] * 5
    for ranks in (2, 4, 8):
        items: list[Item] = []
        for i, (rows, cols) in enumerate(shapes):
            most = -(-rows // ranks)
            bounds = [(min(rows, r * most), min(rows, r * most + most)) for r in range(ranks)]
            items += items_of(i, (rows,), cols, bounds)
        load = [0] * ranks
        for item in choose_owners(items, ranks):
            load[item.owner] += item.cost
        assert max(load) < 1.06 * sum(load) / ranks


def test_every_element_is_sent_to_one_owner_and_comes_back() -> None:
    """Sizes of both exchanges agree between any two ranks, for uneven bounds."""
    bounds, heights = ((0, 5), (5, 6), (6, 6), (6, 17)), (4, 3, 9, 1)
    items = items_of(0, heights, 3, bounds)
    plans = [Ownership(items, {0: Layout(bounds, rank)}) for rank in range(4)]
    sizes = [[sum(piece.size for piece in pieces) for pieces in plan.sent] for plan in plans]
    assert sizes == [
        [sum(piece.size for piece in plans[to].received[rank]) for to in range(4)]
        for rank in range(4)
    ]
    staying = sum(item.count * item.rows for plan in plans for item in plan.staying)
    assert sum(map(sum, sizes)) == 3 * (17 - staying)
