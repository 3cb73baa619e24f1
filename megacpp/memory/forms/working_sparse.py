"""Working set of a sparse A mixer: attention in blocks, the choice, the indexer and its loss.

Around the blocks it is that of an attention to all keys (working_attention.py, working_latent.py).

Legend: n tokens of this rank, S keys of a row, D model, N query heads and K key heads of this rank,
H query and key head dim, V value head dim, J indexer heads, X indexer head dim, P of its dims turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.memory.forms.activation_share import INDEX, Pieces, Share
from megacpp.memory.forms.activation_sparse import normed_again
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_attention import BLOCK, GroupedSizes, grouped, grouped_back
from megacpp.memory.forms.working_frame import gradient_bytes, kept_bytes
from megacpp.memory.forms.working_latent import LatentSizes, latent, latent_back

QUERIES, KEYS = 256, 1024  # of a tile (megacpp/kernels/sparse_attention/indexer.py)
AT_ONCE = {"cpu": 0, "cuda": 256 << 20}  # bytes of products of heads (likewise)
# Moments of attention before the indexer is there, and of its backward when it is gone.
EARLY = ("rotated queries", "joined queries", "rotated keys", "normed queries")
LATE = (*EARLY, "keys and values", "queries", "into latents", "sum of gradients")


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of what a block of queries makes, in fp32 or wider.

    Attributes:
        tile: logits of all heads to all keys; `sums`: a number of each query and head.
        mask: bool, which keys were chosen.
        q, o: queries and outputs of the block; `k`, `v`: all its keys and values.
        turned: queries while their heads are put side by side.
        of_q, of_o, of_k, of_v: copies that a product makes of them.
        capped: logits are, in another tile.
        out: all outputs, and a number of each query and head.
    """

    tile: int
    sums: int
    mask: int
    q: int
    o: int
    k: int
    v: int
    turned: int
    of_q: int
    of_o: int
    of_k: int
    of_v: int
    capped: bool
    out: int

    @staticmethod
    def of(own: Share) -> _Block:
        a, w, rows = own.config.model.attention, own.wide, own.rows
        N, gqa = a.num_heads // own.tp, a.kind == "gqa"
        K = a.num_kv_heads // own.tp if gqa else N
        H = a.head_dim if gqa else a.qk_nope_head_dim + a.qk_rope_head_dim
        V = a.head_dim if gqa else a.v_head_dim
        t, narrow = min(BLOCK, own.here), own.compute < w
        apart = rows > 1 and K > 1  # rows and heads aren't neighbours in memory
        # Gathered keys come with tokens in front of rows, and are widened so.
        joined = gqa and own.cp > 1 and own.chunks == 1 and narrow
        queries, keys = (1 if 1 < K < N else narrow + apart), narrow + (apart and not joined)
        q, o = rows * t * N * H * w, rows * t * N * V * w
        k, v = rows * own.row * K * H * w, rows * own.row * K * V * w
        return _Block(
            tile=rows * t * N * own.row * w,
            sums=rows * t * N * w,
            mask=rows * t * own.row,
            q=q,
            o=o,
            k=k,
            v=v,
            turned=(1 + narrow) * max(q, o),
            of_q=queries * q,
            of_o=queries * o,
            of_k=keys * k,
            of_v=keys * v,
            capped=a.softcap is not None,
            out=own.tokens * N * (V * own.compute + w),
        )

    @property
    def forward(self) -> int:
        """Logits; beside them what they are made of, or their product with values and its mean."""
        values = self.o + max(self.o, self.of_v)
        most = max(self.of_q + self.of_k, values, self.tile if self.capped else 0)
        return self.tile + self.mask + 2 * self.sums + most

    @property
    def backward(self) -> int:
        """Probabilities and the gradient of logits; what goes into a product, or comes out."""
        most = max(self.of_o + self.of_v, self.of_q + self.k, self.of_k + self.q, self.turned)
        return (3 if self.capped else 2) * self.tile + self.mask + 2 * self.sums + most


