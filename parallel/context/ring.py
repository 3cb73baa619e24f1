"""Ring attention (arXiv 2310.01889): keys and values go around the context ranks.

Each rank keeps its queries and passes a block of keys and values (of MLA: latents) from its left
to its right neighbour, looking at it meanwhile. It holds its own block, the one at hand and the
one that arrives, whatever the number of ranks. Backward sends the blocks around once more and
their gradients behind them, which every rank adds to on the way home.

Legend: B rows, t this rank's tokens of a row, S key tokens of a block, N query heads, K key/value
heads, G = N / K, H query/key head dim, V value head dim, X numbers of a token in a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.attention.parts import (
    AttentionGradient,
    RunningAttention,
    Scores,
    by_key_head,
)
from megacpp.kernels.attention.segments import Segments, earlier_segments, own_segments
from megacpp.model.documents import Documents
from megacpp.torch_extras import autocast_dtype, once_differentiable, wide
from parallel.context.layout import ContextLayout
from parallel.context.segments import row_of

Expand = Callable[..., tuple[Tensor, Tensor]]
Observe = Callable[[Tensor, Tensor, Documents, Documents], None]


@dataclass(frozen=True)
class Ring:
    """Settings that the ranks of a ring share.

    Attributes:
        layout: of the tokens.
        group: the ranks.
        docs: of this rank's tokens, a part of whole rows in the layout's order.
        expand: keys `[B, S, K, H]` and values `[B, S, K, V]` of a block `[B, S, X]` in fp32 or
            wider and of the weights, in any dtype; differentiable, without collectives.
        scores: scale and soft cap.
        observe: called in forward with the queries `[B, t, N, H]` and the keys `[B, S, K, H]` of
            every block that some of them see, and the documents of both.
        flash: attend by torch's flash kernels and merge what they return; needs no soft cap and no
            window.
    """

    layout: ContextLayout
    group: dist.ProcessGroup
    docs: Documents
    expand: Expand
    scores: Scores
    observe: Observe | None = None
    flash: bool = False


@dataclass(frozen=True)
class Look:
    """Queries of one chunk and the keys of a block that are not all behind them.

    Attributes:
        rows: queries, among this rank's tokens.
        keys: tokens of the block.
        seen: which queries see which keys, see `RunningAttention.add`.
    """

    rows: slice
    keys: slice
    seen: Tensor | Segments | None


def ring_attention(
    q_BtNH: Tensor, block_BtX: Tensor, ring: Ring, weights: Sequence[Tensor] = ()
) -> Tensor:
    """Return attention of this rank's queries to the keys of all ranks, `[B, t, N, V]`.

    W - 1 blocks leave each rank in forward; in backward W - 1 blocks and as many gradients, these
    in at least fp32. Weights get the gradient of this rank's queries alone.

    Args:
        q_BtNH: queries of this rank's tokens.
        block_BtX: this rank's block, of which `ring.expand` makes keys and values.
        ring: settings.
        weights: passed to `ring.expand`.
    """
    if ring.flash:
        q_BtNH, block_BtX = (x.to(autocast_dtype(x) or x.dtype) for x in (q_BtNH, block_BtX))
    with torch.autocast(q_BtNH.device.type, enabled=False):
        return _RingAttention.apply(q_BtNH, block_BtX, ring, *weights)  # type: ignore[return-value]


def seen_chunks(layout: ContextLayout, chunk: int, source: int) -> tuple[int, ...]:
    """Return the chunks of a rank that queries of a chunk may see: those not behind it."""
    return tuple(c for c in layout.chunks[source] if c <= chunk)


def chunk_documents(docs: Documents, layout: ContextLayout, chunks: Sequence[int]) -> Documents:
    """Return the documents of some chunks of the rows of `docs`, memoized per batch."""
    row = row_of(docs, layout)

    def make() -> Documents:
        size, device = row.ids_BT.shape[1] // layout.num_chunks, row.ids_BT.device
        index = [torch.arange(c * size, (c + 1) * size, device=device) for c in chunks]
        return row.take(torch.cat(index))

    return docs.memo(("chunks", tuple(chunks)), make)


class _RingAttention(torch.autograd.Function):
    """Ring attention that saves queries, own block, output and one number per query and head."""

    @staticmethod
    def forward(
        ctx: Any, q_BtNH: Tensor, block_BtX: Tensor, ring: Ring, *weights: Tensor
    ) -> Tensor:
        running, q_BKtGH = None, q_BtNH
        for source, block in _around(block_BtX.contiguous(), ring):
            looks = _looks(ring, source)
            if not looks:
                continue
            k_BSKH, v_BSKV = ring.expand(wide(_seen(block, looks)), *weights)
            if ring.observe is not None:
                keys_seen = _documents_seen(ring, source, looks)
                ring.observe(q_BtNH, k_BSKH, ring.docs, keys_seen)
            k, v = _by_head((k_BSKH, v_BSKV))
            if running is None:  # the own block, in which every query finds at least itself
                q_BKtGH = by_key_head(q_BtNH, k.shape[1])
                running = RunningAttention.of_no_keys(q_BKtGH, v.shape[-1], ring.scores)
            for look in looks:
                part = q_BKtGH[:, :, look.rows], k[:, :, look.keys], v[:, :, look.keys]
                running.rows(look.rows).add(*part, look.seen)
        assert running is not None
        o_BKtGV, lse_BKtG1 = running.finish()
        o_BtNV = o_BKtGV.transpose(1, 2).flatten(2, 3).to(q_BtNH.dtype)
        ctx.save_for_backward(q_BtNH, block_BtX, o_BtNV, lse_BKtG1, *weights)
        ctx.ring = ring
        return o_BtNV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            return _gradients(ctx, grads[0])


def _gradients(ctx: Any, do_BtNV: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, the own block and the weights."""
    q_BtNH, block_BtX, o_BtNV, lse_BKtG1, *weights = ctx.saved_tensors
    ring: Ring = ctx.ring
    heads = lse_BKtG1.shape[1]
    q, o, do = (by_key_head(x, heads) for x in (q_BtNH, o_BtNV, do_BtNV))
    gradient = AttentionGradient.begin(q, o, do, lse_BKtG1, ring.scores)
    d_weights = [
        torch.zeros_like(wide(w)) if need else None
        for w, need in zip(weights, ctx.needs_input_grad[3:], strict=True)
    ]
    d_own, home = None, None
    for source, block in _around(block_BtX.contiguous(), ring):
        d_block = _block_gradient(
            q, block, _looks(ring, source), gradient, ring, weights, d_weights
        )
        if d_own is None:
            d_own = d_block
            continue
        if home is not None:
            d_block += home.wait()
        home = _Passing(d_block, ring)
    assert d_own is not None
    if home is not None:
        d_own += home.wait()
    dq_BtNH = gradient.dq_BKTGH.transpose(1, 2).flatten(2, 3).to(q_BtNH.dtype)
    of_weights = (
        None if d is None else d.to(w.dtype) for d, w in zip(d_weights, weights, strict=True)
    )
    return dq_BtNH, d_own.to(block_BtX.dtype), None, *of_weights


