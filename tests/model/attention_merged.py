"""Attention by the flash kernels of a ring, whose parts are merged in one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp.kernels.attention.parts import (
    AttentionGradient,
    RunningAttention,
    Scores,
    by_key_head,
)
from megacpp.kernels.attention.segments import Segments, earlier_segments, own_segments
from megacpp.model.documents import Documents

CHUNKS = 4


class Part(NamedTuple):
    """Queries of a chunk and the keys of one that isn't behind it."""

    rows: slice
    keys: slice
    segments: Segments


def parts(docs: Documents) -> list[Part]:
    """Every chunk with itself first, then with those before it."""
    tokens = docs.ids_BT.shape[1]
    index = torch.arange(tokens, device=docs.ids_BT.device)
    ends = pairwise(tokens * c // CHUNKS for c in range(CHUNKS + 1))
    place = [slice(start, end) for start, end in ends]
    own = [docs.take(index[p]) for p in place]
    found = [Part(p, p, own_segments(docs, p.start, p.stop - p.start)) for p in place]
    pairs = [(c, s) for c in range(CHUNKS) for s in range(c)]
    return found + [Part(place[c], place[s], earlier_segments(own[c], own[s])) for c, s in pairs]


def merged(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, docs: Documents, scale: float | None = None
) -> list[Tensor]:
    """Output, and gradients of q, k and v, tokens first as they are; scale None: dim ** -0.5."""
    scores, heads = Scores(scale or q.shape[-1] ** -0.5, None), k.shape[2]
    q5, do5 = by_key_head(q, heads), by_key_head(do, heads)
    k4, v4 = k.transpose(1, 2), v.transpose(1, 2)
    running, every = RunningAttention.of_no_keys(q5, v.shape[-1], scores), parts(docs)
    for rows, keys, segments in every:
        some = q5[:, :, rows], k4[:, :, keys], v4[:, :, keys]
        running.rows(rows).add(*some, segments)
    o5, lse = running.finish()
    o5 = o5.to(q.dtype)
    gradient = AttentionGradient.begin(q5, o5, do5, lse, scores)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k4, v4))
    for rows, keys, segments in every:
        some = q5[:, :, rows], k4[:, :, keys], v4[:, :, keys]
        sums = dk[:, :, keys], dv[:, :, keys]
        gradient.rows(rows).add(*some, segments, *sums)
    o, dq = (x.transpose(1, 2).flatten(2, 3) for x in (o5, gradient.dq_BKTGH))
    return [o, dq, dk.transpose(1, 2), dv.transpose(1, 2)]


class MergedAttention(torch.autograd.Function):
    """`merged` as an operation of q, k, v, documents and scale, with its own gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, docs: Documents, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.settings = docs, scale
        do = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        return merged(q, k, v, do, docs, scale)[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        qkv = ctx.saved_tensors
        found = merged(*qkv, do, *ctx.settings)[1:]
        return *(d.to(x.dtype) for d, x in zip(found, qkv, strict=True)), None, None
