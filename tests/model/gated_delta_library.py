"""A stand-in for the kernel of flash-linear-attention, with the arguments that it documents."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: rows, or one packed row with its boundaries."""
    assert output_final_state and use_qk_l2norm_in_kernel and chunk_size in (16, 32, 64)
    if cu_seqlens is None:
        return gated_delta_sequential(q, k, v, g, beta, None, initial_state)
    bounds, found = cu_seqlens.tolist(), []
    assert len(q) == 1 and cu_seqlens.dtype == torch.int64 and bounds[-1] == q.shape[1]
    assert initial_state is None or len(initial_state) == len(bounds) - 1
    for i, (a, b) in enumerate(pairwise(bounds)):
        first = None if initial_state is None else initial_state[i : i + 1]
        part = [x[:, a:b] for x in (q, k, v, g, beta)]
        found.append(gated_delta_sequential(*part, None, first))
    return torch.cat([o for o, _ in found], 1), torch.cat([s for _, s in found])
