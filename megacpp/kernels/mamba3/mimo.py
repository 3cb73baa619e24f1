"""Values of the ranks of a MIMO update (several inputs and outputs of a head's state).

Legend: B rows, J chunks of a row, C tokens of a chunk, H heads, R MIMO rank, P head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.torch_extras import once_differentiable, wide


class MimoValues(torch.autograd.Function):
    """Values of every rank; keeps its input as it is for backward, not what it is in fp32."""

    @staticmethod
    def forward(ctx: Any, v_BHJCP: Tensor, mimo_x_HRP: Tensor) -> Tensor:
        """Return `[B, H, J, R, C, P]` in the dtype of v; products are fp32 or wider."""
        ctx.save_for_backward(v_BHJCP, mimo_x_HRP)
        v_BHJ1CP, x_H1R1P = v_BHJCP[:, :, :, None], mimo_x_HRP[:, None, :, None]
        return (v_BHJ1CP * x_H1R1P).to(v_BHJCP.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        v_BHJCP, mimo_x_HRP = ctx.saved_tensors
        dout_BHJRCP = wide(grads[0])
        dv_BHJCP = (dout_BHJRCP * mimo_x_HRP[:, None, :, None]).sum(3)
        dmimo_x_HRP = (dout_BHJRCP * v_BHJCP[:, :, :, None]).sum((0, 2, 4))
        return dv_BHJCP.to(v_BHJCP.dtype), dmimo_x_HRP
