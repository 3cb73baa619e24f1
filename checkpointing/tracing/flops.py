"""FLOPs of an operator from its arguments, for the meter.

`torch.utils.flop_counter` imports Triton where it is installed, so training doesn't import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import megacpp.kernels.flop_formulas  # noqa: F401 - registers those of our own operators


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a fused attention kernel's forward."""
    return sdpa_flop_count(q.shape, *_for_all_heads(q, k, v))


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, *_for_all_heads(q, k, v))


def _varlen_flops(
    q_THD: Any,
    _k: Any,
    v_TKD: Any,
    _q: Any,
    _cu_k: Any,
    _max_q: Any,
    longest: int,
    *_: Any,
    **__: Any,
) -> int:
    """FLOPs of attention over rows that are one document each, half of whose pairs are causal.

    torch's own formula needs the boundaries: without their values it takes every document for one
    as long as a row.
    """
    return q_THD.shape[0] * longest * q_THD.shape[1] * (q_THD.shape[2] + v_TKD.shape[2])


def _for_all_heads(q: Any, k: Any, v: Any) -> Iterator[Sequence[int]]:
    """Return shapes of keys and values as query heads read them: torch 2.11 counts no groups."""
    return ((x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v))


def _added_product_flops(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of `total + left @ right`, of matrices or of batches of them."""
    return 2 * left.numel() * right.shape[-1]


_aten = torch.ops.aten
_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
# That torch.utils.flop_counter lacks, has for as many heads of keys as of queries, or (addmm, 2.13)
# can't use for sums of another dtype.
OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.addmm: _added_product_flops,
    _aten.addmm_: _added_product_flops,
    _aten.baddbmm_: _added_product_flops,
    **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention_flops for name in _ATTENTION},
    **{
        getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flops
        for name in _ATTENTION
    },
}


def formula_of(func: Any) -> Callable[..., int] | None:
    """Return an operator's FLOPs formula, of its arguments and `out_val`; None: not counted."""
    packet = func._overloadpacket
    if str(packet) == "torch_attn._varlen_attn":  # made when torch.nn.attention.varlen is imported
        return _varlen_flops
    return OWN_FORMULAS.get(packet) or flop_registry.get(packet)
