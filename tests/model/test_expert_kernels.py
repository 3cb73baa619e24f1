"""Grouping tokens by expert and the linear layers on groups: definitions, ties, exact rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.experts import grouped_mm
from megacpp.kernels.experts.copies import gather_rows, spread_rows
from megacpp.kernels.experts.grouped_mm import (
    CPU_ROWS,
    Counts,
    grouped_backend,
    outer_products,
    products,
    sizes_of,
)
from megacpp.kernels.experts.rows import (
    Groups,
    group_rows,
)
from megacpp.kernels.experts.without_slot import group_rows_to_capacity

FP64 = 1e-12  # two formulas of one sum in fp64; entries are of order 1 to 10


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def cotangent(x: Tensor, weight: Tensor) -> Tensor:
    """Of the output, the same in every dtype."""
    return randn(len(x), weight.shape[1], seed=9, dtype=torch.bfloat16).to(x)


def linear(x: Tensor, weight: Tensor, counts: Counts) -> list[Tensor]:
    """A linear layer per expert and its gradients, of the products that experts are made of."""
    grad = cotangent(x, weight)
    of_x = products(grad, weight, counts)
    return [products(x, weight.mT, counts), of_x, outer_products(grad, x, counts, len(weight))]


def reference(x: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    """The same by definition: one expert after another, under autograd."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    parts = zip(x.split(sizes_of(counts, len(x))), weight, strict=True)
    y = torch.cat([F.linear(rows, w) for rows, w in parts])
    return [y.detach(), *torch.autograd.grad(y, (x, weight), cotangent(x, weight))]


@pytest.mark.parametrize(
    "sizes", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0], [CPU_ROWS, 2 * CPU_ROWS + 7, 0, 1]]
)
@pytest.mark.parametrize("left_over", [0, 4])
def test_loop_is_the_definition(sizes: list[int], left_over: int) -> None:
    """Empty groups, one group with everything, slots left over (they are the last expert's)."""
    x, weight = randn(sum(sizes) + left_over, 6), randn(4, 5, 6, seed=1)
    counts = torch.tensor(sizes)
    got = linear(x, weight, counts)
    want = reference(x, weight, counts)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < FP64
    for e, size in enumerate(sizes[:-1]):
        assert size > 0 or not got[2][e].any()
    last = x[-1:] @ weight[-1].T
    assert left_over == 0 or (got[0][-1:] - last).abs().max() < FP64


def test_equal_groups_are_one_batched_product() -> None:
    x, weight = randn(4 * 7, 6), randn(4, 5, 6, seed=1)
    got = linear(x, weight, None)
    want = reference(x, weight, torch.full((4,), 7))
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < FP64


