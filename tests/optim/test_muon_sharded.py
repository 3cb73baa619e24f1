"""Muon on shards equals Muon on one device, bit for bit (forked gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megacpp.torch_extras import local_part
from optim.initial_state import Width
from optim.muon_adamw import MuonAdamW
from optim.ownership import MatrixView
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


def muon(params: list[nn.Parameter], **settings: Any) -> dict[str, Any]:
    return {"params": params, "algorithm": "muon", **settings}


def train(
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
    wire: Width = "auto",
    bucket_bytes: int = 1 << 20,
) -> list[Tensor]:
    """Parameters and momenta after a few steps, this rank's part."""
    params = [nn.Parameter(place(values("w", i, dtype))) for i in range(len(MATRICES))]
    groups = [
        muon([p], view=view, lr=0.02 + 0.01 * i, weight_decay=0.1)
        for i, (p, (_, view)) in enumerate(zip(params, MATRICES, strict=True))
    ]
    optimizer = MuonAdamW(groups, muon_width=wire, bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = place(values("grad", i, dtype, step))
        optimizer.step()
    momenta = [optimizer.state[p]["momentum"] for p in params]
    assert all(type(m) is type(p.data) for m, p in zip(momenta, params, strict=True))
    return [t.detach() for t in (*params, *momenta)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_device_bit_for_bit(world: int) -> None:
    """Rows over all ranks, in one wave and in many."""
    settings = [
        (dtype, wire, bucket)
        for dtype, wire in (
            (torch.float64, "auto"),
            (torch.float32, "fp32"),
            (torch.float32, "bf16"),
        )
        for bucket in (1 << 20, 64)
    ]

    def body(rank: int, world: int) -> list[list[Tensor]]:
        mesh = init_device_mesh("cpu", (world,))
        found = []
        for dtype, wire, bucket in settings:
            placed = train(dtype, lambda t: distribute_tensor(t, mesh, [Shard(0)]), wire, bucket)
            found.append([t.full_tensor() for t in placed if isinstance(t, DTensor)])
        return found

    want = [train(dtype, lambda t: t, wire) for dtype, wire, _ in settings]
    for of_rank in run_ranks(body, world):
        for got, wanted in zip(of_rank, want, strict=True):
            for g, w in zip(got, wanted, strict=True):
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
            "bf16",
        )
        assert sent == [torch.bfloat16] * (2 * STEPS), "two exchanges a step, narrow"
        return [t.full_tensor() for t in placed if isinstance(t, DTensor)]

    want = train(torch.float32, lambda t: t, "bf16")
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
    """Use parameters and gradients that FSDP2 itself makes, on uneven shards."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Linear(6, 15, bias=False), nn.Tanh(), nn.Linear(15, 7, bias=False)]
        return nn.Sequential(*layers).double()

    def run(model: nn.Module, x_BD: Tensor) -> None:
        optimizer = MuonAdamW([muon(list(model.parameters()))])
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


def test_a_model_under_parallelize_module_and_fully_shard() -> None:
    """torch's own column and row parallelism, then FSDP2: rows are cut twice, by strided shards."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False)]
        return nn.Sequential(*layers).double()

    def step(model: nn.Module, place: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        """Gradients by hand: how torch sums them over meshes is not what this is about."""
        view = MatrixView((5, 4, 3))  # of the first; heads lie across the borders
        optimizer = MuonAdamW(
            [muon(list(model.parameters()), views=[view, MatrixView()], weight_decay=0.1)]
        )
        g = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            for p in model.parameters():
                p.grad = place(torch.randn(p.shape, generator=g, dtype=p.dtype), p)
            optimizer.step()

    def body(rank: int, world: int) -> tuple[list[str], list[Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        model = build()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh["fsdp"])
        step(model, lambda g, p: distribute_tensor(g, p.device_mesh, p.placements))  # type: ignore[attr-defined]
        params = list(model.parameters())
        kinds = [str(p.placements) for p in params]  # type: ignore[attr-defined]
        return kinds, [p.full_tensor() for p in params]  # type: ignore[attr-defined]

    model = build()
    step(model, lambda g, p: g)
    for kinds, got in run_ranks(body, 4):
        assert "_StridedShard" in kinds[0] and "dim=1" in kinds[1], kinds
        for g, w in zip(got, model.parameters(), strict=True):
            assert torch.equal(g, w)


def test_no_exchange_where_every_matrix_lies_on_one_rank() -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        stack = nn.Parameter(distribute_tensor(torch.randn(4, 3, 5), mesh, [Shard(0)]))
        heads = nn.Parameter(distribute_tensor(torch.randn(8, 5), mesh, [Shard(0)]))
        optimizer = MuonAdamW(
            [muon([stack, heads], views=[MatrixView(batched=True), MatrixView((4, 4))])]
        )
        for p in (stack, heads):
            p.grad = torch.ones_like(p)
        before = heads.to_local().clone()
        dist.all_to_all_single = None  # calling it would raise
        optimizer.step()
        assert not torch.equal(heads.to_local(), before)

    run_ranks(body, 2)


def test_unreduced_parameters_and_missing_groups_are_refused() -> None:
    """Four of eight ranks hold a matrix cut twice, and nobody gave Muon their group."""

    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        inner = mesh["fsdp", "tp"]
        p = nn.Parameter(distribute_tensor(torch.randn(4, 6), inner, [Shard(0), Shard(1)]))
        p.grad = torch.ones_like(p)
        first = 4 * (rank // 4)
        message = rf"the process group of \['fsdp', 'tp'\]: ranks \[{first}, .*{first + 3}\]"
        with pytest.raises(AssertionError, match=message):
            MuonAdamW([muon([p])])
        partial = DTensor.from_local(torch.ones(4, 6), inner, [Partial(), Replicate()])
        p = nn.Parameter(partial)
        p.grad = torch.ones_like(p)
        with pytest.raises(AssertionError, match="Partial"):
            MuonAdamW([muon([p])])

    run_ranks(body, 8)


def test_ranks_that_disagree_are_told_at_once() -> None:
    """Different parameters, orders or settings would make ranks wait for each other."""

    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        shapes = [(4, 6), (8, 6)]
        for mine, settings in (
            (shapes if rank else shapes[::-1], {}),
            (shapes[: 1 + rank], {}),
            (shapes, {"bucket_bytes": 64 + rank}),
        ):
            halves = [torch.randn(rows // world, cols) for rows, cols in mine]
            params = [nn.Parameter(DTensor.from_local(t, mesh, [Shard(0)])) for t in halves]
            with pytest.raises(AssertionError, match=r"ranks \[0, 1\] made different plans"):
                MuonAdamW([muon(params)], **settings)

    run_ranks(body, 2)


def test_a_gradient_that_only_some_ranks_have_hangs_nobody() -> None:
    """That matrix is orthogonalised with zeros in the missing places; others don't notice."""

    def body(rank: int, world: int) -> tuple[list[bool], list[Tensor]]:
        mesh = init_device_mesh("cpu", (world,))
        params = [nn.Parameter(distribute_tensor(w.clone(), mesh, [Shard(0)])) for w in weights]
        optimizer = MuonAdamW([muon(params, weight_decay=0.1)])
        for p, g in zip(params, grads, strict=True):
            p.grad = distribute_tensor(g, mesh, [Shard(0)])
        if rank == 1:
            params[1].grad = None
        before = [local_part(p.detach()).clone() for p in params]
        optimizer.step()
        after = [local_part(p.detach()) for p in params]
        moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        return moved, [t.full_tensor() for t in params]  # type: ignore[attr-defined]

    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 6, generator=g) for _ in range(2)]
    grads = [torch.randn(4, 6, generator=g) for _ in range(2)]
    zeroed = torch.cat([grads[1][:2], torch.zeros(2, 6)])
    params = [nn.Parameter(w.clone()) for w in weights]
    for p, grad in zip(params, (grads[0], zeroed), strict=True):
        p.grad = grad
    MuonAdamW([muon(params, weight_decay=0.1)]).step()
    (moved0, got0), (moved1, _) = run_ranks(body, 2)
    assert moved0 == [True, True] and moved1 == [True, False]
    assert torch.equal(got0[0], params[0]) and torch.equal(got0[1][:2], params[1][:2])
    assert torch.equal(got0[1][2:], weights[1][2:])
