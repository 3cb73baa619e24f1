"""FLOPs of our own operators, registered for `torch.utils.flop_counter.FlopCounterMode`.

FlopCounterMode doesn't see the inside of an operator. Code that counts imports this file; training
doesn't, because `torch.utils.flop_counter` imports Triton where it is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import megacpp.kernels.experts.grouped_mm
import megacpp.kernels.gated_delta_rule.triton
import megacpp.kernels.m2rnn.triton
import megacpp.kernels.mamba3.triton  # noqa: F401 - these define the operators below


@register_flop_formula(torch.ops.megacpp.expert_products)
def _expert_products(x_SD: torch.Size, weight_EDF: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of one product of all rows."""
    return 2 * x_SD[0] * weight_EDF[1] * weight_EDF[2]


@register_flop_formula(torch.ops.megacpp.expert_outer_products)
def _expert_outer_products(left_SF: torch.Size, right_SD: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left_SF[0] * left_SF[1] * right_SD[1]


@register_flop_formula(torch.ops.aten._grouped_mm)
def _grouped_mm(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of a product of each group's rows `[S, D]` with its `[D, F]`, or of sums over them."""
    return 2 * left[-2] * left[-1] * right[-1]


@register_flop_formula(torch.ops.aten.linalg_solve_triangular)
def _triangular(a_CC: torch.Size, b_CV: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of a triangular solve: half a product of the sizes."""
    return math.prod(a_CC) * b_CV[-1]


def _m2rnn_products(k: torch.Size, v: torch.Size, num_heads: int) -> int:
    """FLOPs of h W and q h of every token and head; k v^T is element-wise."""
    return 2 * v[0] * v[1] * num_heads * k[3] * v[3] * (v[3] + 1)


@register_flop_formula(torch.ops.megacpp.m2rnn_forward)
def _m2rnn_forward(
    q: torch.Size, k: torch.Size, v: torch.Size, _f: Any, _w: Any, _initial: Any, _starts: Any,
    _index: Any, num_heads: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _m2rnn_products(k, v, num_heads)


@register_flop_formula(torch.ops.megacpp.m2rnn_backward)
def _m2rnn_backward(
    _dy: Any, _dfinal: Any, _q: Any, k: torch.Size, v: torch.Size, _f: Any, _w: Any, _initial: Any,
    _starts: Any, _index: Any, kept: Sequence[torch.Size], num_heads: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of twice the forward, and of the states again if they weren't saved, without q h."""
    states = 2 * v[0] * v[1] * num_heads * k[3] * v[3]
    return 2 * _m2rnn_products(k, v, num_heads) + states * (1 + (v[3] if len(kept) == 1 else 0))


@register_flop_formula(torch.ops.megacpp.mamba3_forward)
def _mamba3_forward(
    q: torch.Size, _k: Any, v: torch.Size, *rest: Any, chunk: int = 0, **__: Any
) -> int:
    """FLOPs of scores and of what they weigh, and of each chunk's state in and out."""
    (B, T, H, P), N, C = v, q[-1], chunk or rest[10]
    return 2 * B * T * H * (C * (N + P) + 2 * N * P)


@register_flop_formula(torch.ops.megacpp.mamba3_backward)
def _mamba3_backward(
    _dy: Any, _states: Any, q: torch.Size, _k: Any, v: torch.Size, *rest: Any, **__: Any
) -> int:
    """FLOPs of four products of N and three of P with a chunk's tokens, and five of states."""
    (B, T, H, P), N, C = v, q[-1], rest[10]
    return 2 * B * T * H * (C * (4 * N + 3 * P) + 5 * N * P)


@register_flop_formula(torch.ops.megacpp.delta_rule_forward)
def _delta_rule_forward(
    _q: Any, k: torch.Size, v: torch.Size, _g: Any, _beta: Any, _first: Any, chunk: int, *_: Any,
    **__: Any,
) -> int:  # fmt: skip
    """FLOPs of three products of keys and two of values with a chunk's tokens, and of states."""
    (B, T, N, V), K = v, k[-1]
    return 2 * B * T * N * (chunk * (3 * K + 2 * V) + 3 * K * V)


@register_flop_formula(torch.ops.megacpp.delta_rule_backward)
def _delta_rule_backward(_do: Any, _dlast: Any, *given: Any, **__: Any) -> int:
    """FLOPs of the forward again, and of twice it."""
    return 3 * _delta_rule_forward(*given)