@dataclass(frozen=True, slots=True)
class _Index:
    """Bytes of what an indexer makes.

    Attributes:
        made: queries, keys and weights, until the mixer returns; `normed`: kept besides.
        gradients: of them; keys' are wide until they are whole.
        turning, turning_back: temporaries of the rotation of queries.
        waiting: keys and weights meanwhile.
        scoring: scores of a block of queries to all keys, and of heads at once; all keys, widened.
        choosing: scores and numbers of a tile of keys and of the best so far, and their places.
    """

    made: int
    normed: int
    gradients: int
    turning: int
    turning_back: int
    waiting: int
    scoring: int
    choosing: int

    @staticmethod
    def of(own: Share) -> _Index:
        a, n, s, w = own.config.model.attention, own.tokens, own.compute, own.wide
        J, X, everywhere = a.sparse.num_heads, a.sparse.head_dim, own.rows * own.row
        P, narrow = (a.qk_rope_head_dim if a.kind == "mla" else X), s < w
        block = own.rows * min(QUERIES, own.here)
        slots = min(a.sparse.top_k, own.row)
        tile, device = block * min(KEYS, own.row), own.config.train.device
        candidates = min(KEYS, own.row) + slots
        of_slots = slots * (INDEX + 3 * w)
        at_once = heads_at_once(J, block * own.row, w, device)
        scores_of_tile = tile * w * (1 + heads_at_once(J, tile, w, device))
        return _Index(
            made=(n * J + everywhere) * X * s + n * J * w,
            normed=n * (X + 2) * w + (n * a.q_lora_rank * s if normed_again(own) else 0),
            gradients=n * J * X * s + everywhere * X * w + n * J * w,
            turning=n * J * X * s + n * J * P * (2 * w + narrow * (w + s)),
            turning_back=n * J * X * w + 2 * n * J * P * w,
            waiting=n * X * s + n * J * w,
            scoring=block * max((1 + at_once) * own.row * w, 2 * own.row * w + of_slots)
            + everywhere * X * w * narrow,
            choosing=max(
                block * (candidates * (w + 4 + INDEX + 1) + 2 * slots * (w + 4)),
                scores_of_tile + block * slots * (w + 4),
            ),
        )


def heads_at_once(heads: int, numbers: int, width: int, device: str) -> int:
    """Return how many heads an indexer scores at once (kernels/sparse_attention/indexer.py)."""
    return min(heads, max(1, AT_ONCE.get(device, 0) // (numbers * width)))


def shares(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """A layer that attends to another's choice."""
    block = _Block.of(own)
    for moment in _around(own, pieces):
        yield moment.more(block.forward) if moment.name == "attention" else moment


def index(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """A layer that chooses, and learns from what it then attends to."""
    block, z = _Block.of(own), _Index.of(own)
    normed, gradients = (0, 0) if "block" in pieces else (z.normed, z.gradients)
    before = _before_index(own, pieces)
    yield Moment("indexer's queries", before + z.turning + z.waiting + normed)
    for moment in _around(own, pieces):
        if moment.name in EARLY:
            yield moment
        elif moment.name == "attention":
            attending = moment.more(z.made + normed)
            yield Moment("choice", attending.tensors - block.out + z.choosing)
            yield attending.more(block.forward)
            yield Moment("loss", attending.tensors + z.gradients + z.scoring)
        else:
            yield moment.more(z.made + normed + (0 if moment.name == "expand" else gradients))


def shares_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Attention in blocks, then what an attention to all keys does."""
    b, z = _Block.of(own), LatentSizes.of(own)
    latents, narrow = own.config.model.attention.kind == "mla", own.wide // own.compute
    wide = b.k + b.v
    if latents:  # no padding, but gradients of keys and values that stay wide
        instead = z.q + wide - (z.pads + (2 * z.x_q if z.pads_v else 0) + z.x_q + 2 * z.x_k)
    else:
        instead = wide - wide // narrow
    for moment in (latent_back if latents else grouped_back)(own, pieces):
        yield moment.more(instead + b.backward) if moment.name == "attention" else moment


def index_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """The same, with what the indexer kept; its own backward comes before that of queries."""
    z, x = _Index.of(own), own.tokens * own.config.model.dim * own.compute
    kept = kept_bytes(own, "A.index", pieces) - kept_bytes(own, "A.share", pieces)
    learnt = gradient_bytes(own, "A.index") - gradient_bytes(own, "A")
    for moment in shares_back(own, pieces):
        yield moment.more(0, learnt) if moment.name in LATE else moment.more(kept)
    turning = z.turning_back + z.waiting + z.normed + _before_index(own, pieces)
    if own.config.model.attention.kind == "mla":
        made = gradient_bytes(own, "A", "wo", "wkv_a", "wkv_b")
        yield Moment("indexer's queries", turning + x, made)
    else:
        made = gradient_bytes(own, "A", "wo")
        yield Moment("indexer's queries", turning, made, reads=False)


def _around(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """An attention to all keys, without temporaries while it attends."""
    if own.config.model.attention.kind == "gqa":
        yield from grouped(own, pieces)
        return
    z = LatentSizes.of(own)
    # The mixer itself holds the latent of queries; its norm is made again where norms are.
    held = {"block": z.latent, "norm": -z.latent, "mla_q_upproj": -z.latent}
    of_latent = next((held[piece] for piece in held if piece in pieces), 0)
    for moment in latent(own, pieces):
        if moment.name == "attention":
            moment = moment.more(z.out - z.x_q - max(z.pads, z.out) + of_latent)
        yield moment


def _before_index(own: Share, pieces: Pieces) -> int:
    """Made before the indexer runs; gradients of it wait when it is the indexer's turn again."""
    if own.config.model.attention.kind == "gqa":
        z = GroupedSizes.of(own, pieces)
        return z.together + (0 if "block" in pieces else z.raw)
    z = LatentSizes.of(own)
    return z.q + z.latent * (1 if pieces & {"block", "norm", "mla_q_upproj"} else 2)
