"""What chunks hand on: the recurrence both ways, its gradients, and its rules as an operator.

Legend: B rows, H heads, J chunks of a row, A angles.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacpp.kernels.mamba3.ops import carried_sum, carry

B, H, J, A = 2, 3, 5, 4


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunks", [0, 1, J])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_chunk_adds_to_what_it_keeps(chunks: int, backwards: bool) -> None:
    added, keep = noise(B, H, chunks, A, seed=1).float(), noise(1, H, chunks, seed=2)
    first = noise(B, H, A, seed=3)
    s = carry(added, keep, first, backwards)
    assert s.shape == (B, H, chunks + 1, A) and s.dtype == first.dtype
    if backwards:
        s, added, keep = s.flip(2), added.flip(2), keep.flip(2)
    assert torch.equal(s[:, :, 0], first)
    for j in range(chunks):
        kept = keep[:, :, j, None] * s[:, :, j]
        off = s[:, :, j + 1] - (kept + added[:, :, j])
        # One rounding fewer where a product is added without being rounded.
        assert (off.abs() <= 2**-52 * (kept.abs() + s[:, :, j + 1].abs())).all()


def test_it_is_an_operator_as_compilers_want_them() -> None:
    """Its schema, and shapes and strides of tensors without values."""
    args = noise(B, H, J, A, seed=1), noise(B, H, J, seed=2), noise(B, H, A, seed=3)
    for backwards in (False, True):
        torch.library.opcheck(
            carry, (*args, backwards), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("rows", [1, B])
def test_sums_start_anew_where_nothing_passes(rows: int) -> None:
    """The last chunk's own sum goes nowhere; of what doesn't pass no gradient comes back."""
    total, first = noise(B, H, J, A, seed=1).requires_grad_(), noise(B, H, A, seed=2)
    passes = torch.tensor([[True, False, True, True, False]] * rows)
    s = carried_sum(total, passes, first.requires_grad_())
    assert torch.equal(s[:, :, 2], total[:, :, 1])
    assert torch.autograd.gradcheck(lambda *x: carried_sum(x[0], passes, x[1]), (total, first))
    narrow = carried_sum(total.detach().float(), passes, None)
    assert narrow.dtype == torch.float64 and narrow[:, :, 0].abs().sum() == 0
