"""M2RNN in Triton: the recurrence of chunks.py, a state in the registers of a few warps.

Forward is one launch for as many tokens as `SPAN_BYTES` of partial sums allow, and so is backward,
from the last tokens to the first (megacpp/kernels/m2rnn/triton_kernels.py). No atomics: results
repeat exactly.

Beside what it returns, a launch has sums over the rows of a state in parts of 16 rows, and
gradients of inputs that heads share for each head, in fp32: outputs in forward, dq, dk, dv and df
in backward. Backward also holds the states and tanh of one chunk, `2 C N B K V` numbers.

Legend: B rows, T tokens of a row, N heads, K key, V value, C tokens of a chunk, X chunks of a row,
S sequences (`Sequences` in backends.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.m2rnn.chunks import ChunkPlan
from megacpp.kernels.m2rnn.triton_launch import Launch
from megacpp.kernels.strides import side_by_side
from megacpp.torch_extras import no_autocast, once_differentiable

CLIPS = {None: 0, "carried": 1, "total": 2}  # the kernels' names of them


class TritonChunked(torch.autograd.Function):
    """Recurrence by Triton kernels: arguments, results and saved tensors of `Chunked` (chunks.py).

    Of every token the state in front of it alone is saved, so one state less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BTNK: Tensor,
        k_BTNK: Tensor,
        v_BTNV: Tensor,
        f_BTN1: Tensor,
        w_NVV: Tensor,
        initial_SNKV: Tensor | None,
        plan: ChunkPlan,
    ) -> tuple[Tensor, ...]:
        """Return outputs `[B, T, N, V]`, and final states if they are wanted.

        Args: as `Chunked.forward` (chunks.py); the plan's dtype is fp32.
        """
        assert plan.dtype == torch.float32, f"the kernels compute in fp32, not in {plan.dtype}"
        tensors = q_BTNK, k_BTNK, v_BTNV, f_BTN1, w_NVV, initial_SNKV
        starts_BT, index_BT = _restarts(plan)
        y_BTNV, final_SNKV, *kept = forward(
            *_ready(*tensors),
            *(starts_BT, index_BT, plan.num_heads, plan.chunk_size),
            *(_num_finals(plan, index_BT), plan.by_row, plan.keep_states),
        )
        ctx.save_for_backward(*tensors, *kept)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # final states are rarely used
        return (y_BTNV, final_SNKV) if plan.final_states else (y_BTNV,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTNV: Tensor | None, dfinal_SNKV: Tensor | None = None) -> Any:
        """Return the gradients of all tensors of `forward`, from those of its results."""
        # Read once: each reading recomputes a region.
        q_BTNK, k_BTNK, v_BTNV, f_BTN1, w_NVV, initial_SNKV, *kept = ctx.saved_tensors
        plan: ChunkPlan = ctx.plan
        B, T, _, V = v_BTNV.shape
        dy = v_BTNV.new_zeros(B, T, plan.num_heads, V) if dy_BTNV is None else dy_BTNV
        mode, bound = (plan.clip.mode, plan.clip.limit) if plan.clip else (None, 0.0)
        with no_autocast(w_NVV):
            dq, dk, dv, df_BTN, dw_NVV, dinitial_SNKV = backward(
                dy.contiguous(),
                None if dfinal_SNKV is None else dfinal_SNKV.contiguous(),
                *_ready(q_BTNK, k_BTNK, v_BTNV, f_BTN1, w_NVV, initial_SNKV),
                *(*_restarts(plan), kept, plan.num_heads, plan.chunk_size),
                *(plan.by_row, CLIPS[mode], bound),
            )
        wanted = None if initial_SNKV is None else dinitial_SNKV
        return dq, dk, dv, df_BTN.view_as(f_BTN1), dw_NVV, wanted, None


def _ready(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN1: Tensor,
    w_NVV: Tensor,
    initial_SNKV: Tensor | None,
) -> tuple[Any, ...]:
    """Return the inputs with contiguous vectors and matrices."""
    vectors = [side_by_side(x) for x in (q_BTNK, k_BTNK, v_BTNV)]
    initial_SNKV = None if initial_SNKV is None else initial_SNKV.contiguous()
    return *vectors, f_BTN1[..., 0], w_NVV.contiguous(), initial_SNKV


