"""M2RNN chunk by chunk, forward and backward: the fast form behind `m2rnn_chunked`.

Legend: B rows, T tokens of a row, N heads, K key, V value, C tokens of a chunk, X chunks of a row,
S sequences (`Sequences` in backends.py). Inside a chunk tokens come first and heads before rows, so
that one token of all rows is contiguous and a head's states meet its W in one matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megacpp.torch_extras import no_autocast, once_differentiable

if TYPE_CHECKING:
    from megacpp.kernels.m2rnn.backends import Sequences


@dataclass
class StateClip:
    """Bound on every entry of the gradient that flows back through the state.

    `total`: all of dL/dh_t, what y_t adds included (the upstream torch backend).
    `carried`: only the gradient from later tokens, before y_t adds its part, so that an output
    always teaches its own token in full (the upstream Triton backend).

    Attributes:
        bound: largest magnitude.
        mode: which gradient is clipped.
        loss_scale: factor of the loss in the backward; the bound grows with it.
    """

    bound: float
    mode: Literal["total", "carried"]
    loss_scale: float = 1.0

    @property
    def limit(self) -> float:
        """Bound on the entries as they are in the backward."""
        return self.bound * self.loss_scale


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Settings of the chunks besides tensors with gradients."""

    seqs: Sequences
    clip: StateClip | None
    chunk_size: int
    num_heads: int
    dtype: torch.dtype  # of states and of every computation
    final_states: bool
    by_row: bool = False  # one initial and final state per row instead of one per sequence
    keep_states: bool = False  # of every token, for a backward without another recurrence

    def spans(self) -> list[slice]:
        """Return the chunks of a row."""
        T = self.seqs.starts_BT.shape[1]
        return [slice(s, min(s + self.chunk_size, T)) for s in range(0, T, self.chunk_size)]

    def bound(self, mode: str) -> float | None:
        """Return the gradient bound if `mode` is the one that applies."""
        return self.clip.limit if self.clip is not None and self.clip.mode == mode else None

    def new_finals(self, h_NBKV: Tensor) -> Tensor | None:
        """Return memory for final states, whose number is a value on the device."""
        if not self.final_states:
            return None
        N, B, K, V = h_NBKV.shape
        return h_NBKV.new_empty(B if self.by_row else int(self.seqs.index_BT[-1, -1]) + 1, N, K, V)

    def keep_finals(self, final_SNKV: Tensor, after_CNBKV: Tensor, span: slice) -> None:
        """Write the final states of a chunk; those of rows are overwritten chunk by chunk."""
        if self.by_row:
            final_SNKV.copy_(after_CNBKV[-1].transpose(0, 1))
            return
        ends_BC, index_BC = self.seqs.ends_BT[:, span], self.seqs.index_BT[:, span]
        final_SNKV[index_BC[ends_BC]] = after_CNBKV.permute(2, 0, 1, 3, 4)[ends_BC]

    def take(self, x_BTND: Tensor, span: slice) -> Tensor:
        """Return a chunk `[C, N, B, D]` of an input: all N heads, in the compute dtype."""
        x_CNBD = x_BTND[:, span].permute(1, 2, 0, 3).to(self.dtype)
        return repeat_heads(x_CNBD, self.num_heads, 1).contiguous()

    def put(self, dx_BTND: Tensor, span: slice, dx_CNBD: Tensor) -> None:
        """Write an input's gradient, summed over the heads that shared it."""
        shared = dx_CNBD.unflatten(1, (dx_BTND.shape[2], -1)).sum(2)
        dx_BTND[:, span] = shared.permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class StateBuffer:
    """Memory for the states and tanh of the recurrence.

    Attributes:
        states_C1NBKV: one more than tokens; the first is the one that enters.
        z_CNBKV: tanh.
        filled: by the same recurrence, earlier.
    """

    states_C1NBKV: Tensor
    z_CNBKV: Tensor
    filled: bool = False

    @staticmethod
    def empty(tokens: int, h_NBKV: Tensor) -> StateBuffer:
        """Return memory for `tokens` tokens."""
        new, shape = h_NBKV.new_empty, h_NBKV.shape
        return StateBuffer(new(tokens + 1, *shape), new(tokens, *shape))

    def part(self, span: slice) -> StateBuffer:
        """Return a view for some tokens; neighbouring parts share the state between them."""
        states_C1NBKV = self.states_C1NBKV[span.start : span.stop + 1]
        return StateBuffer(states_C1NBKV, self.z_CNBKV[span], self.filled)


