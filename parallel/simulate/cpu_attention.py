"""Fused attention of a CPU on the meta device, where torch runs another one, of plain products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

_of_device = F.scaled_dot_product_attention


@contextmanager
def cpu_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` allocate on the meta device what it does on a CPU."""
    F.scaled_dot_product_attention = _as_on_cpu  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _of_device


def _as_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the operator that torch chooses for CPU tensors of these shapes."""
    assert attn_mask is None or attn_mask.dtype != torch.bool, "torch would make it additive"
    with _disable_current_modes():
        q, k, v, *mask = (_on_cpu(t) for t in (query, key, value, attn_mask) if t is not None)
        options = {"attn_mask": mask[0] if mask else None, "scale": scale}
        chosen = torch._fused_sdp_choice(
            q, k, v, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa, **options
        )
    if chosen != SDPBackend.FLASH_ATTENTION.value:
        return _of_device(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _on_cpu(t: Tensor) -> Tensor:
    """Return a tensor of this shape whose rows share memory; torch's choice looks at no more."""
    step = t.stride(-1)
    memory = torch.empty(1 + max(0, t.shape[-1] - 1) * step, dtype=t.dtype, device="cpu")
    return memory.as_strided(t.shape, (*[0] * (t.dim() - 1), step))
