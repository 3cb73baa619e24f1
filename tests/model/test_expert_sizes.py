"""Groups and products whose sizes the host knows: the same as those it doesn't."""

from __future__ import annotations

import pytest
import torch

from megacpp.kernels.experts.copies import group_rows_of_sizes, spread_rows
from megacpp.kernels.experts.rows import group_rows, sum_rows
from tests.model.test_expert_kernels import linear, randn

EXPERTS = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 2], [2, 0]])  # 4, 1 and 5 of 3, none of 3


@pytest.mark.parametrize("multiple", [1, 4])
def test_same_groups(multiple: int) -> None:
    want = group_rows(EXPERTS, 4, multiple)
    got = group_rows_of_sizes(EXPERTS, [4, 1, 5, 0], multiple)
    assert isinstance(want.counts_E, torch.Tensor) and got.counts_E == want.counts_E.tolist()
    assert torch.equal(got.slot_KT, want.slot_KT) and torch.equal(got.token_S, want.token_S)
    assert got.kept_KT is None


def test_copies_of_nobody() -> None:
    """Expert 2 of two experts is nobody: its copies have no slot."""
    groups = group_rows_of_sizes(EXPERTS, [4, 1], multiple=3)
    assert groups.counts_E == [6, 3]
    assert groups.token_S.tolist() == [0, 1, 3, 4, 0, 0, 2, 0, 0]
    assert groups.kept_KT is not None and torch.equal(groups.kept_KT, (EXPERTS < 2).T)
    assert groups.slot_KT.tolist() == [[0, 1, 0, 2, 0], [0, 0, 6, 0, 3]]


def test_no_value_is_read() -> None:
    groups = group_rows_of_sizes(EXPERTS.to("meta"), [4, 1, 5, 0], multiple=4)
    assert len(groups.token_S) == sum(groups.counts_E) == 16  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[4, 1, 5, 0], [4, 1]])
def test_sum_is_the_adjoint_of_spread(sizes: list[int]) -> None:
    """<spread x, r> = <x, sum r>, and the gradient of one is the other."""
    groups = group_rows_of_sizes(EXPERTS, sizes)
    x, rows = randn(5, 6).requires_grad_(), randn(sum(sizes), 6, seed=1).requires_grad_()
    spread, total = spread_rows(x, groups), sum_rows(rows, groups)
    assert (spread * rows).sum().item() == pytest.approx((x * total).sum().item(), abs=1e-12)
    (grad_x,) = torch.autograd.grad(spread, x, rows.detach())
    (grad_rows,) = torch.autograd.grad(total, rows, x.detach())
    assert torch.equal(grad_x, total) and torch.equal(grad_rows, spread)
    assert sum_rows(rows.detach().bfloat16(), groups).dtype == torch.float32


def test_same_products() -> None:
    x, weight, sizes = randn(60, 6), randn(4, 5, 6, seed=1), [0, 50, 3, 0]  # 7 are left over
    got, want = linear(x, weight, sizes), linear(x, weight, torch.tensor(sizes))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_rows_at_all() -> None:
    """A rank whose experts nobody wants: nothing out, zero gradients."""
    y, grad_x, grad_w = linear(randn(0, 6), randn(2, 5, 6), [0, 0])
    assert y.shape == (0, 5) and grad_x.shape == (0, 6)
    assert grad_w.shape == (2, 5, 6) and not grad_w.any()
