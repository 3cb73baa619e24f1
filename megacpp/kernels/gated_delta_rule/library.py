"""Gated delta rule by the Triton kernels of flash-linear-attention (fla-core 0.6.0).

`chunk_gated_delta_rule` of fla/ops/gated_delta_rule/chunk.py takes a batch of rows, or one row of
packed sequences with their boundaries. Unsupported configurations are refused before a run starts
(megacpp/kernels/gated_delta_rule/support.py).

Legend: as megacpp/kernels/gated_delta_rule/chunks.py, and S sequences of a batch, L = B T tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.gated_delta_rule.chunks import widened
from megacpp.model.documents import Documents


def library_rule(
    q_BTHK: Tensor | None,
    k_BTHK: Tensor,
    v_BTNV: Tensor,
    g_BTN: Tensor,
    beta_BTN: Tensor,
    docs: Documents | None,
    initial_BNKV: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the results of `gated_delta_rule`, by the kernel.

    It normalises q and k itself and saves 1 / length of them for backward.

    Args:
        q_BTHK: queries before normalisation; None: only the state is wanted.
        k_BTHK: keys before normalisation.
        v_BTNV: values.
        g_BTN: log decay, at most 0.
        beta_BTN: write strength in [0, 2].
        docs: documents; None: one per row.
        initial_BNKV: state that enters each row; None: zeros.
        chunk_size: tokens of a chunk.
    """
    B, T = v_BTNV.shape[:2]
    q_BTHK = k_BTHK if q_BTHK is None else q_BTHK
    inputs = [q_BTHK, k_BTHK, widened(v_BTNV, initial_BNKV), g_BTN, beta_BTN]
    settings: dict[str, Any] = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "chunk_size": chunk_size,
    }
    if docs is None or docs.whole:
        return kernel()(*inputs, initial_state=initial_BNKV, **settings)
    bounds_S1 = docs.cu_seqlens.long()
    row_ends_B1 = torch.arange(B + 1, device=bounds_S1.device) * T
    places_B1 = torch.searchsorted(bounds_S1, row_ends_B1)  # every row starts a sequence
    initial_SNKV = None
    if initial_BNKV is not None:
        initial_SNKV = initial_BNKV.new_zeros(len(bounds_S1) - 1, *initial_BNKV.shape[1:])
        initial_SNKV = initial_SNKV.index_copy(0, places_B1[:-1], initial_BNKV)
    packed = [x.flatten(0, 1)[None] for x in inputs]
    o_1LNV, final_SNKV = kernel()(
        *packed, initial_state=initial_SNKV, cu_seqlens=bounds_S1, **settings
    )
    return o_1LNV[0].unflatten(0, (B, T)), final_SNKV[places_B1[1:] - 1]


def kernel() -> Callable[..., Any]:
    """Return `chunk_gated_delta_rule` of the installed package.

    Raises:
        ImportError: flash-linear-attention isn't installed.
    """
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
