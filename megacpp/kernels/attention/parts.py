"""Attention to keys that arrive in parts: no part is needed again to add the next.

Legend: B rows, T query tokens, S key tokens of a part, N query heads, K key/value heads, G = N / K
query heads that share one, H query/key head dim, V value head dim.

Forward is the online softmax (arXiv 1805.02867) over parts as in ring attention (arXiv 2310.01889);
backward rebuilds p = e^(logit - lse) of each part from what forward kept for each query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp.kernels.attention.segments import Segments, segment_attention, segment_gradients
from megacpp.kernels.attention.softcap import (
    block_gradients,
    block_logits,
    query_blocks,
    rows_times,
)
from megacpp.torch_extras import wide


@dataclass(frozen=True)
class Scores:
    """Score of a key for a query: scale q . k, capped if there is a cap."""

    scale: float
    softcap: float | None


@dataclass(frozen=True)
class RunningAttention:
    """sum e^(logit - top) v and sum e^(logit - top) over the keys so far, in fp32 or wider.

    Attributes:
        top_BKTG1: the largest logit so far. Every query's first part must have a key for it.
    """

    top_BKTG1: Tensor
    total_BKTG1: Tensor
    sum_BKTGV: Tensor
    scores: Scores

    @staticmethod
    def of_no_keys(q_BKTGH: Tensor, value_dim: int, scores: Scores) -> RunningAttention:
        """Return the attention of queries that have seen no key yet."""
        wide_q = wide(q_BKTGH.new_empty(0))
        top_BKTG1 = wide_q.new_full((*q_BKTGH.shape[:-1], 1), float("-inf"))
        # Tokens before heads in memory, as in softcap_attention.
        shape = (*q_BKTGH.transpose(1, 2).shape[:-1], value_dim)
        sum_BKTGV = wide_q.new_zeros(shape).transpose(1, 2)
        return RunningAttention(top_BKTG1, torch.zeros_like(top_BKTG1), sum_BKTGV, scores)

    def rows(self, rows: slice) -> RunningAttention:
        """Return a view of some of the queries; `add` on it adds here too."""
        parts = (self.top_BKTG1, self.total_BKTG1, self.sum_BKTGV)
        top, total, sum_of_rows = (x[:, :, rows] for x in parts)
        return RunningAttention(top, total, sum_of_rows, self.scores)

    def add(
        self, q_BKTGH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, seen: Tensor | Segments | None
    ) -> None:
        """Add the keys of one part: with segments by torch's flash kernels, which take no soft cap.

        Args:
            q_BKTGH: queries.
            k_BKSH: keys of the part.
            v_BKSV: values of the part.
            seen: which queries see which keys, as segments or a bool mask `[B or 1, 1, T, S]`;
                None: all see all.
        """
        if isinstance(seen, Segments):
            return self._add_segments(q_BKTGH, k_BKSH, v_BKSV, seen)
        for rows, _, allowed in query_blocks(q_BKTGH, k_BKSH, seen, causal=False):
            now, scores = self.rows(rows), self.scores
            logits_BKTGS = block_logits(
                q_BKTGH[:, :, rows], k_BKSH, allowed, scores.scale, scores.softcap
            )[1]
            top_BKTG1 = torch.maximum(now.top_BKTG1, logits_BKTGS.amax(-1, keepdim=True))
            kept_BKTG1 = (now.top_BKTG1 - top_BKTG1).exp_()
            weight_BKTGS = logits_BKTGS.sub_(top_BKTG1).exp_()
            now.total_BKTG1.mul_(kept_BKTG1).add_(weight_BKTGS.sum(-1, keepdim=True))
            now.sum_BKTGV.mul_(kept_BKTG1).add_(rows_times(weight_BKTGS, v_BKSV))
            now.top_BKTG1.copy_(top_BKTG1)

    def _add_segments(
        self, q_BKTGH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, segments: Segments
    ) -> None:
        q_BTNH, k_BSKH, v_BSKV = _tokens_first(q_BKTGH, k_BKSH, v_BKSV)
        o_BTNV, lse_BTN = segment_attention(q_BTNH, k_BSKH, v_BSKV, segments, self.scores.scale)
        o, lse = (by_key_head(x, k_BSKH.shape[2]) for x in (o_BTNV, lse_BTN[..., None]))
        top_BKTG1 = torch.maximum(self.top_BKTG1, lse)
        kept_BKTG1, weight_BKTG1 = ((x - top_BKTG1).exp_() for x in (self.top_BKTG1, lse))
        self.total_BKTG1.mul_(kept_BKTG1).add_(weight_BKTG1)
        self.sum_BKTGV.mul_(kept_BKTG1).addcmul_(weight_BKTG1, wide(o))
        self.top_BKTG1.copy_(top_BKTG1)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the attention `[B, K, T, G, V]` and the log of each softmax denominator."""
        return self.sum_BKTGV / self.total_BKTG1, self.top_BKTG1 + self.total_BKTG1.log()


