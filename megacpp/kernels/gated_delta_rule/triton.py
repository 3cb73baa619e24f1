"""Gated delta rule in Triton: what chunks.py computes, in a few launches.

    forward    triangular solves of chunks, states over chunks, outputs
    backward   the first two again, gradients of queries, of states over chunks, of keys and values

Kept for backward are the inputs alone. While it runs, backward holds a state of each chunk and its
gradient in the dtype of v, and gradients of q and k for each value head. Nothing is added by
atomics: results repeat exactly.

Legend: as megacpp/kernels/gated_delta_rule/chunks.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.gated_delta_rule.triton_launch import DeltaRule, DeltaRulePlan
from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.strides import side_by_side
from megacpp.model.documents import Documents
from megacpp.torch_extras import no_autocast, once_differentiable

LEAST, MOST = 16, 64  # tokens of a chunk


def triton_rule(
    q_BTHK: Tensor | None,
    k_BTHK: Tensor,
    v_BTNV: Tensor,
    g_BTN: Tensor,
    beta_BTN: Tensor,
    docs: Documents | None,
    initial_BNKV: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the results of `gated_delta_rule`, by Triton kernels.

    Args:
        q_BTHK: queries before normalisation; None: only the state is wanted.
        k_BTHK: keys before normalisation.
        v_BTNV: values, as wide as the state.
        g_BTN: log decay, at most 0.
        beta_BTN: write strength in [0, 2].
        docs: documents; None: one per row.
        initial_BNKV: state that enters each row; None: zeros.
        chunk_size: most tokens of a chunk; the kernels take 16, 32 or 64 (see `chunk_of`).
    """
    assert v_BTNV.dtype != torch.float64, "the kernels compute in fp32"
    plan = DeltaRulePlan(chunk_of(v_BTNV, k_BTHK.shape[-1], chunk_size), runs(docs))
    with no_autocast(v_BTNV):
        return _DeltaRule.apply(  # type: ignore[return-value]
            q_BTHK, k_BTHK, v_BTNV, g_BTN, beta_BTN, initial_BNKV, plan
        )


def chunk_of(v_BTNV: Tensor, key_dim: int, chunk_size: int) -> int:
    """Return the tokens of a chunk, whose tiles a program's registers hold.

    They hold 64 in bf16 or fp16 where products read operands from shared memory, on compute
    capability 9.0 to 11.x, and 32 elsewhere. In fp32 they hold 32, or 16 of keys above 64 dims.

    Args:
        v_BTNV: values.
        key_dim: K.
        chunk_size: most tokens.
    """
    most, device = MOST, v_BTNV.device
    if v_BTNV.element_size() == 4:
        most = 32 if key_dim <= 64 else 16
    elif device.type == "cuda" and torch.cuda.is_available():
        by_warps = not (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
        most = 32 if by_warps else MOST
    return min(most, max(LEAST, 1 << (chunk_size.bit_length() - 1)))


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        first: Tensor | None,
        plan: DeltaRulePlan,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta, first)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # final states are rarely used
        return tuple(_forward(q, k, v, g, beta, first, *plan))  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, first = ctx.saved_tensors
        with no_autocast(v):
            do = None if q is None else do
            asked = None if do is None else q
            dq, *found, dfirst = _backward(do, dlast, asked, k, v, g, beta, first, *ctx.plan)
        dfirst = None if first is None else dfirst.to(first.dtype)
        return None if asked is None else dq, *found, dfirst, None


@graph_operator("delta_rule_forward")
def _forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    chunk: int,
    runs_BT: Tensor | None,
) -> list[Tensor]:
    """Return the outputs, without numbers if there are no queries, and the state behind rows."""
    rule = DeltaRule(DeltaRulePlan(chunk, runs_BT), q, k, v, g, beta)
    solved = rule.solve(keep=False)
    states, last = rule.states(solved, first, keep=q is not None)
    return [v.new_empty(0) if q is None else rule.outputs(solved, states), last]


@graph_operator("delta_rule_backward")
def _backward(
    do: Tensor | None,
    dlast: Tensor | None,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    first: Tensor | None,
    chunk: int,
    runs_BT: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of q, k, v, g, beta and the first state; of None without numbers."""
    rule = DeltaRule(DeltaRulePlan(chunk, runs_BT), q, k, v, g, beta)
    solved = rule.solve(keep=True)
    states, _ = rule.states(solved, first, keep=True)
    queries, dout = None, rule.v
    if do is not None:
        dout = side_by_side(do)
        queries = rule.of_queries(solved, states, dout)
    dstates, du, dfirst = rule.dstates(solved, queries, dout, dlast, first is not None)
    dq, *found = rule.of_keys(solved, queries, states, dstates, du, dout)
    return [x if x is not None else v.new_empty(0) for x in (dq, *found, dfirst)]


def runs(docs: Documents | None) -> Tensor | None:
    """Return the number of each token's document in its row; None: a row is one document.

    The state in front of a row, if there is one, is its first document's.
    """
    if docs is None or docs.whole:
        return None

    def make() -> Tensor:
        return F.pad(docs.starts_BT[:, 1:].cumsum(1), (1, 0)).to(torch.int32)

    return docs.memo(("gated_delta_rule", "runs"), make)
