"""Output gates of the recurrent mixers: plain autograd's values, from what they are given alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3.chunks import ranks
from megacpp.kernels.recurrent_gates import gated_ranks, gated_residual

FP64 = 1e-12  # two formulas of the same thing in fp64
Gate = Callable[..., Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def assert_same_gradients(gate: Gate, plain: Gate, inputs: list[Tensor | None]) -> None:
    leaves = [x for x in inputs if x is not None]
    found = []
    for form in (gate, plain):
        y = form(*inputs)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        found.append([y, *torch.autograd.grad(y, leaves, weights)])
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= FP64 * max(1.0, want.abs().max().item())


def kept_bytes(gate: Gate, inputs: list[Tensor | None]) -> int:
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gate(*inputs)
    return sum(kept.values())


def by_formula(
    y: Tensor, z: Tensor | None, norm: Tensor | None, mimo_z: Tensor | None, mimo_o: Tensor | None
) -> Tensor:
    if norm is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=1e-5) * norm[:, None]
    if z is not None:
        y = y * F.silu(z[..., None, :] * (1.0 if mimo_z is None else mimo_z))
    return y.squeeze(3) if mimo_o is None else (y * mimo_o).sum(3)


def gate_of_ranks(*inputs: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    return gated_ranks(*inputs, norm_eps=1e-5, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("rank", [1, 3])
def test_gate_of_ranks(rank: int, normed: bool, gated: bool) -> None:
    torch.manual_seed(0)
    by_chunk = leaf(2, 4, 5, rank, 7, 6)  # as the scan leaves it: B, H, J, R, C, P
    weights = [leaf(4, rank, 6) if rank > 1 and there else None for there in (gated, True)]
    inputs = [leaf(2, 35, 4, 6) if gated else None, leaf(4, 6) if normed else None, *weights]

    def by_token(form: Gate) -> Gate:
        return lambda y, *rest: form(y.permute(0, 2, 4, 1, 3, 5).flatten(1, 2), *rest)

    assert_same_gradients(by_token(gate_of_ranks), by_token(by_formula), [by_chunk, *inputs])


def test_gate_of_residual() -> None:
    torch.manual_seed(1)

    def plain(y: Tensor, v: Tensor, D: Tensor, g: Tensor) -> Tensor:
        return (y + v * D).flatten(-2) * F.silu(g)

    inputs = [leaf(2, 5, 4, 3), leaf(2, 5, 4, 3), leaf(4, 3), leaf(2, 5, 12)]
    assert_same_gradients(gated_residual, plain, [*inputs])


@pytest.mark.parametrize("rank", [1, 3])
def test_v_of_every_rank(rank: int) -> None:
    torch.manual_seed(2)

    def plain(v: Tensor, x: Tensor | None) -> Tensor:
        return v[:, :, :, None] * (1.0 if x is None else x[:, None, :, None])

    assert_same_gradients(ranks, plain, [leaf(2, 4, 3, 7, 6), leaf(4, 3, 6) if rank > 1 else None])


def test_bf16_is_kept_as_bf16() -> None:
    bf16 = torch.bfloat16
    z, v, mimo = (
        leaf(2, 35, 4, 6, dtype=bf16),
        leaf(2, 4, 5, 7, 6, dtype=bf16),
        leaf(4, 3, 6).float(),
    )
    y = leaf(2, 35, 4, 3, 6, dtype=torch.float32)
    weights = 4 * 4 * 3 * 6
    kept = kept_bytes(lambda *x: gate_of_ranks(*x, dtype=bf16), [y, z, None, mimo, mimo.clone()])
    assert kept == 4 * y.numel() + 2 * z.numel() + 2 * weights
    assert kept_bytes(ranks, [v, mimo]) == 2 * v.numel() + weights
    y, v, g = (leaf(*shape, dtype=bf16) for shape in ((2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 12)))
    assert kept_bytes(gated_residual, [y, v, leaf(4, 3).float(), g]) == 2 * 3 * y.numel() + 4 * 12