@dataclass(frozen=True)
class AttentionGradient:
    """Backward of a finished `RunningAttention`: what each part gives to dq, dk and dv.

    Attributes:
        lse_BKTG1: log of each softmax denominator.
        mean_BKTG1: sum p dp over all keys, which is do . o.
        dq_BKTGH: the sum of the parts so far, in fp32 or wider.
    """

    do_BKTGV: Tensor
    o_BKTGV: Tensor
    lse_BKTG1: Tensor
    mean_BKTG1: Tensor
    dq_BKTGH: Tensor
    scores: Scores

    @staticmethod
    def begin(
        q_BKTGH: Tensor, o_BKTGV: Tensor, do_BKTGV: Tensor, lse_BKTG1: Tensor, scores: Scores
    ) -> AttentionGradient:
        """Return the gradient of a finished attention, before any part is added.

        Args:
            q_BKTGH: queries.
            o_BKTGV: outputs.
            do_BKTGV: gradient of the outputs.
            lse_BKTG1: log of each softmax denominator.
            scores: scale and soft cap.
        """
        mean_BKTG1 = (wide(do_BKTGV) * wide(o_BKTGV)).sum(-1, keepdim=True)
        dq_BKTGH = torch.zeros_like(wide(q_BKTGH))
        return AttentionGradient(do_BKTGV, o_BKTGV, lse_BKTG1, mean_BKTG1, dq_BKTGH, scores)

    def rows(self, rows: slice) -> AttentionGradient:
        """Return a view of some of the queries; `add` on it adds here too."""
        parts = (self.do_BKTGV, self.o_BKTGV, self.lse_BKTG1, self.mean_BKTG1, self.dq_BKTGH)
        do, o, lse, mean, dq = (x[:, :, rows] for x in parts)
        return AttentionGradient(do, o, lse, mean, dq, self.scores)

    def add(
        self,
        q_BKTGH: Tensor,
        k_BKSH: Tensor,
        v_BKSV: Tensor,
        seen: Tensor | Segments | None,
        dk_BKSH: Tensor,
        dv_BKSV: Tensor,
    ) -> None:
        """Add the gradients of one part: dq here, dk and dv to the given tensors.

        Args:
            q_BKTGH: queries.
            k_BKSH: keys of the part.
            v_BKSV: values of the part.
            seen: as in the forward.
            dk_BKSH: gradient of the keys, fp32 or wider.
            dv_BKSV: gradient of the values, fp32 or wider.
        """
        if isinstance(seen, Segments):
            return self._add_segments(q_BKTGH, k_BKSH, v_BKSV, seen, dk_BKSH, dv_BKSV)
        for rows, _, allowed in query_blocks(q_BKTGH, k_BKSH, seen, causal=False):
            now = self.rows(rows)
            now.dq_BKTGH.add_(
                block_gradients(
                    q_BKTGH[:, :, rows],
                    k_BKSH,
                    v_BKSV,
                    now.do_BKTGV,
                    now.lse_BKTG1,
                    now.mean_BKTG1,
                    dk_BKSH,
                    dv_BKSV,
                    allowed,
                    self.scores.scale,
                    self.scores.softcap,
                )
            )

    def _add_segments(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, dk_sum: Tensor, dv_sum: Tensor
    ) -> None:
        of_queries = (self.do_BKTGV, q, self.o_BKTGV, self.lse_BKTG1)
        do, q, o, lse, k, v = _tokens_first(*of_queries, k, v)
        dq, dk, dv = segment_gradients(do, q, k, v, o, lse[..., 0], segments, self.scores.scale)
        self.dq_BKTGH.add_(by_key_head(dq, k.shape[2]))
        dk_sum.add_(dk.transpose(1, 2))
        dv_sum.add_(dv.transpose(1, 2))


def by_key_head(x_BTNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return `[B, T, N, H]` as `[B, K, T, G, H]`."""
    return x_BTNH.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Return each `[B, K, T, ..., H]` as `[B, T, heads, H]`."""
    return [x.transpose(1, 2).flatten(2, -2) for x in tensors]
