"""FP8 products of linear layers that `tp` shards, with the scales of whole rows and columns.

A scale is that of the largest number which it covers, and ranks of `tp` may hold parts of these
numbers: of the rows of weight and input where the weight's columns are sharded, of the rows of the
output's gradient and the columns of the weight where its rows are. There the largest is found by a
maximum over the ranks, so that every rank rounds as one rank alone would. A maximum is a number for
each token or row, of the operand's dtype.

torchao's own layers take parts of weights for whole ones. Theirs are the rounding and the product.

Legend: T tokens, D in, F out; this rank's part of D or of F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Role = Literal["input", "weight", "grad_output"]


@dataclass(frozen=True, eq=False)
class ShardScales:
    """Casts of one layer's operands to FP8.

    Attributes:
        config: torchao's `Float8LinearConfig`.
        products: torchao's `LinearMMConfig`.
        mesh: of the axis `tp`.
        dim: of the weight, sharded over it; None: every rank has all of the weight.
    """

    config: Any
    products: Any
    mesh: DeviceMesh
    dim: int | None

    def cast(self, x: Tensor, role: Role, use: str, along: int) -> Tensor:
        """Return a matrix in FP8 as torchao's config wants it for a use, or as it is.

        Args:
            x: matrix with tokens or F first; the weight as its transpose, D first.
            role: of the operand.
            use: suffix of the config's field: empty, `_for_grad_input`, `_for_grad_weight`.
            along: dim that a scale of a row or column goes along.
        """
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        cast = getattr(self.config, f"cast_config_{role}{use}")
        if cast.scaling_type is ScalingType.DISABLED:
            return x
        by_row, cut = cast.scaling_granularity is ScalingGranularity.AXISWISE, self._cut(role)
        return hp_tensor_to_float8_dynamic(
            x,
            cast.target_dtype,
            self.products,
            reduce_amax=cut is not None and (cut == along or not by_row),
            gemm_input_role=GemmInputRole[role.upper()],
            device_mesh=self.mesh,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=along if by_row else None,
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )

    def _cut(self, role: Role) -> int | None:
        """Dim of an operand of which a rank has a part, -1 the last of two; None: it has all."""
        if role == "weight":  # its transpose
            return None if self.dim is None else (-1, 0)[self.dim]
        return -1 if self.dim == (1 if role == "input" else 0) else None


class Float8Shard(nn.Linear):
    """Linear layer in FP8 whose weight is this rank's part; its class is put in place."""

    scales: ShardScales

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., F]`; where the columns are sharded, this rank's term of its sum."""
        y_TF = _Product.apply(x.flatten(0, -2), self.weight, self.scales)
        assert isinstance(y_TF, Tensor)
        return y_TF.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Product of torchao's `matmul_with_hp_or_float8_args`, with maxima over ranks."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x_TD, w_FD, scales = args
        ctx.save_for_backward(x_TD, w_FD)
        ctx.scales = scales
        return scales.cast(x_TD, "input", "", -1) @ scales.cast(w_FD.t(), "weight", "", 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x_TD, w_FD), (dy_TF,), cast = ctx.saved_tensors, grads, ctx.scales.cast
        w_DF = cast(w_FD.t(), "weight", "_for_grad_input", -1)
        dx_TD = cast(dy_TF, "grad_output", "", -1) @ w_DF.t()
        dy_TF = cast(dy_TF, "grad_output", "_for_grad_weight", 0)
        return dx_TD, dy_TF.t() @ cast(x_TD, "input", "_for_grad_weight", 0), None


def shard_in_fp8(linear: nn.Linear, config: Any) -> None:
    """Let a linear layer whose weight is sharded over `tp` multiply in FP8, in place.

    Args:
        linear: its weight is a `DTensor` of one axis; hooks and parameter stay.
        config: torchao's `Float8LinearConfig`.
    """
    from torchao.float8.float8_linear import Float8Linear

    weight = linear._parameters["weight"]
    assert isinstance(weight, DTensor) and linear.bias is None
    (placement,) = weight.placements
    dim = placement.dim if isinstance(placement, Shard) else None
    with torch.device("meta"):
        products = Float8Linear(1, 1, bias=False, config=config).linear_mm_config
    linear.__class__ = type("Float8Linear", (Float8Shard, type(linear)), {})
    assert isinstance(linear, Float8Shard)
    linear.scales = ShardScales(config, products, weight.device_mesh, dim)
