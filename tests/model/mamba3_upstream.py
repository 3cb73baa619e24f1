"""Stand-ins with the exact signatures of mamba-ssm's Mamba-3 kernels, on our chunked form.

They hold a caller to what the kernels ask for (2.3.2.post1): shapes, fp32 next to narrow tensors,
one packed row with int32 boundaries. The numbers are right for any dtype, on any device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, ScanInputs
from megacpp.model.documents import Documents
from tests.golden.harness import packed_row

States = tuple[Tensor, Tensor, Tensor, Tensor]


def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: States | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    assert D is not None and not return_final_states
    H, N = V.shape[2], Q.shape[-1]
    docs = checked(Q, K, V, ADT, DT, Trap, Angles, cu_seqlens)
    assert Q_bias.shape == K_bias.shape == (H, N)
    assert Angles.shape[-1] % 2 == 0 and Angles.shape[-1] <= N // 2
    inputs = ScanInputs(Q[:, :, None], K[:, :, None], V, Z, ADT, DT, Trap, Angles)
    weights = HeadWeights(Q_bias[:, None], K_bias[:, None], D)
    if Input_States is None:
        return mamba3_chunked(inputs, weights, docs, "interleaved", chunk_size)[0]
    # The kernel takes a state for each sequence: one at a time here, in the order of the rows.
    angle, ssm, k, v = Input_States
    state = Mamba3State(angle, ssm, k[:, :, None], v)
    if cu_seqlens is None:
        return mamba3_chunked(inputs, weights, docs, "interleaved", chunk_size, state)[0]
    outputs = []
    for i, (start, end) in enumerate(pairwise(cu_seqlens)):
        part = inputs.part(slice(None), slice(int(start), int(end)))
        whole = Documents.rows(1, int(end - start))
        entering = state.rows(slice(i, i + 1))
        outputs.append(mamba3_chunked(part, weights, whole, "interleaved", chunk_size, entering)[0])
    return torch.cat(outputs, 1)


def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    assert not return_state and dtype == V.dtype and chunk_size >= 8
    R, N = Q.shape[2], Q.shape[-1]
    assert Q.shape[3] == K.shape[3] and Q.shape[3] in (1, V.shape[2])
    docs = checked(Q, K, V, ADT, DT, Trap, Angles, cu_seqlens)
    assert rotary_dim_divisor in (2, 4) and Angles.shape[-1] == N // rotary_dim_divisor
    assert Angles.dtype == DT.dtype
    inputs = ScanInputs(Q, K, V, Z, ADT, DT, Trap, Angles)
    weights = HeadWeights(Q_bias, K_bias, D, MIMO_V, MIMO_Z, MIMO_Out)
    if MIMO_Out is not None:
        return mamba3_chunked(inputs, weights, docs, "half", chunk_size)[0]
    of_ranks = []
    for r in range(R):  # the outputs of one rank: all others count nothing
        only = torch.zeros_like(MIMO_V)
        only[:, r] = 1.0
        one = HeadWeights(Q_bias, K_bias, D, MIMO_V, MIMO_Z, only)
        of_ranks.append(mamba3_chunked(inputs, one, docs, "half", chunk_size)[0])
    return torch.stack(of_ranks, 2)


def checked(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Angles: Tensor,
    cu_seqlens: Tensor | None,
) -> Documents:
    """What both kernels ask for; the documents that `cu_seqlens` stands for."""
    B, L, H, _ = V.shape
    assert Q.shape == K.shape and Q.shape[:2] == (B, L) and H % Q.shape[-2] == 0
    assert ADT.shape == DT.shape == Trap.shape == (B, H, L)
    assert Angles.shape[:3] == (B, L, H)
    assert Q.dtype == K.dtype == Trap.dtype == V.dtype
    if cu_seqlens is None:
        return Documents.rows(B, L)
    assert B == 1 and cu_seqlens.dtype == torch.int32
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == L and (cu_seqlens.diff() > 0).all()
    return packed_row(cu_seqlens)
