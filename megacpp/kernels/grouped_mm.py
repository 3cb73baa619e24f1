"""One linear layer per expert, on rows that lie grouped by expert.

Legend: S slots (rows in expert order), D in, F out, E experts, C slots of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# A CPU matrix product may round a row differently when the number of rows changes (another kernel,
# another split of the sum) or when the row falls into a remainder of the tiles. Products of 48 rows
# each, which tiles of 2, 3, 4, 6, 8, 12, 16, 24 and 48 rows divide, don't, as long as rows are a
# multiple of 16 bytes (MKL on AMD rounds odd widths in fp64 by place): tests/model/test_moe.py.
CPU_ROWS = 48
# torch.nn.functional.grouped_mm sums over a group in units of 16 bytes: 8 rows of bf16.
GPU_ROWS = 16


def row_multiple(device: torch.device) -> int:
    """Rows that a group is padded to, so that a row's result does not depend on other rows."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def grouped_linear(
    x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Rows `[S, F]`: each row of `x_SD` times the weight of the expert that owns its slot.

    `counts_E` slots belong to the experts in order and the last expert owns what is left over;
    without counts every expert has S / E slots, and one batched product does it. Counts in a tensor
    stay where they are as long as nothing needs them on the host.
    """
    if torch.is_autocast_enabled(x_SD.device.type):
        dtype = torch.get_autocast_dtype(x_SD.device.type)
        x_SD, weight_EFD = x_SD.to(dtype), weight_EFD.to(dtype)
    if counts_E is None:
        x_ECD = x_SD.unflatten(0, (len(weight_EFD), -1))
        y_ECF = torch.bmm(x_ECD, weight_EFD.mT)
        # No view of the product, which nobody else has: FSDP2 warns of units that return one.
        return torch.ops.aten._unsafe_view(y_ECF, (len(x_SD), y_ECF.shape[2]))
    backend = grouped_backend(x_SD.device.type, x_SD.dtype, *weight_EFD.shape[1:])
    if backend == "grouped_mm" and len(x_SD) > 0:
        return F.grouped_mm(x_SD, weight_EFD.mT, offs=_ends(counts_E, x_SD))
    return _Loop.apply(x_SD, weight_EFD, counts_E)  # type: ignore[return-value]


def grouped_backend(
    device_type: str, dtype: torch.dtype, out_features: int, in_features: int
) -> Literal["grouped_mm", "loop"]:
    """The rule: torch's grouped kernel for bf16 on CUDA in rows of 16 bytes, else one product
    (on a CPU one per 48 rows) after another, for which the counts must reach the host."""
    aligned = out_features % 8 == 0 and in_features % 8 == 0
    on_gpu = device_type == "cuda" and dtype == torch.bfloat16
    return "grouped_mm" if on_gpu and aligned else "loop"


def grouped_linear_reference(
    x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor | Sequence[int]
) -> Tensor:
    """The definition of `grouped_linear`: one expert after another."""
    parts = x_SD.split(_sizes(counts_E, len(x_SD)))
    return torch.cat([F.linear(x, w_FD) for x, w_FD in zip(parts, weight_EFD, strict=True)])


def _ends(counts_E: Tensor | Sequence[int], x_SD: Tensor) -> Tensor:
    """int32 `(E,)`: the slot after the last one of each expert."""
    if isinstance(counts_E, Tensor):
        end_E = counts_E.cumsum(0, dtype=torch.int32)
    else:
        ends = list(accumulate(counts_E))
        end_E = torch.tensor(ends, dtype=torch.int32, device=x_SD.device)
    end_E[-1:] = len(x_SD)
    return end_E


def _sizes(counts_E: Tensor | Sequence[int], slots: int) -> list[int]:
    sizes = list(counts_E.tolist() if isinstance(counts_E, Tensor) else counts_E)
    sizes[-1] = slots - sum(sizes[:-1])
    return sizes


class _Loop(torch.autograd.Function):
    """The loop of `grouped_linear_reference` without its splits and concatenations."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor | Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(x_SD, weight_EFD)
        ctx.sizes = _sizes(counts_E, len(x_SD))
        return _loop(x_SD, weight_EFD.mT, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_SF,) = grads
        x_SD, weight_EFD = ctx.saved_tensors
        grad_SF, grad_x, grad_w = grad_SF.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = _loop(grad_SF, weight_EFD, ctx.sizes)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(weight_EFD)
            parts = zip(grad_SF.split(ctx.sizes), x_SD.split(ctx.sizes), grad_w, strict=True)
            for grad, x, out_FD in parts:  # an expert without rows gets exact zeros
                torch.mm(grad.T, x, out=out_FD)
        return grad_x, grad_w, None


def _loop(x_SD: Tensor, weight_EDF: Tensor, sizes: list[int]) -> Tensor:
    """`x @ weight` group by group; on a CPU in products of `CPU_ROWS` rows."""
    y_SF = x_SD.new_empty(len(x_SD), weight_EDF.shape[-1])
    most = CPU_ROWS if x_SD.device.type == "cpu" else max(1, len(x_SD))
    cuts = [[min(most, size - i) for i in range(0, size, most)] for size in sizes]
    flat = [rows for cut in cuts for rows in cut]
    parts = zip(x_SD.split(flat), y_SF.split(flat), strict=True)
    for w_DF, cut in zip(weight_EDF, cuts, strict=True):
        for _ in cut:
            x, y = next(parts)
            torch.mm(x, w_DF, out=y)
    return y_SF
