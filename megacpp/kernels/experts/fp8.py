"""Products of experts' rows and matrices in FP8, with a scale for each row and each column.

What is summed over has one scale: a row of `x` over its columns, a column of a matrix over its
rows. The scale is the power of two that brings the largest of them to at most 448, the largest
number of e4m3; dividing by it is exact. It is taken from what is multiplied, so that running again
finds the same one, and from one token or one column of one expert, so that it doesn't depend on
which rank holds which tokens. The exception are weight gradients of the recipe `rowwise`, which sum
over the tokens of an expert that a rank has: a column's scale is then that of these tokens.

hardware  rounded by torchao's kernels (torchao.prototype.moe_training), multiplied by
          torch._scaled_grouped_mm, which needs groups of whole 16 rows: compute capability 9.0.
emulated  rounded to the same numbers and multiplied as they are: bf16 and fp32 hold every product
          of an e4m3 number and a power of two, so only the order of sums differs.

Legend: S slots (rows in expert order), D in, F out, E experts, C slots of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.experts.grouped_mm import (
    Counts,
    either,
    ends_of,
    given,
    outer_products,
    products,
    sizes_of,
)
from megacpp.quiet import quiet_import

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_LARGEST = 1e-12  # of a row; torchao's, so that a row of zeros has a finite scale
ROWS = 16  # of a group, or a multiple of it, for the hardware


@dataclass(frozen=True)
class Fp8Products:
    """Settings of FP8 products of experts.

    Attributes:
        emulated: computed without FP8 hardware, from rounded operands.
        wide_gradients: gradients of weights are not in FP8.
    """

    emulated: bool
    wide_gradients: bool = True


def rows_times(
    x_SD: Tensor, weights_EDF: Sequence[Tensor], counts_E: Counts, fp8: Fp8Products
) -> list[Tensor]:
    """Return `[S, F]` for each weight: each row times the matrix of its expert; no gradient.

    Args:
        x_SD: rows in expert order.
        weights_EDF: matrices of the experts.
        counts_E: slots of each expert; None: equally many.
        fp8: settings.
    """
    if not fp8.emulated:
        return _on_hardware(x_SD, weights_EDF, counts_E)
    x_SD = rounded(x_SD, 1)
    return [products(x_SD, rounded(w_EDF, 1), counts_E) for w_EDF in weights_EDF]


def outer_sums(
    left_SF: Tensor, right_SD: Tensor, counts_E: Counts, experts: int, fp8: Fp8Products
) -> Tensor:
    """Return of each expert the sum over its slots of left times right, `[E, F, D]`; no gradient.

    Args:
        left_SF: rows in expert order.
        right_SD: rows in expert order.
        counts_E: slots of each expert; None: equally many.
        experts: E.
        fp8: settings, not of `wide_gradients`.
    """
    if not fp8.emulated:
        return _outer_on_hardware(left_SF, right_SD, counts_E, experts)
    left_SF, right_SD = (_rounded_by_group(x, counts_E, experts) for x in (left_SF, right_SD))
    return outer_products(left_SF, right_SD, counts_E, experts)


def scales(x: Tensor, dim: int) -> Tensor:
    """Return powers of two, in fp32, that scale the largest along `dim` to at most 448."""
    largest = x.detach().abs().amax(dim, keepdim=True).double().clamp(min=SMALLEST_LARGEST)
    _, exponent = torch.frexp((LARGEST / largest).float())  # the mantissa is in [0.5, 1)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 1)


def rounded(x: Tensor, dim: int) -> Tensor:
    """Return `x` rounded to e4m3 numbers times a scale along `dim`, in its own dtype."""
    if x.numel() == 0:
        return x
    scale = scales(x, dim)
    return ((x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3).float() / scale).to(x.dtype)


def _rounded_by_group(x_SD: Tensor, counts_E: Counts, experts: int) -> Tensor:
    """Return x rounded with a scale for each expert and column."""
    if counts_E is None:
        return rounded(x_SD.unflatten(0, (experts, -1)), 1).flatten(0, 1)
    return _rounded_loop(x_SD, *either(counts_E))


# An operator of its own, so that tensors without values pass: counts must reach the host.
@torch.library.custom_op("megacpp::rounded_by_group", mutates_args=())
def _rounded_loop(x_SD: Tensor, counts_E: Tensor | None, sizes: Sequence[int] | None) -> Tensor:
    groups = sizes_of(given(counts_E, sizes), len(x_SD))
    return torch.cat([rounded(part, 0) for part in x_SD.split(groups)])


@_rounded_loop.register_fake
def _(x_SD: Tensor, *_: Any) -> Tensor:
    return x_SD.new_empty(x_SD.shape)


# ---- hardware -----------------------------------------------------------------------------------


def _on_hardware(x_SD: Tensor, weights_EDF: Sequence[Tensor], counts_E: Counts) -> list[Tensor]:
    """Run torchao's `_to_fp8_rowwise_then_scaled_grouped_mm` without its backward."""
    with quiet_import():
        from torchao.prototype.moe_training.kernels import (
            triton_fp8_colwise_3d_scale_and_cast,
            triton_fp8_rowwise_2d_scale_and_cast,
            triton_fp8_rowwise_3d_transpose_rhs,
        )

    experts = len(weights_EDF[0])
    if len(x_SD) == 0:
        return [x_SD.new_empty(0, w_EDF.shape[2]) for w_EDF in weights_EDF]
    rows_SD, end_E, each = _whole_groups(x_SD, counts_E, experts)
    rows_SD, row_scale = triton_fp8_rowwise_2d_scale_and_cast(
        rows_SD.contiguous(), output_dtype=E4M3, round_scales_to_power_of_2=True
    )
    found = []
    for w_EDF in weights_EDF:
        if w_EDF.mT.is_contiguous():  # a column lies together, as the product wants it
            matrices, scale = triton_fp8_colwise_3d_scale_and_cast(
                w_EDF, output_dtype=E4M3, round_scales_to_power_of_2=True
            )
        else:
            matrices, scale = triton_fp8_rowwise_3d_transpose_rhs(
                w_EDF.contiguous().mT, output_dtype=E4M3, round_scales_to_power_of_2=True
            )
        y_SF = torch._scaled_grouped_mm(
            rows_SD,
            matrices,
            row_scale.reshape(-1).reciprocal(),
            scale.reshape(experts, -1).reciprocal(),
            end_E,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        found.append(_own_rows(y_SF, each, experts).to(x_SD.dtype))
    return found


def _outer_on_hardware(left_SF: Tensor, right_SD: Tensor, counts_E: Counts, experts: int) -> Tensor:
    """Return the weight gradient of FP8 products; sums over a group's slots, a scale per column."""
    with quiet_import():
        from torchao.prototype.moe_training.kernels import triton_fp8_per_group_colwise_scales_dual

    if len(left_SF) == 0:
        return left_SF.new_zeros(experts, left_SF.shape[1], right_SD.shape[1])
    left, end_E, _ = _whole_groups(left_SF, counts_E, experts)
    right, _, _ = _whole_groups(right_SD, counts_E, experts)
    left8, left_scale, right8, right_scale = triton_fp8_per_group_colwise_scales_dual(
        left.contiguous(), right.contiguous(), end_E, E4M3, round_scales_to_power_of_2=True
    )
    sums_EFD = torch._scaled_grouped_mm(
        left8.t(),
        right8,
        left_scale.t().reciprocal(),
        right_scale.reciprocal(),
        end_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    empty_E = torch.diff(end_E, prepend=end_E.new_zeros(1)) == 0  # no product wrote their sums
    return sums_EFD.masked_fill_(empty_E[:, None, None], 0).to(left_SF.dtype)


def _whole_groups(x_SD: Tensor, counts_E: Counts, experts: int) -> tuple[Tensor, Tensor, int]:
    """Return rows in groups of whole 16, each group's end, and an expert's slots (0: as counted).

    Counted groups are of whole 16 already (`row_multiple`); even ones get rows of zeros.
    """
    if counts_E is not None:
        return x_SD, ends_of(counts_E, x_SD, experts), 0
    each = len(x_SD) // experts
    more = -each % ROWS
    if more:
        x_SD = F.pad(x_SD.unflatten(0, (experts, -1)), (0, 0, 0, more)).flatten(0, 1)
    end_E = torch.arange(1, experts + 1, dtype=torch.int32, device=x_SD.device) * (each + more)
    return x_SD, end_E.to(torch.int32), each


def _own_rows(y_SF: Tensor, each: int, experts: int) -> Tensor:
    """Return the rows without the zeros that `_whole_groups` added."""
    if not each or len(y_SF) == each * experts:
        return y_SF
    return y_SF.unflatten(0, (experts, -1))[:, :each].flatten(0, 1)