def test_grouped_kernel_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped product, where it runs without a GPU: bf16, empty and left-over slots.

    Both accumulate at least in fp32 and round each result once: 2^-8 of it, and 1e-5 for the order.
    """
    x, weight = randn(64, 16, dtype=torch.bfloat16), randn(3, 24, 16, seed=1, dtype=torch.bfloat16)
    counts = torch.tensor([16, 0, 32])
    want = reference(x.double(), weight.double(), counts)
    rules = {"loop": grouped_backend, "grouped_mm": lambda *shape: "grouped_mm"}
    for name, rule in rules.items():
        monkeypatch.setattr(grouped_mm, "grouped_backend", rule)
        for a, b in zip(linear(x, weight, counts), want, strict=True):
            assert a.dtype == torch.bfloat16, name
            assert ((a.double() - b).abs() <= 2.0**-8 * b.abs() + 1e-5).all(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_kernel_on_a_gpu() -> None:
    x = randn(4096, 256, dtype=torch.bfloat16).cuda()
    weight = (randn(8, 512, 256, seed=1) / 16).to(torch.bfloat16).cuda()
    counts = torch.tensor([512, 0, 16, 1024, 0, 800, 640, 1024]).cuda()
    want = reference(x.double(), weight.double(), counts)
    for a, b in zip(linear(x, weight, counts), want, strict=True):
        assert ((a.double() - b).abs() <= 2.0**-8 * b.abs() + 1e-4).all()


def test_backend_rule() -> None:
    assert grouped_backend("cuda", torch.bfloat16, 64, 32) == "grouped_mm"
    assert grouped_backend("cuda", torch.bfloat16, 64, 36) == "loop"
    assert grouped_backend("cuda", torch.float32, 64, 32) == "loop"
    assert grouped_backend("cpu", torch.bfloat16, 64, 32) == "loop"


def test_groups_by_hand() -> None:
    """Four tokens, two experts each, three experts: copies t0:(2,0) t1:(0,2) t2:(2,1) t3:(0,2)."""
    experts = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 2]])
    groups = group_rows(experts, 3)
    assert groups.token_S.tolist() == [0, 1, 3, 2, 0, 1, 2, 3]
    assert groups.counts_E is not None and groups.counts_E.tolist() == [3, 1, 4]
    assert groups.slot_KT.tolist() == [[4, 1, 6, 2], [0, 5, 3, 7]]

    padded = group_rows(experts, 3, multiple=4)
    assert padded.token_S.tolist() == [0, 1, 3, 0, 2, 0, 0, 0, 0, 1, 2, 3]
    assert padded.counts_E is not None and padded.counts_E.tolist() == [4, 4, 4]

    two = group_rows_to_capacity(experts, 3, capacity=2)  # t3 of expert 0, t2 and t3 of expert 2
    assert two.counts_E is None and two.token_S.tolist() == [0, 1, 2, 0, 0, 1]
    assert two.kept_KT is not None
    assert two.kept_KT.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert two.slot_KT[two.kept_KT].tolist() == [4, 1, 0, 5, 2]


def test_nothing_waits_for_the_counts() -> None:
    """On a device whose values can't be read: sizes follow from shapes."""
    experts = torch.empty(10, 2, dtype=torch.int64, device="meta")
    assert len(group_rows(experts, 4, multiple=16).token_S) == (20 + 4 * 15) // 16 * 16
    assert len(group_rows(experts, 64, multiple=16).token_S) == 20 * 16
    assert len(group_rows_to_capacity(experts, 4, capacity=3).token_S) == 12


@pytest.mark.parametrize("kind", ["exact", "padded", "capacity"])
def test_spread_and_gather_are_indexing(kind: str) -> None:
    experts = torch.rand(9, 4, generator=torch.Generator().manual_seed(3)).topk(2, dim=1).indices
    groups = {
        "exact": lambda: group_rows(experts, 4),
        "padded": lambda: group_rows(experts, 4, 8),
        "capacity": lambda: group_rows_to_capacity(experts, 4, 3),
    }[kind]()
    assert (groups.kept_KT is None) or not groups.kept_KT.all()
    results = []
    for spread, gather in ((spread_rows, gather_rows), (spread_by_indexing, gather_by_indexing)):
        x, w = randn(9, 5).requires_grad_(), randn(9, 2, seed=1).requires_grad_()
        rows = spread(x, groups)
        y = gather(rows.square() + 3.0, w, groups)
        results.append((rows, y, *torch.autograd.grad(y, (x, w), randn(9, 5, seed=2))))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < FP64


def spread_by_indexing(x_TD: Tensor, groups: Groups) -> Tensor:
    return x_TD[groups.token_S]


def gather_by_indexing(rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
    kept_KT = torch.ones_like(groups.slot_KT) if groups.kept_KT is None else groups.kept_KT
    return (rows_SD[groups.slot_KT] * (weights_TK.T * kept_KT)[..., None]).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (31, 10), (192, 96), (192, 384), (1024, 64)])
def test_a_row_does_not_know_its_group(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Bitwise the same result in every slot of groups of every size: what isolates documents.

    This is measured, not guaranteed: it holds for oneMKL with AVX-512, AVX2 and SSE4.2 code
    (MKL_ENABLE_INSTRUCTIONS) in products of 48 rows, and fails for some products of whole groups.
    """
    weight = randn(3, *shape, dtype=dtype)
    first = None
    for sizes in ([1, 0, 0], [2, 1, 5], [4, 7, 3], [0, 0, 11]):
        counts = CPU_ROWS * torch.tensor(sizes)
        x = randn(1, shape[1], seed=1, dtype=dtype).expand(int(counts.sum()), -1).contiguous()
        y = products(x, weight[:1].expand(3, -1, -1).mT, counts)
        d_y = randn(1, shape[0], seed=2, dtype=dtype).expand_as(y).contiguous()
        grad = products(d_y, weight[:1].expand(3, -1, -1), counts)
        first = first or (y[0], grad[0])
        assert (y == first[0]).all() and (grad == first[1]).all(), sizes