class _Chunk:
    """Inputs and states of a chunk: runs the recurrence, three operations per token.

    `buffer` is memory for the states, which are made nowhere else; if it is filled, nothing runs.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        span: slice,
        inputs: Sequence[Tensor],
        w_NVV: Tensor,
        initial_SNKV: Tensor | None,
        h_NBKV: Tensor,
        buffer: StateBuffer | None = None,
    ) -> None:
        self.plan, self.first, self.w_NVV = plan, span.start, w_NVV
        self.q_CNBK, self.k_CNBK, self.v_CNBV, f_CNB1 = (plan.take(x, span) for x in inputs)
        self.f_CNB11 = f_CNB1[..., None]
        buffer = StateBuffer.empty(len(self.q_CNBK), h_NBKV) if buffer is None else buffer
        states, self.z_CNBKV = buffer.states_C1NBKV, buffer.z_CNBKV
        if buffer.filled:
            restarted = {c: self._before(c, states[c], initial_SNKV) for c in self._restarts()}
        else:
            torch.mul(self.k_CNBK[..., :, None], self.v_CNBV[..., None, :], out=self.z_CNBKV)
            states[0] = h_NBKV
            restarted = self._run(initial_SNKV, states)
        self.after_CNBKV = states[1:]
        self.before_CNBKV = states[:-1].clone() if restarted else states[:-1]
        for c, before_NBKV in restarted.items():
            self.before_CNBKV[c] = before_NBKV

    def _restarts(self) -> list[int]:
        """Places in the chunk where a row may start a sequence."""
        return [c for c in range(len(self.q_CNBK)) if self.first + c in self.plan.seqs.entries]

    def _before(self, c: int, h_NBKV: Tensor, initial_SNKV: Tensor | None) -> Tensor:
        """Return the state that the token at such a place sees instead of `h`."""
        initial_SNKV = None if self.plan.by_row else initial_SNKV  # which is in front of a row
        return self.plan.seqs.enter(h_NBKV, initial_SNKV, self.first + c)

    def _run(self, initial_SNKV: Tensor | None, states_C1NBKV: Tensor) -> dict[int, Tensor]:
        """Compute all states and z from the state in front, and k v^T in the place of z.

        Returns by place the states in front of restarted tokens.
        """
        restarted = dict.fromkeys(self._restarts(), states_C1NBKV)
        h, z, f = states_C1NBKV.unbind(0), self.z_CNBKV.unbind(0), self.f_CNB11.unbind(0)
        z_rows = _rows(self.z_CNBKV).unbind(0)
        for c in range(len(z)):
            before_NBKV = h[c]
            if c in restarted:
                before_NBKV = restarted[c] = self._before(c, before_NBKV, initial_SNKV)
            z_rows[c].baddbmm_(_rows(before_NBKV), self.w_NVV).tanh_()
            torch.lerp(z[c], before_NBKV, f[c], out=h[c + 1])  # z + f (h - z)
        return restarted

    def outputs(self) -> Tensor:
        """Return y of every token, `[C, N, B, V]`."""
        return (self.q_CNBK[..., None, :] @ self.after_CNBKV)[..., 0, :]

    def state_gradients(
        self,
        dy_CNBV: Tensor,
        dh_NBKV: Tensor,
        dinitial_SNKV: Tensor | None,
        dfinal_SNKV: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dL/dh_t, dL/dx_t (x: the argument of tanh) and the gradient that leaves left.

        With x_t = h_{t-1} W + k_t v_t^T: dL/dx_t = (1 - f_t) (1 - tanh(x_t)^2) dL/dh_t and
        dL/dh_{t-1} = f_t dL/dh_t + dL/dx_t W^T (+ q_{t-1} dy_{t-1}^T, when token t - 1 comes).
        """
        total, carried = self.plan.bound("total"), self.plan.bound("carried")
        if self.plan.by_row:  # inside a row no token has the states in front of it and behind it
            dinitial_SNKV = dfinal_SNKV = None
        dafter_CNBKV = self.q_CNBK[..., :, None] * dy_CNBV[..., None, :]
        dx_CNBKV = (1 - self.z_CNBKV.square()).mul_(1 - self.f_CNB11)
        w_back_NVV = self.w_NVV.transpose(1, 2).contiguous()
        g, dx, f = dafter_CNBKV.unbind(0), dx_CNBKV.unbind(0), self.f_CNB11.unbind(0)
        dx_rows = _rows(dx_CNBKV).unbind(0)
        for c in reversed(range(len(g))):
            if carried is not None:
                dh_NBKV.clamp_(-carried, carried)
            g[c].add_(dh_NBKV)
            if total is not None:
                g[c].clamp_(-total, total)
            dx[c].mul_(g[c])
            torch.mul(g[c], f[c], out=dh_NBKV)
            _rows(dh_NBKV).baddbmm_(dx_rows[c], w_back_NVV)
            if self.first + c in self.plan.seqs.entries:
                t = self.first + c
                dh_NBKV = self.plan.seqs.leave(dh_NBKV, dinitial_SNKV, dfinal_SNKV, t)
        return dafter_CNBKV, dx_CNBKV, dh_NBKV

    def input_gradients(
        self, dy_CNBV: Tensor, dafter_CNBKV: Tensor, dx_CNBKV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and f. Call last: it reuses the memory of dx."""
        dq_CNBK = (self.after_CNBKV @ dy_CNBV[..., None])[..., 0]
        dk_CNBK = (dx_CNBKV @ self.v_CNBV[..., None])[..., 0]
        dv_CNBV = (self.k_CNBK[..., None, :] @ dx_CNBKV)[..., 0, :]
        gap_CNBKV = torch.sub(self.before_CNBKV, self.z_CNBKV, out=dx_CNBKV)
        df_CNB1 = gap_CNBKV.mul_(dafter_CNBKV).flatten(3).sum(-1, keepdim=True)
        return dq_CNBK, dk_CNBK, dv_CNBV, df_CNB1

    def weight_gradient(self, dx_CNBKV: Tensor) -> Tensor:
        """Return sum_t h_{t-1}^T dL/dx_t, `[N, V, V]`."""
        return (_rows(self.before_CNBKV).transpose(-1, -2) @ _rows(dx_CNBKV)).sum(0)


class Chunked(torch.autograd.Function):
    """Recurrence chunk by chunk, with a backward by hand.

    The backward goes over the chunks from last to first, each run again from the state in front of
    it, or with the states of every token as the forward left them.
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
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs `[B, T, N, V]`, and final states if they are wanted.

        Args:
            ctx: autograd's context.
            q_BTNK: queries.
            k_BTNK: keys.
            v_BTNV: values.
            f_BTN1: forget values in (0, 1).
            w_NVV: state weights.
            initial_SNKV: state in front of each sequence; None: zeros.
            plan: settings.
        """
        inputs, seqs, N = (q_BTNK, k_BTNK, v_BTNV, f_BTN1), plan.seqs, plan.num_heads
        (B, T, _, V), K, spans = v_BTNV.shape, k_BTNK.shape[-1], plan.spans()
        wide_NVV = repeat_heads(w_NVV.to(plan.dtype), N, 0)
        h_NBKV = v_BTNV.new_zeros(N, B, K, V, dtype=plan.dtype)
        if initial_SNKV is not None:
            h_NBKV = seqs.enter(h_NBKV, initial_SNKV, 0)
        buffer = StateBuffer.empty(T, h_NBKV) if plan.keep_states else None
        fronts_XNBKV = h_NBKV.new_empty(0 if plan.keep_states else len(spans), N, B, K, V)
        y_BTNV, final_SNKV = v_BTNV.new_empty(B, T, N, V), plan.new_finals(h_NBKV)
        for i, span in enumerate(spans):
            part = None if buffer is None else buffer.part(span)
            if buffer is None:
                fronts_XNBKV[i] = h_NBKV
            chunk = _Chunk(plan, span, inputs, wide_NVV, initial_SNKV, h_NBKV, part)
            y_BTNV[:, span] = chunk.outputs().permute(2, 0, 1, 3)
            h_NBKV = chunk.after_CNBKV[-1].clone()
            if final_SNKV is not None:
                plan.keep_finals(final_SNKV, chunk.after_CNBKV, span)
            del chunk  # its memory serves the next one
        kept = (fronts_XNBKV,) if buffer is None else (buffer.states_C1NBKV, buffer.z_CNBKV)
        ctx.save_for_backward(*inputs, w_NVV, initial_SNKV, *kept)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # final states are rarely used
        return y_BTNV, final_SNKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTNV: Tensor | None, dfinal_SNKV: Tensor | None) -> Any:
        """Return the gradients of all tensors of `forward`, from those of its results."""
        saved = ctx.saved_tensors  # once: each reading recomputes a region
        *inputs, w_NVV, initial_SNKV = saved[:6]
        plan: ChunkPlan = ctx.plan
        spans, kept = plan.spans(), saved[6:]
        buffers = [
            StateBuffer(*kept, filled=True).part(s) if plan.keep_states else None for s in spans
        ]
        fronts = [kept[0][s.start if plan.keep_states else i] for i, s in enumerate(spans)]
        last_B, first_B = plan.seqs.index_BT[:, -1], plan.seqs.index_BT[:, 0]
        wide_NVV = repeat_heads(w_NVV.to(plan.dtype), plan.num_heads, 0)
        dinputs, dw_NVV = [torch.empty_like(x) for x in inputs], torch.zeros_like(wide_NVV)
        dinitial_SNKV = torch.zeros_like(initial_SNKV) if initial_SNKV is not None else None
        B, T, _, V = inputs[2].shape
        dy = inputs[2].new_zeros(B, T, plan.num_heads, V) if dy_BTNV is None else dy_BTNV
        dh_NBKV = torch.zeros_like(fronts[0])
        if dfinal_SNKV is not None:
            dh_NBKV.copy_(dfinal_SNKV[last_B].transpose(0, 1))
        with no_autocast(w_NVV):
            for front, buffer, span in reversed(list(zip(fronts, buffers, spans, strict=True))):
                chunk = _Chunk(plan, span, inputs, wide_NVV, initial_SNKV, front, buffer)
                dy_CNBV = plan.take(dy, span)
                dafter_CNBKV, dx_CNBKV, dh_NBKV = chunk.state_gradients(
                    dy_CNBV, dh_NBKV, dinitial_SNKV, dfinal_SNKV
                )
                dw_NVV += chunk.weight_gradient(dx_CNBKV)
                parts = chunk.input_gradients(dy_CNBV, dafter_CNBKV, dx_CNBKV)
                del chunk, dafter_CNBKV, dx_CNBKV
                for dinput, part in zip(dinputs, parts, strict=True):
                    plan.put(dinput, span, part)
        if dinitial_SNKV is not None:
            dinitial_SNKV.index_add_(0, first_B, dh_NBKV.transpose(0, 1))
        dw_NVV = dw_NVV.unflatten(0, (len(w_NVV), -1)).sum(1).to(w_NVV.dtype)
        return *dinputs, dw_NVV, dinitial_SNKV, None


def _rows(h_NBKV: Tensor) -> Tensor:
    """View states as `[..., N, B K, V]`: rows for one matmul per head."""
    *lead, B, K, V = h_NBKV.shape
    return h_NBKV.view(*lead, B * K, V)  # view, not reshape: results are written through it


def repeat_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeat every head `num_heads / x.shape[dim]` times in a row.

    Args:
        x: any shape.
        num_heads: heads of the result.
        dim: of the heads.
    """
    return x if x.shape[dim] == num_heads else x.repeat_interleave(num_heads // x.shape[dim], dim)


def heads_and_dtype(
    q_BTNK: Tensor, k_BTNK: Tensor, v_BTNV: Tensor, f_BTN: Tensor, w_NVV: Tensor
) -> tuple[int, torch.dtype]:
    """Return N and the dtype of states: fp64 if any input is, else fp32.

    Args:
        q_BTNK: queries.
        k_BTNK: keys.
        v_BTNV: values.
        f_BTN: forget values.
        w_NVV: state weight.
    """
    counts = [q_BTNK.shape[2], k_BTNK.shape[2], v_BTNV.shape[2], f_BTN.shape[2], len(w_NVV)]
    assert all(max(counts) % count == 0 for count in counts), f"heads must divide: {counts}"
    dtypes = [x.dtype for x in (q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)]
    return max(counts), torch.float64 if torch.float64 in dtypes else torch.float32