def _restarts(plan: ChunkPlan) -> tuple[Tensor | None, Tensor | None]:
    """Return restarts behind a row's first token and the sequence of each token; None: no restarts.

    bool and int64 `[B, T]`.
    """
    if not plan.seqs.entries:
        return None, None
    return F.pad(plan.seqs.starts_BT[:, 1:], (1, 0)), plan.seqs.index_BT.contiguous()


def _num_finals(plan: ChunkPlan, index_BT: Tensor | None) -> int:
    """Return how many final states are wanted, by row or sequence (waits for the device)."""
    if not plan.final_states:
        return 0
    if plan.by_row or index_BT is None:
        return len(plan.seqs.starts_BT)
    return int(index_BT[-1, -1]) + 1


# Operators of their own, so that tensors without values pass, and so that a compiler need not look
# inside.
@torch.library.custom_op("megacpp::m2rnn_forward", mutates_args=())
def forward(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    initial_SNKV: Tensor | None,
    starts_BT: Tensor | None,
    index_BT: Tensor | None,
    num_heads: int,
    chunk_size: int,
    finals: int,
    by_row: bool,
    keep_states: bool,
) -> list[Tensor]:
    """Return outputs, final states, and the tensors that backward needs.

    These are states at chunk starts `[X, B, N, K, V]` or, with `keep_states`, of each token the
    state in front and tanh, `[N, T, B, K, V]` each.

    Args:
        q_BTNK: queries.
        k_BTNK: keys.
        v_BTNV: values.
        f_BTN: forget values in (0, 1).
        w_NVV: state weights.
        initial_SNKV: fp32, one per sequence, or per row if `by_row` or nothing restarts.
        starts_BT: bool, restarts behind a row's first token; None: none.
        index_BT: int64, sequence of each token; None: one per row.
        num_heads: N.
        chunk_size: tokens of a chunk.
        finals: number of final states; 0: none are wanted.
        by_row: one initial and final state per row.
        keep_states: return states and tanh of every token.
    """
    rows = None if by_row else index_BT
    inside = None if rows is None else initial_SNKV
    inputs = q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV
    launch = Launch(*inputs, starts_BT, index_BT, inside, num_heads, chunk_size)
    results = _results(k_BTNK, v_BTNV, num_heads, chunk_size, finals, keep_states)
    y_BTNV, final_SNKV, *kept = results
    if initial_SNKV is None:
        shape = len(v_BTNV), num_heads, k_BTNK.shape[-1], v_BTNV.shape[-1]
        h_BNKV = v_BTNV.new_empty(shape, dtype=torch.float32)  # the kernel takes it for zeros
    else:
        h_BNKV = initial_SNKV.clone() if rows is None else initial_SNKV[rows[:, 0]]
    fronts, states = (None, kept) if keep_states else (kept[0], ())
    final = final_SNKV if finals and rows is not None else None
    P = launch.blocks
    for span in launch.spans(0 if P == 1 else 4 * P * y_BTNV[:, 0].numel()):
        y_BUNV = y_BTNV[:, span]
        y_PBUNV = y_BUNV[None]
        if P > 1:
            y_PBUNV = y_BUNV.new_empty(P, *y_BUNV.shape, dtype=torch.float32)
        from_zero = initial_SNKV is None and span.start == 0
        launch.run(span, h_BNKV, y_PBUNV, fronts, final, states, from_zero)
        if P > 1:
            _sum_parts([(y_PBUNV, y_BUNV)])
    if finals and rows is None:
        final_SNKV.copy_(h_BNKV)
    return results


@forward.register_fake
def _results_of(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    _f: Any,
    _w: Any,
    _initial: Any,
    _starts: Any,
    _index: Any,
    num_heads: int,
    chunk_size: int,
    finals: int,
    _by_row: bool,
    keep_states: bool,
) -> list[Tensor]:
    return _results(k_BTNK, v_BTNV, num_heads, chunk_size, finals, keep_states)