def _block_gradient(
    q_BKtGH: Tensor,
    block_BtX: Tensor,
    looks: list[Look],
    gradient: AttentionGradient,
    ring: Ring,
    weights: list[Tensor],
    d_weights: list[Tensor | None],
) -> Tensor:
    """Return the gradient of a block from this rank's queries, `[B, t, X]` in fp32 or wider.

    Gradients of queries and weights are added to `gradient` and `d_weights`.
    """
    d_block = torch.zeros_like(wide(block_BtX))
    if not looks:
        return d_block
    with torch.enable_grad():
        seen = wide(_seen(block_BtX, looks)).detach().requires_grad_()
        leaves = [
            w.detach().requires_grad_(d is not None)
            for w, d in zip(weights, d_weights, strict=True)
        ]
        expanded = ring.expand(seen, *leaves)
    k, v = _by_head(tuple(x.detach() for x in expanded))
    dk, dv = torch.zeros_like(wide(k)), torch.zeros_like(wide(v))
    for look in looks:
        part = q_BKtGH[:, :, look.rows], k[:, :, look.keys], v[:, :, look.keys]
        sums = dk[:, :, look.keys], dv[:, :, look.keys]
        gradient.rows(look.rows).add(*part, look.seen, *sums)
    d_expanded = [d.transpose(1, 2).to(x.dtype) for d, x in zip((dk, dv), expanded, strict=True)]
    wanted = [(w, d) for w, d in zip(leaves, d_weights, strict=True) if d is not None]
    d_seen, *d_wanted = torch.autograd.grad(expanded, [seen, *(w for w, _ in wanted)], d_expanded)
    d_block[:, : seen.shape[1]] = d_seen
    for (_, total), d in zip(wanted, d_wanted, strict=True):
        total += d
    return d_block


