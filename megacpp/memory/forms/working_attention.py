"""Working set of a grouped-query A mixer, without the frame around it (working_frame.py).

Legend: n tokens of this rank, T of a whole row, D model, N query heads and K key/value heads of
this rank, H head dim; q = n N H and kv = n K H numbers, s bytes of one in compute, w of one that
is never narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.memory.forms.activation_blocks import context_kind, expanded
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import (
    copied,
    given,
    gradient_bytes,
    kept_bytes,
    norm_products,
    reads,
)

BLOCK = 128  # query tokens at a time (megacpp/kernels/attention/softcap.py)


@dataclass(frozen=True, slots=True)
class GroupedSizes:
    """Bytes of the tensors of a layer.

    Attributes:
        q, kv: queries; keys, or values. `wide_q`, `wide_kv`: the same never narrower than fp32.
        all_kv: keys, or values, of whole rows.
        sums: one wide number of each query and head; `key_sums`: of each key and head.
        raw: q and k before their norms, and 1 / rms of these.
        tile: wide logits of a block of queries, to all keys of a rank; with what goes into it.
        expanded: what keys and values grow by where masked SDPA wants them in all heads.
    """

    own: Share
    kind: str
    q: int
    kv: int
    wide_q: int
    wide_kv: int
    all_kv: int
    sums: int
    key_sums: int
    raw: int
    tile: int
    into_tile: int
    mask: int
    expanded: int

    @staticmethod
    def of(own: Share, pieces: Pieces) -> GroupedSizes:
        a, n, s, w = own.config.model.attention, own.tokens, own.compute, own.wide
        N, K, H = a.num_heads // own.tp, a.num_kv_heads // own.tp, a.head_dim
        rms = 0 if pieces & {"norm", "block"} else n * (N + K) * w
        block = min(BLOCK, own.here // own.chunks)
        q_tile = own.rows * block * N * w
        return GroupedSizes(
            own=own,
            kind=context_kind(own),
            q=n * N * H * s,
            kv=n * K * H * s,
            wide_q=n * N * H * w,
            wide_kv=n * K * H * w,
            all_kv=own.rows * own.row * K * H * s,
            sums=n * N * w,
            key_sums=n * K * w,
            raw=(n * (N + K) * H * s + rms) if a.qk_norm else 0,
            tile=q_tile * own.here,
            into_tile=q_tile * H + n * K * H * w,
            mask=own.rows * own.here // own.chunks * own.here,
            expanded=2 * expanded(own) * (N - K) * H * s,
        )

    @property
    def narrow(self) -> bool:
        return self.own.compute < self.own.wide

    @property
    def together(self) -> int:
        return self.q + 2 * self.kv


def grouped(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Projections, norms and rotation of q and k, softmax(q k^T) v, the projection back."""
    a, z = own.config.model.attention, GroupedSizes.of(own, pieces)
    # Wide, turned as complex numbers, narrow again.
    turned = [(2 * wide + x) if z.narrow else wide for x, wide in _pairs(z)]
    normed = [(x + sums) * a.qk_norm for x, sums in ((z.q, z.sums), (z.kv, z.key_sums))]
    yield Moment("rotated queries", z.together + turned[0] + normed[0])
    keys = z.sums * a.qk_norm + z.together + z.q + turned[1] + normed[1]
    yield Moment("rotated keys", keys)
    if a.qk_norm:
        copies = 3 if z.narrow else 2
        yield Moment("normed queries", z.together + z.sums + copies * z.wide_q)
    base = z.together + (0 if "block" in pieces else z.raw)
    for moment in _attended(own, z):
        yield moment.more(base)
    dropped = bool(pieces & {"block", "core_attn"}) and z.kind in ("none", "all_gather")
    kept = kept_bytes(own, "A", pieces) + (z.q if dropped else 0)
    yield Moment("out of heads", kept + own.tokens * own.config.model.dim * own.compute)


def _attended(own: Share, z: GroupedSizes) -> Iterator[Moment]:
    """Beside q, k and v, which wait for the call to end, and what came before norms."""
    out = z.q + z.sums
    if z.kind == "none":
        yield Moment("attention", out + z.expanded)
    elif z.kind == "all_gather":
        yield Moment("gather keys and values", 2 * z.kv + 2 * z.all_kv)
        yield Moment("attention", 2 * z.all_kv + out + z.expanded)
    elif z.kind == "heads":
        P, ordered = z.together, own.chunks == 2
        yield Moment("to heads", P * (3 + copied(own)))
        yield Moment("from heads", P + z.sums + z.q * (4 + ordered))
    else:
        tiles = 2 * z.tile if own.here // own.chunks > BLOCK else z.tile
        wide = 2 * z.wide_kv if z.narrow else 0
        held = 2 * z.kv + wide + 2 * z.sums + z.wide_q
        for passing, masks in _ring(own, z):
            tensors = held + passing * 2 * z.kv + masks
            # Of one row the keys are read where they lie.
            into = z.into_tile - (z.wide_kv if own.rows == 1 else 0)
            yield Moment("ring", tensors + tiles + into)
            yield Moment("masks of ring", tensors + 3 * z.mask)