def _results(
    k_BTNK: Tensor, v_BTNV: Tensor, N: int, chunk_size: int, finals: int, keep_states: bool
) -> list[Tensor]:
    """Return memory for the results of forward."""
    (B, T, _, V), K = v_BTNV.shape, k_BTNK.shape[-1]
    kept = [(N, T, B, K, V)] * 2 if keep_states else [(-(-T // chunk_size), B, N, K, V)]
    shapes = [(finals, N, K, V), *kept]
    states = [v_BTNV.new_empty(shape, dtype=torch.float32) for shape in shapes]
    return [v_BTNV.new_empty(B, T, N, V), *states]


@torch.library.custom_op("megacpp::m2rnn_backward", mutates_args=())
def backward(
    dy_BTNV: Tensor,
    dfinal_SNKV: Tensor | None,
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    initial_SNKV: Tensor | None,
    starts_BT: Tensor | None,
    index_BT: Tensor | None,
    kept: Sequence[Tensor],
    num_heads: int,
    chunk_size: int,
    by_row: bool,
    clip: int,
    bound: float,
) -> list[Tensor]:
    """Gradients of q, k, v, f, W and the initial states (no numbers if there were none).

    Args:
        kept: what forward made for it: states at chunk starts, or all states and tanh.
        clip: one of `CLIPS`, with its `bound`.
    """
    inputs, rows = (q_BTNK, k_BTNK, v_BTNV, f_BTN), None if by_row else index_BT
    inside = (None, None, None)
    dinitial_SNKV = None if initial_SNKV is None else torch.zeros_like(initial_SNKV)
    if rows is not None:
        inside = initial_SNKV, dinitial_SNKV, dfinal_SNKV
    launch = Launch(*inputs, w_NVV, starts_BT, index_BT, inside[0], num_heads, chunk_size)
    (B, T, _, V), K, N, P = v_BTNV.shape, k_BTNK.shape[-1], num_heads, launch.blocks
    wide = w_NVV.new_empty(0, dtype=torch.float32)
    dw_PBNVV, dw_NVV = wide.new_empty(P, B, N, V, V), torch.empty_like(w_NVV)
    dh_BNKV = _behind_the_rows(dfinal_SNKV, rows, wide.new_empty(B, N, K, V))
    again = len(kept) == 1
    fronts = kept[0] if again else None
    states = wide.new_empty(2, N, min(chunk_size, T), B, K, V).unbind(0) if again else kept
    grads = [x.new_empty(x.shape) for x in inputs]
    for span in reversed(launch.spans(4 * B * N * (2 * K + P * V + P))):
        U = span.stop - span.start
        shapes = (1, B, U, N, K), (1, B, U, N, K), (P, B, U, N, V), (P, B, U, N)
        parts = [wide.new_empty(shape) for shape in shapes]
        first = span.stop == T  # which is the last of the row
        given = parts, dw_PBNVV, clip, bound, (first and dfinal_SNKV is None, first)
        launch.backward(span, dy_BTNV, fronts, states, dh_BNKV, *inside[1:], *given)
        heads = [*parts[:3], parts[3][..., None]], [*grads[:3], grads[3][..., None]]
        pairs = [(part, dx[:, span]) for part, dx in zip(*heads, strict=True)]
        if span.start == 0 and len(w_NVV) == N:  # dW is complete
            pairs.append((dw_PBNVV.view(P * B, 1, N, V, V), dw_NVV[None]))
        _sum_parts(pairs)
        del parts, given, heads, pairs  # before the next are made
    if dinitial_SNKV is None:
        dinitial_SNKV = dw_PBNVV.new_empty(0)
    elif rows is None:
        dinitial_SNKV = dh_BNKV
    else:
        dinitial_SNKV.index_copy_(0, rows[:, 0], dh_BNKV)
    if len(w_NVV) != N:  # heads share one
        dw_NVV = dw_PBNVV.unflatten(2, (len(w_NVV), -1)).sum((0, 1, 3)).to(w_NVV.dtype)
    return [*grads, dw_NVV, dinitial_SNKV]


def _sum_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    from megacpp.kernels.m2rnn.triton_sums import sum_parts  # imports Triton

    sum_parts(pairs)


def _behind_the_rows(dfinal_SNKV: Tensor | None, rows: Tensor | None, empty_BNKV: Tensor) -> Tensor:
    """Return the gradient that comes to each row's last state from outside.

    Where there is none it is memory that the first launch takes for zeros.
    """
    if dfinal_SNKV is None:
        return empty_BNKV
    return dfinal_SNKV.clone() if rows is None else dfinal_SNKV[rows[:, -1]]


@backward.register_fake
def _gradients_of(
    _dy: Any,
    _dfinal: Any,
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    initial_SNKV: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    grads = [x.new_empty(x.shape) for x in (q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)]
    if initial_SNKV is None:
        return [*grads, w_NVV.new_empty(0, dtype=torch.float32)]
    return [*grads, torch.empty_like(initial_SNKV)]