def _looks(ring: Ring, source: int) -> list[Look]:
    """Return this rank's chunks that see tokens of the rank `source`, with keys and masks."""
    layout, docs = ring.layout, ring.docs
    size = docs.ids_BT.shape[1] // layout.per_rank
    looks: list[Look] = []
    for place, chunk in enumerate(layout.chunks[layout.rank]):
        rows = slice(place * size, (place + 1) * size)
        if ring.flash:
            looks += _flash_looks(ring, source, chunk, rows)
            continue
        seen = seen_chunks(layout, chunk, source)
        if not seen:
            continue
        mask_B1TS = None
        if chunk in seen or docs.window or not row_of(docs, layout).whole:
            own, others = (chunk_documents(docs, layout, chunks) for chunks in ((chunk,), seen))
            mask_B1TS = document_mask(own, others)
        looks.append(Look(rows, slice(len(seen) * size), mask_B1TS))
    return looks


def _flash_looks(ring: Ring, source: int, chunk: int, rows: slice) -> list[Look]:
    """Return a look of a chunk at each chunk of the rank `source` that it may see.

    The chunk itself comes first: there every query finds a key (`RunningAttention`).
    """
    layout, docs = ring.layout, ring.docs
    assert not docs.window and ring.scores.softcap is None
    row, size = row_of(docs, layout), rows.stop - rows.start

    def segments(other: int) -> Segments:
        if other == chunk:
            return own_segments(row, chunk * size, size)
        own, earlier = (chunk_documents(docs, layout, (c,)) for c in (chunk, other))
        return earlier_segments(own, earlier)

    return [
        Look(
            rows,
            slice(place * size, (place + 1) * size),
            docs.memo(("segments of", chunk, other), functools.partial(segments, other)),
        )
        for place, other in reversed([*enumerate(seen_chunks(layout, chunk, source))])
    ]


class _Passing:
    """Tensor on its way to the right neighbour, while its counterpart arrives from the left."""

    def __init__(self, leaving: Tensor, ring: Ring) -> None:
        rank, degree = ring.layout.rank, ring.layout.degree
        self.leaving, self.arriving = leaving, torch.empty_like(leaving)  # alive until both are
        right, left = (rank + 1) % degree, (rank - 1) % degree
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.leaving, group=ring.group, group_peer=right),
                dist.P2POp(dist.irecv, self.arriving, group=ring.group, group_peer=left),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


def _around(block: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Yield rank and block from the own to the left; the next one arrives meanwhile."""
    rank, degree = ring.layout.rank, ring.layout.degree
    for step in range(degree):
        passing = _Passing(block, ring) if step + 1 < degree else None
        yield (rank - step) % degree, block
        if passing is not None:
            block = passing.wait()


def _seen(block_BtX: Tensor, looks: list[Look]) -> Tensor:
    """Return the tokens of a block that some query sees."""
    return block_BtX[:, : max(look.keys.stop for look in looks)]


def _documents_seen(ring: Ring, source: int, looks: list[Look]) -> Documents:
    """Return the documents of the tokens that `_seen` takes of a rank's block."""
    size = ring.docs.ids_BT.shape[1] // ring.layout.per_rank
    num_chunks = max(look.keys.stop for look in looks) // size
    return chunk_documents(ring.docs, ring.layout, ring.layout.chunks[source][:num_chunks])


def _by_head(keys_values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return keys and values `[B, S, K, ...]` as `[B, K, S, ...]`."""
    k, v = (x.transpose(1, 2) for x in keys_values)
    return k, v
