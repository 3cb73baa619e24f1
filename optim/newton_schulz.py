"""Newton-Schulz orthogonalisation: all singular values of a matrix move towards 1.

Steps of X <- aX + (bA + cA²)X with A = XXᵀ push the singular values of X/‖X‖ towards 1 and keep the
singular vectors. `Coefficients` names the source of a, b, c:

- `quintic`: the same in every step, tuned for steepness at zero; five steps end within about 0.7
  ... 1.2 and more steps don't narrow that (Keller Jordan, github.com/KellerJordan/Muon).
- `polar_express`: each step uses the best odd polynomial of degree 5 on the interval that the
  previous steps leave singular values in (Amsel et al., 2505.16932); five steps end within about
  0.85 ... 1.15 and every further step comes closer. ‖X‖ is overestimated by 2 % for safety.

Legend: R rows, C columns, s the short and l the long side of a matrix, K matrices of a batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Coefficients = Literal["quintic", "polar_express"]
Scale = Literal["spectral", "rms"]

QUINTIC = (3.4445, -4.7750, 2.0315)
# Five steps from singular values of 1e-3 to 1, with 2 % of safety, as published with modded-nanogpt
# (github.com/KellerJordan/modded-nanogpt); the last row is their limit, for further steps.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    (1.875, -1.25, 0.375),
)
POLAR_EXPRESS_SAFETY = 1.02
EPS = 1e-7  # added to the norm, as upstream does
CPU_BATCH_BYTES = 1 << 20  # of matrices per product: they fit in caches with the products
CUDA_BATCH_BYTES = 1 << 26  # chosen for memory, not measured
# torch computes bf16 products on a CPU by oneDNN if they have more multiplications than this, over
# the whole batch, and by other kernels otherwise (mkldnn_gemm_min_size).
ONEDNN_PRODUCT = 16**3
FLIPPED_CELLS = 1 << 16  # above it, torch transposes single matrices faster than a batch


def newton_schulz(
    g: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    coefficients: Coefficients = "quintic",
) -> Tensor:
    """Orthogonalise each matrix of `g`; the argument is never modified.

    Huge and tiny matrices are first scaled by a power of two, so that the norm neither overflows
    nor underflows. On a CPU the other matrices of the batch don't change a bit of a result.

    Args:
        g: `[..., R, C]`.
        steps: number of iterations.
        dtype: dtype of the iteration and of the result; see `iteration_dtype` for the default.
        coefficients: source of a, b, c.

    Returns:
        `[..., R, C]`, sharing no memory with `g`; a zero matrix stays exactly zero.
    """
    dtype = dtype or iteration_dtype(g)
    tall = g.shape[-2] > g.shape[-1]
    wide = g.mT if tall else g
    short, long = wide.shape[-2:]
    x_Ksl = wide.reshape(-1, short, long)
    safety = POLAR_EXPRESS_SAFETY if coefficients == "polar_express" else 1.0
    rows = coefficient_rows(coefficients, steps)
    parts = x_Ksl.split(_matrices_per_call(x_Ksl, dtype))
    done = [
        _iterate(_normalised(part, dtype, safety), rows)[: len(part), :short, :long]
        for part in parts
    ]
    out = (done[0] if len(done) == 1 else torch.cat(done)).reshape(wide.shape)
    return _contiguous(out.mT) if tall else out


def coefficient_rows(coefficients: Coefficients, steps: int) -> list[tuple[float, float, float]]:
    """Return (a, b, c) of each step; steps beyond the table repeat its last row."""
    if coefficients == "quintic":
        return [QUINTIC] * steps
    assert coefficients == "polar_express", coefficients
    return [POLAR_EXPRESS[min(i, len(POLAR_EXPRESS) - 1)] for i in range(steps)]


def iteration_dtype(t: Tensor) -> torch.dtype:
    """Return bf16 on a GPU, fp32 on a CPU, where runs are small and exact, and fp64 for fp64.

    Args:
        t: any shape.
    """
    if t.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if t.is_cuda else torch.float32


def update_scale(scale: Scale, rows: int, cols: int) -> float:
    """Return the factor of an orthogonal update of a `rows x cols` matrix.

    `spectral`: sqrt(max(1, rows / cols)), so that the update's effect on activations doesn't depend
    on the shape (Keller Jordan). `rms`: 0.2 sqrt(max(rows, cols)), so that its entries are as large
    as those of an AdamW update and one learning rate fits both (Moonlight, 2502.16982).
    """
    if scale == "spectral":
        return math.sqrt(max(1.0, rows / cols))
    assert scale == "rms", scale
    return 0.2 * math.sqrt(max(rows, cols))


def newton_schulz_flops(rows: int, cols: int, steps: int = 5) -> int:
    """Return FLOPs of one matrix: per step two products of s² l and one of s³ multiply-adds."""
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4 * short * short * long + 2 * short**3)


def least_batch(short: int, itemsize: int) -> int:
    """Return the smallest batch multiplied on a CPU, zero matrices included; above 1 for bf16.

    torch selects the library for the smallest products, s x s, by the size of the whole batch, and
    the libraries round differently.
    """
    return 1 if itemsize != 2 else ONEDNN_PRODUCT // (short + -short % 8) ** 3 + 1


def _matrices_per_call(x_Ksl: Tensor, dtype: torch.dtype) -> int:
    """Return the number of matrices per product; larger calls gain nothing.

    Each matrix is multiplied alone on a CPU in fp64, which is for proofs, and with several threads
    in fp32: MKL then splits a single matrix differently from a batch, on some CPUs in fp32 too.
    """
    if not x_Ksl.is_cuda and (
        dtype == torch.float64 or (dtype == torch.float32 and torch.get_num_threads() > 1)
    ):
        return 1
    most = CUDA_BATCH_BYTES if x_Ksl.is_cuda else CPU_BATCH_BYTES
    return max(1, most // max(1, x_Ksl.shape[1] * x_Ksl.shape[2] * dtype.itemsize))


def _normalised(x_Ksl: Tensor, dtype: torch.dtype, safety: float) -> Tensor:
    """Return x / (safety ‖x‖ + eps) in a new contiguous tensor, without overflow or underflow.

    The norm is computed in fp32 or wider and rounded to the iteration's dtype before the division.
    This is upstream's formula, except that eps stops growing, relative to x, once all entries are
    below 2^-20: a tiny gradient still has a direction.

    Both sides are padded to multiples of 8 with zeros, which stay zero. Otherwise a matrix's
    address, and with it MKL's rounding, would depend on its place in the batch. Batches are padded
    to `least_batch`.
    """
    norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    y_Ksl = _contiguous(x_Ksl.to(dtype))
    norm = torch.linalg.vector_norm(y_Ksl, dim=(-2, -1), keepdim=True, dtype=norm_dtype)
    usual, eps = (norm >= 2.0**-20) & (norm <= 2.0**60), EPS
    if x_Ksl.is_cuda or not usual.all():  # on a GPU the test would wait for the device
        del y_Ksl
        power = torch.where(usual, 1.0, _power(x_Ksl))
        y_Ksl = _contiguous((x_Ksl * power.to(x_Ksl.dtype)).to(dtype))
        norm = torch.linalg.vector_norm(y_Ksl, dim=(-2, -1), keepdim=True, dtype=norm_dtype)
        eps = EPS * power.to(norm_dtype).clamp(max=2.0**20)
    length = (norm * safety + eps).to(dtype)  # dividing by another dtype takes 20 times as long
    y_Ksl = y_Ksl / length if y_Ksl is x_Ksl else y_Ksl.div_(length)
    count, short, long = x_Ksl.shape
    rows, cols = -short % 8, -long % 8
    more = 0 if x_Ksl.is_cuda else max(0, least_batch(short, dtype.itemsize) - count)
    padded = rows or cols or more
    return torch.nn.functional.pad(y_Ksl, (0, cols, 0, rows, 0, more)) if padded else y_Ksl


def _power(x_Ksl: Tensor) -> Tensor:
    """Return the power of two that scales each matrix's largest entry to about 1, [K, 1, 1]."""
    largest = x_Ksl.abs().amax(dim=(-2, -1), keepdim=True)
    limit = 1000 if x_Ksl.dtype == torch.float64 else 120
    working = torch.float64 if x_Ksl.dtype == torch.float64 else torch.float32
    exponent = torch.frexp(largest.to(working)).exponent.clamp(-limit, limit)
    return torch.exp2(-exponent.to(working))


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous copy of transposed matrices, or `x` itself if it is contiguous."""
    if x.is_contiguous() or x.is_cuda or x.shape[-2] * x.shape[-1] < FLIPPED_CELLS:
        return x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    matrices = (t.reshape(-1, *x.shape[-2:]).unbind() for t in (out, x))
    for to, of in zip(*matrices, strict=True):
        to.copy_(of)
    return out


def _iterate(x_Ksl: Tensor, rows: list[tuple[float, float, float]]) -> Tensor:
    for a, b, c in rows:
        gram_Kss = torch.bmm(x_Ksl, x_Ksl.mT)
        polynomial_Kss = torch.baddbmm(gram_Kss, gram_Kss, gram_Kss, beta=b, alpha=c)
        x_Ksl = torch.baddbmm(x_Ksl, polynomial_Kss, x_Ksl, beta=a)
    return x_Ksl
