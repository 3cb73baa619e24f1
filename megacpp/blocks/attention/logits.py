"""Largest attention logits, head by head, for QK-clip (optim/qk_clip.py).

Fused attention never returns its logits, so by default only norms of queries and keys are recorded:
their product is a bound (Cauchy-Schwarz), at O(T) a forward. The true maximum is for tests and
small runs; it computes the logits a second time. Logits are meant before a soft cap, as
scale q . k: these grow with the weights, and scaling the weights brings them down.

Legend: B rows, T query tokens, S key tokens, N query heads, K key/value heads, G = N / K query
heads that share one, H query/key head dim, P parts of H, X heads of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.attention.softcap import BLOCK, block_logits
from megacpp.model.documents import Documents
from megacpp.model.recompute import recomputing

if TYPE_CHECKING:
    from megacpp.blocks.attention.gqa import CoreAttention

Statistic = Literal["bound", "max"]


class LogitRecorder:
    """Maxima over the tokens of all forwards since the last `reset`, of this process's heads.

    `bound`: max_t |q_t| and max_s |k_s| apart, because the largest query and the largest key may be
    on different ranks or in different microbatches. A head dim of several parts (MLA: without
    position | rotary) is bounded by the sum over parts, so that scaling q_p . k_p of every part by
    gamma scales the bound by exactly gamma. `max`: the largest scale q . k of a query and a key
    that it sees.

    Both only grow, so a forward that runs twice changes nothing.

    Args:
        scale: what q . k is multiplied by before the softmax.
        parts: sizes that H is cut into.
    """

    def __init__(self, scale: float, parts: Sequence[int], statistic: Statistic = "bound") -> None:
        self.scale, self.parts, self.statistic = scale, tuple(parts), statistic
        self.max_q_PN: Tensor | None = None
        self.max_k_PK: Tensor | None = None
        self.max_logit_1N: Tensor | None = None

    @property
    def least(self) -> float:
        """Maximum over no tokens."""
        return 0.0 if self.statistic == "bound" else float("-inf")

    @property
    def maxima(self) -> tuple[Tensor, ...]:
        """Recorded maxima, query heads first; empty before the first forward."""
        kept = (self.max_q_PN, self.max_k_PK, self.max_logit_1N)
        return tuple(x for x in kept if x is not None)

    def rows(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes of `maxima` for that many heads."""
        if self.statistic == "max":
            return ((1, num_heads),)
        return (len(self.parts), num_heads), (len(self.parts), num_kv_heads)

    def logits(self, *maxima: Tensor) -> Tensor:
        """Return largest logits `[..., N]`, in at least fp32, from maxima `[..., P, X]`.

        The maxima may be stacked over layers.
        """
        if self.statistic == "max":
            return maxima[0][..., 0, :]
        max_q, max_k = maxima
        group = max_q.shape[-1] // max_k.shape[-1]
        return self.scale * (max_q * max_k.repeat_interleave(group, dim=-1)).sum(-2)

    def reset(self) -> None:
        """Drop all maxima, for a new step."""
        self.max_q_PN = self.max_k_PK = self.max_logit_1N = None

    @torch.no_grad()
    def record(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        queries: Documents,
        keys: Documents,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Record maxima of queries and of the keys among which theirs are.

        Args:
            q_BTNH: queries.
            k_BSKH: keys.
            queries: documents of the queries.
            keys: documents of the keys.
            share: (i, n): these are the i-th of n equal parts of the process's heads.
        """
        with torch.autocast(q_BTNH.device.type, enabled=False):
            if self.statistic == "max":
                new = largest_logits(q_BTNH, k_BSKH, queries, keys, self.scale)[None]
                self.max_logit_1N = self._grown(self.max_logit_1N, new, share)
                return
            max_q_PN, max_k_PK = (
                largest_norms(q_BTNH, self.parts),
                largest_norms(k_BSKH, self.parts),
            )
            self.max_q_PN = self._grown(self.max_q_PN, max_q_PN, share)
            self.max_k_PK = self._grown(self.max_k_PK, max_k_PK, share)

    def _grown(self, old: Tensor | None, new_PX: Tensor, share: tuple[int, int]) -> Tensor:
        """Return the maximum of both; heads outside of the share keep the old one."""
        index, count = share
        if count > 1:
            heads = new_PX.shape[1]
            all_PX = new_PX.new_full((len(new_PX), count * heads), self.least)
            all_PX[:, index * heads : (index + 1) * heads] = new_PX
            new_PX = all_PX
        return new_PX if old is None else torch.maximum(old, new_PX)


def observe_logits(
    core: CoreAttention,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    queries: Documents,
    keys: Documents,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Pass queries and keys of a training forward to the recorder of `core`, if it has one.

    Args:
        core: attention of a layer.
        q_BTNH: queries.
        k_BSKH: keys among which those of the queries are.
        queries: documents of the queries.
        keys: documents of the keys.
        share: (i, n): these are the i-th of n equal parts of the process's heads.
    """
    if core.recorder is not None and core.training and not recomputing():
        core.recorder.record(q_BTNH, k_BSKH, queries, keys, share)


def largest_norms(x_BTXH: Tensor, parts: Sequence[int]) -> Tensor:
    """Return the largest 2-norm of a token by part of the head dim, `[P, X]`, in at least fp32."""
    dtype = torch.promote_types(x_BTXH.dtype, torch.float32)
    of_parts = [
        torch.linalg.vector_norm(part, dim=-1, dtype=dtype).amax((0, 1))
        for part in x_BTXH.split(tuple(parts), dim=-1)
    ]
    return torch.stack(of_parts)


def largest_logits(
    q_BTNH: Tensor, k_BSKH: Tensor, queries: Documents, keys: Documents, scale: float
) -> Tensor:
    """Return the largest scale q . k `[N]` of a query and a key of its document that isn't later.

    Minus infinity where no query sees a key. Blocks of queries are computed one after another, so
    no tensor is `[T, S]`.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        queries: documents of the queries.
        keys: documents of the keys.
        scale: factor of the products.
    """
    q_BKTGH = q_BTNH.unflatten(2, (k_BSKH.shape[2], -1)).transpose(1, 2)
    k_BKSH, found = k_BSKH.transpose(1, 2), []
    for rows in (slice(start, start + BLOCK) for start in range(0, q_BTNH.shape[1], BLOCK)):
        block = Documents(queries.ids_BT[:, rows], queries.positions_BT[:, rows])
        block = block.within(queries.window)
        allowed = document_mask(block, keys)[:, :, :, None]
        logits_BKTGS = block_logits(q_BKTGH[:, :, rows], k_BKSH, allowed, scale, None)[1]
        found.append(logits_BKTGS.amax((0, 2, 4)).flatten())
    return torch.stack(found).amax(0)