def _ring(own: Share, z: GroupedSizes) -> tuple[tuple[int, int], ...]:
    """Blocks on their way beside the own one, and masks: at the own block, and at others."""
    own_masks = z.mask * 3 // 2 if own.chunks == 2 else z.mask
    return (1, own_masks), (2 if own.cp > 2 else 1, z.mask)


def masks(own: Share) -> int:
    """Temporaries while the first A block of a forward makes the mask that all of them share.

    Two comparisons, bool. The mask itself is of the batch: bool, and in compute numbers.
    """
    kind = context_kind(own)
    queries = own.row if kind == "heads" else own.here
    return 2 * own.rows * queries * own.row if kind != "ring" and own.masked else 0


def first_attention(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """What the first A block of a forward does beside what each does."""
    z = GroupedSizes.of(own, pieces)
    base = z.together + (0 if "block" in pieces else z.raw)
    moved = {"all_gather": 2 * z.all_kv, "heads": z.together}.get(z.kind, 0)
    yield Moment("masks", base + moved + masks(own))


def grouped_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """The projection back, attention, rotation and norms, projections."""
    a, z, x = (
        own.config.model.attention,
        GroupedSizes.of(own, pieces),
        own.tokens * own.config.model.dim,
    )
    x, dy, kept = x * own.compute, given(own, "A"), kept_bytes(own, "A", pieces)
    wo, wq, wk = (gradient_bytes(own, "A", name) for name in ("wo", "wq", "wk"))
    narrow = 0 if own.parallel or not z.narrow else own.compute
    yield Moment("out of heads", dy + kept + z.q + wo // own.wide * narrow, wo, reads=False)
    again = _again(z, pieces, a.qk_norm)
    for moment in _attended_back(own, z, kept + again):
        yield Moment(moment.name, moment.tensors, wo, reads=False)
    # Gradients of keys and values may be parts of one tensor, which lives as long as either.
    dv = {"none": z.kv, "heads": z.together}.get(z.kind, 2 * z.kv)
    wide_copies = 2 * z.wide_q if z.narrow else z.wide_q + z.q
    queries = z.raw + z.kv + dv + wide_copies
    yield Moment("rotated queries", queries, wo, reads=False)
    if a.qk_norm:
        norms = "norm" in pieces  # then the piece waits with its arguments
        copies = z.q + (norm_products(own) + 1) * z.wide_q + (2 * z.wide_q if z.narrow else 0)
        before = z.q + z.kv * (2 if norms else 1) + dv + z.sums * (2 if norms else 3)
        yield Moment("normed queries", before + copies, wo, reads=False)
    yield Moment("keys and values", 3 * x + z.q, wo + 2 * wk)
    yield Moment("queries", 2 * x + z.q + wq // own.wide * narrow, wo + 2 * wk + wq)
    yield Moment("sum of gradients", 3 * x - reads(own, "A"), wo + 2 * wk + wq)  # nobody reads


def _again(z: GroupedSizes, pieces: Pieces, qk_norm: bool) -> int:
    """What pieces put together again before attention's backward."""
    again = (z.q + (z.kv if z.kind == "none" else 0)) if qk_norm and "norm" in pieces else 0
    if "core_attn" in pieces and z.kind != "ring":
        again += z.q + z.sums
    return again


def _attended_back(own: Share, z: GroupedSizes, kept: int) -> Iterator[Moment]:
    if z.kind == "none":
        yield Moment("attention", kept + z.q + z.together + z.expanded)
    elif z.kind == "all_gather":
        yield Moment("attention", kept + 2 * z.q + 2 * z.all_kv + z.expanded)
        yield Moment("scatter keys and values", z.raw + z.q + 4 * z.all_kv)
    elif z.kind == "heads":
        kept -= z.q  # what the projection read
        yield Moment("from heads", kept + z.q * (3 + copied(own)))
        yield Moment("attention", kept + z.q + z.together)
        moved = z.together * (3 + copied(own))
        yield Moment("to heads", z.raw + moved)
    else:
        held = kept + z.q + z.wide_q + z.sums + 2 * z.wide_kv
        # Queries and gradients of a block are widened, then their heads put side by side.
        into = max(z.into_tile, 2 * (z.into_tile - z.wide_kv)) if z.narrow else z.into_tile
        held += 2 * z.tile + into + (2 * z.wide_kv if z.narrow else 0)
        first, others = _ring(own, z)
        yield Moment("ring", held + first[0] * 2 * z.kv + 2 * z.wide_kv + first[1])
        # Gradients of blocks: of the own one, of this one, and of two on their way.
        blocks, gradients = {2: (1, 2), 3: (1, 4)}.get(own.cp, (2, 4))
        passing = blocks * 2 * z.kv + gradients * 2 * z.wide_kv
        yield Moment("ring", held + passing + others[1])


def _pairs(z: GroupedSizes) -> tuple[tuple[int, int], ...]:
    return (z.q, z.wide_q), (z.kv, z.wide_kv)
