"""Newton-Schulz orthogonalisation: all singular values of a matrix towards 1, by products alone.

Five steps of X <- aX + (bA + cA²)X with A = XXᵀ push the singular values of X/‖X‖ into about
0.7 ... 1.2 while the singular vectors stay (Keller Jordan's quintic, github.com/KellerJordan/Muon).

Legend: R rows, C columns, s the short and l the long side of a matrix, K matrices of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # added to the norm, as upstream does
CPU_BATCH_ELEMENTS = 1 << 13
CUDA_BATCH_ELEMENTS = 1 << 25  # 64 MiB of bf16; chosen for memory, not measured

Scale = Literal["keller", "moonshot"]


def newton_schulz(g: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Orthogonalises each matrix of `g` `[..., R, C]`; the argument is never written to.

    Each matrix is first scaled by a power of two, so that huge and tiny ones are as good as any.
    On a CPU the other matrices of the batch don't change a bit of a result: matrices share a
    product only while one has at most 8192 elements; larger ones would gain nothing from it.

    Args:
        dtype: of the iteration and of the result; see `iteration_dtype` for the default.

    Returns:
        `[..., R, C]`; a zero matrix stays exactly zero.
    """
    tall = g.shape[-2] > g.shape[-1]
    wide = g.mT if tall else g
    short, long = wide.shape[-2:]
    x_Ksl = wide.reshape(-1, short, long)
    most = CUDA_BATCH_ELEMENTS if g.is_cuda else CPU_BATCH_ELEMENTS
    parts = x_Ksl.split(max(1, most // max(1, short * long)))
    done = [_iterate(_normalised(part, dtype or iteration_dtype(g)), steps) for part in parts]
    out = (done[0] if len(done) == 1 else torch.cat(done)).view(wide.shape)
    return out.mT if tall else out


def newton_schulz_plain(g_RC: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """One matrix, operation by operation as the definition has it: the reference."""
    a, b, c = COEFFICIENTS
    x = g_RC.to(dtype or iteration_dtype(g_RC))
    x = x.mT if g_RC.shape[0] > g_RC.shape[1] else x
    x = x / (x.norm() + EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g_RC.shape[0] > g_RC.shape[1] else x


def orthogonalise(
    stacks: Sequence[Tensor], steps: int = 5, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """`newton_schulz` of many stacks `[K, R, C]` with as few products as their shapes allow.

    Stacks of equal sides, in either orientation, become one batch.
    """
    alike: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for i, stack in enumerate(stacks):
        _, rows, cols = stack.shape
        alike.setdefault((min(rows, cols), max(rows, cols), stack.dtype), []).append(i)
    results: dict[int, Tensor] = {}
    for members in alike.values():
        tall = [stacks[i].shape[1] > stacks[i].shape[2] for i in members]
        flat = [stacks[i].mT if t else stacks[i] for i, t in zip(members, tall, strict=True)]
        if flat[0].shape[1] * flat[0].shape[2] > CPU_BATCH_ELEMENTS and not flat[0].is_cuda:
            outs: Sequence[Tensor] = [newton_schulz(x_Ksl, steps, dtype) for x_Ksl in flat]
        else:
            joined = newton_schulz(flat[0] if len(flat) == 1 else torch.cat(flat), steps, dtype)
            outs = joined.split([len(x_Ksl) for x_Ksl in flat])
        for i, out, t in zip(members, outs, tall, strict=True):
            results[i] = out.mT if t else out
    return [results[i] for i in range(len(stacks))]


def iteration_dtype(t: Tensor) -> torch.dtype:
    """bf16 on a GPU; elsewhere fp32, because CPUs are slow in bf16; fp64 stays fp64 everywhere."""
    if t.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if t.is_cuda else torch.float32


def update_scale(scale: Scale, rows: int, cols: int) -> float:
    """Factor of an orthogonal update of a `rows x cols` matrix.

    `keller`: sqrt(max(1, rows / cols)), so that the update's effect on activations doesn't depend
    on the shape. `moonshot`: 0.2 sqrt(max(rows, cols)), so that its entries are as large as those
    of an AdamW update and one learning rate fits both (arXiv 2502.16982).
    """
    if scale == "keller":
        return math.sqrt(max(1.0, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


def newton_schulz_flops(rows: int, cols: int, steps: int = 5) -> int:
    """Multiplications and additions of one matrix: two products of s² l and one of s³ a step."""
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4 * short * short * long + 2 * short**3)


def _normalised(x_Ksl: Tensor, dtype: torch.dtype) -> Tensor:
    """x / (‖x‖ + eps) in a new contiguous tensor, without overflow or underflow of the norm.

    The power of two that brings the largest entry to about 1 is exact, so this is upstream's
    formula to the bit, except that eps stops growing once all entries are below 2^-20: a tiny
    gradient still has a direction.
    """
    largest = x_Ksl.abs().amax(dim=(-2, -1), keepdim=True)
    limit = 1000 if x_Ksl.dtype == torch.float64 else 120
    working = torch.float64 if x_Ksl.dtype == torch.float64 else torch.float32
    exponent = torch.frexp(largest.to(working)).exponent.clamp(-limit, limit)
    power = torch.exp2(-exponent.to(working))
    y_Ksl = (x_Ksl * power.to(x_Ksl.dtype)).to(dtype).contiguous()
    norm = torch.linalg.vector_norm(y_Ksl, dim=(-2, -1), keepdim=True)
    return y_Ksl.div_(norm + (EPS * power.clamp(max=2.0**20)).to(dtype))


def _iterate(x_Ksl: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram_Kss = torch.bmm(x_Ksl, x_Ksl.mT)
        polynomial_Kss = torch.baddbmm(gram_Kss, gram_Kss, gram_Kss, beta=b, alpha=c)
        x_Ksl = torch.baddbmm(x_Ksl, polynomial_Kss, x_Ksl, beta=a)
    return x_Ksl
