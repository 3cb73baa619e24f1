"""Linear layers of experts, on rows that are grouped by expert.

Legend: S slots (rows in expert order), D in, F out, E experts, C slots of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.experts.sizes import CPU_ROWS, GPU_ROWS
from megacpp.torch_extras import autocast_dtype, listed

# Slots of each expert, in order; the last one owns the rest. None: all have as many, and
# one batched product does it. One count more than experts is of slots at the end that no expert
# owns, whose rows are undefined. A tensor stays where it is unless the host must read it.
Counts = Tensor | Sequence[int] | None


def row_multiple(device: torch.device) -> int:
    """Rows that a group is padded to, so that a row's result does not depend on other rows."""
    return CPU_ROWS if device.type in ("cpu", "meta") else GPU_ROWS


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype of a running autocast, if there is one."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple([t.to(dtype) for t in tensors])


def products(x_SD: Tensor, weight_EDF: Tensor, counts_E: Counts) -> Tensor:
    """Return each row times the matrix of its expert, `[S, F]`; no gradient."""
    if counts_E is None:
        x_ECD = x_SD.unflatten(0, (len(weight_EDF), -1))
        y_ECF = torch.bmm(x_ECD, weight_EDF)
        # No view of the product, which nothing else refers to: FSDP2 warns of units that return
        # one (pytorch#181850; pytorch#197154 would not warn of views that aren't written to).
        return torch.ops.aten._unsafe_view(y_ECF, (len(x_SD), y_ECF.shape[2]))
    backend = grouped_backend(x_SD.device.type, x_SD.dtype, *weight_EDF.shape[1:])
    if backend == "grouped_mm" and len(x_SD) > 0:
        return F.grouped_mm(x_SD, weight_EDF, offs=ends_of(counts_E, x_SD, len(weight_EDF)))
    return _loop(x_SD, weight_EDF, *either(counts_E))


def outer_products(left_SF: Tensor, right_SD: Tensor, counts_E: Counts, experts: int) -> Tensor:
    """Return of each expert the sum over its slots of left times right, `[E, F, D]`; no gradient.

    An expert without slots gets exact zeros.

    Args:
        left_SF: rows in expert order.
        right_SD: rows in expert order.
        counts_E: slots of each expert; None: equally many.
        experts: E.
    """
    if counts_E is None:
        left_ECF, right_ECD = (x.unflatten(0, (experts, -1)) for x in (left_SF, right_SD))
        return torch.bmm(left_ECF.mT, right_ECD)
    sizes = right_SD.shape[1], left_SF.shape[1]
    backend = grouped_backend(right_SD.device.type, right_SD.dtype, *sizes)
    if backend == "grouped_mm" and len(right_SD) > 0:
        return F.grouped_mm(left_SF.mT, right_SD, offs=ends_of(counts_E, right_SD, experts))
    return _outer_loop(left_SF, right_SD, *either(counts_E), experts)


def grouped_backend(
    device_type: str, dtype: torch.dtype, out_features: int, in_features: int
) -> Literal["grouped_mm", "loop"]:
    """Return the way of grouped products on a device, in a dtype, for matrices of a size.

    torch's grouped kernel takes bf16 on CUDA in rows of 16 bytes. Else products run one after
    another (on a CPU one per 48 rows), for which the counts must reach the host.

    Args:
        device_type: `cuda` or another.
        dtype: of the operands.
        out_features: rows of a matrix.
        in_features: columns of a matrix.
    """
    aligned = out_features % 8 == 0 and in_features % 8 == 0
    on_gpu = device_type == "cuda" and dtype == torch.bfloat16
    return "grouped_mm" if on_gpu and aligned else "loop"


def ends_of(counts_E: Tensor | Sequence[int], x_SD: Tensor, experts: int) -> Tensor:
    """Return int32 `(E,)`: the slot after the last one of each expert."""
    if len(counts_E) > experts:  # what lies past the last end isn't touched
        assert isinstance(counts_E, Tensor)
        return counts_E[:experts].cumsum(0, dtype=torch.int32)
    if isinstance(counts_E, Tensor):
        end_E = counts_E.cumsum(0, dtype=torch.int32)
    else:
        end_E = listed(list(accumulate(counts_E)), x_SD.device, torch.int32)
    end_E[-1:] = len(x_SD)
    return end_E


def either(counts_E: Tensor | Sequence[int]) -> tuple[Tensor | None, list[int] | None]:
    """Return counts as a tensor or as a list, beside None: operators have no type for both."""
    return (counts_E, None) if isinstance(counts_E, Tensor) else (None, list(counts_E))


def sizes_of(counts_E: Tensor | Sequence[int], slots: int) -> list[int]:
    """Return the slots of each expert on the host; the last one has the rest."""
    sizes = list(counts_E.tolist() if isinstance(counts_E, Tensor) else counts_E)
    sizes[-1] = slots - sum(sizes[:-1])
    return sizes


# Operators of their own, so that tensors without values pass, and so that a compiler need not look
# inside: their shapes follow from those of the inputs, their work from counts.
@torch.library.custom_op("megacpp::expert_products", mutates_args=())
def _loop(
    x_SD: Tensor, weight_EDF: Tensor, counts_E: Tensor | None, sizes: Sequence[int] | None
) -> Tensor:
    """Return `x @ weight` group by group; on a CPU in products of `CPU_ROWS` rows."""
    y_SF = x_SD.new_empty(len(x_SD), weight_EDF.shape[-1])
    most = CPU_ROWS if x_SD.device.type == "cpu" else max(1, len(x_SD))
    groups = sizes_of(given(counts_E, sizes), len(x_SD))
    cuts = [[min(most, size - i) for i in range(0, size, most)] for size in groups]
    flat = [rows for cut in cuts for rows in cut]
    parts = zip(x_SD.split(flat), y_SF.split(flat), strict=True)
    for w_DF, cut in zip(weight_EDF, cuts):  # noqa: B905 - the last may be of no expert
        for _ in cut:
            x, y = next(parts)
            torch.mm(x, w_DF, out=y)
    return y_SF


@torch.library.custom_op("megacpp::expert_outer_products", mutates_args=())
def _outer_loop(
    left_SF: Tensor,
    right_SD: Tensor,
    counts_E: Tensor | None,
    sizes: Sequence[int] | None,
    experts: int,
) -> Tensor:
    y_EFD = right_SD.new_empty(experts, left_SF.shape[1], right_SD.shape[1])
    groups = sizes_of(given(counts_E, sizes), len(right_SD))
    parts = zip(left_SF.split(groups), right_SD.split(groups), y_EFD)  # noqa: B905 - as above
    for left, right, out_FD in parts:
        torch.mm(left.T, right, out=out_FD)
    return y_EFD


def given(counts_E: Tensor | None, sizes: Sequence[int] | None) -> Tensor | Sequence[int]:
    """Return the one of tensor and list that isn't None, the inverse of `either`."""
    given = sizes if counts_E is None else counts_E
    assert given is not None
    return given


@_loop.register_fake
def _(x_SD: Tensor, weight_EDF: Tensor, *_: Any) -> Tensor:
    return x_SD.new_empty(len(x_SD), weight_EDF.shape[-1])


@_outer_loop.register_fake
def _(left_SF: Tensor, right_SD: Tensor, _1: Any, _2: Any, experts: int) -> Tensor:
    return right_SD.new_empty(experts, left_SF.shape[1], right_SD.shape[1])
