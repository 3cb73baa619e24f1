"""Working set of a latent A mixer (MLA), without the frame around it (working_frame.py).

Legend: n tokens of this rank, m those of the keys that it expands, D model, N query heads of this
rank, H query and key head dim, V value head dim, Q and C latents, R rotated dim; s bytes of a
number in compute, w of what is never narrower than fp32. The CPU's kernel wants one head dim X, the
larger of H and V: it pads and returns that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.memory.forms.activation_blocks import context_kind
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_attention import BLOCK, masks
from megacpp.memory.forms.working_frame import copied, given, gradient_bytes, kept_bytes, reads


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Bytes of the tensors of a layer.

    Attributes:
        q, k, v, out: of attention's arguments and result; `x_q`, `x_k`: q and k as wide as X.
        latent: of queries; `c`, `pe`: of keys; `all_c`: C + R numbers of all expanded tokens.
        turned: R numbers of each query head. `sums`: one wide number of each query and head.
    """

    own: Share
    kind: str
    q: int
    k: int
    v: int
    out: int
    x_q: int
    x_k: int
    pads_v: bool
    pads_q: bool
    latent: int
    c: int
    pe: int
    all_c: int
    turned: int
    sums: int

    @staticmethod
    def of(own: Share) -> LatentSizes:
        a, n, s = own.config.model.attention, own.tokens, own.compute
        N, R, V, C = a.num_heads // own.tp, a.qk_rope_head_dim, a.v_head_dim, a.kv_lora_rank
        H, kind = a.qk_nope_head_dim + R, context_kind(own)
        X, expanded = max(H, V), n * N
        if kind == "all_gather":
            expanded = own.rows * own.row * N
        m = expanded // N if kind != "heads" else own.rows * own.row
        return LatentSizes(
            own=own,
            kind=kind,
            q=n * N * H * s,
            k=expanded * H * s,
            v=expanded * V * s,
            out=n * N * V * s,
            x_q=n * N * X * s,
            x_k=expanded * X * s,
            pads_v=V < H,
            pads_q=H < V,
            latent=n * a.q_lora_rank * s,
            c=n * C * s,
            pe=n * R * s,
            all_c=m * (C + R) * s,
            turned=n * N * R * s,
            sums=n * N * own.wide,
        )

    @property
    def pads(self) -> int:
        """Padded copies of attention's arguments, in its forward."""
        return self.pads_v * self.x_k + self.pads_q * (self.x_q + self.x_k)


def latent(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Latents, queries, keys and values of all heads, attention, the projection back."""
    z, w, s = LatentSizes.of(own), own.wide, own.compute
    wide = 2 * w // s + 1 if s < w else 1
    before = 2 * z.latent
    yield Moment("rotated queries", before + z.q + z.turned * wide)
    yield Moment("joined queries", before + 2 * z.q + z.turned)
    kept = z.c + z.pe + z.q + (0 if "block" in pieces else before + z.c + z.pe)
    moved = {"all_gather": 2 * z.all_c, "heads": z.q + z.all_c}.get(z.kind, 0)
    if z.kind == "heads":
        yield Moment("to heads", kept + z.q * (3 + copied(own)))
    if z.kind == "ring":
        yield from _ring(own, z, kept)
    else:
        nope = z.k + z.v - z.turned * (z.k // z.q)
        yield Moment("expand", kept + moved + nope + z.k + z.v)
        both = z.k + z.v + z.sums
        yield Moment("attention", kept + moved + both + z.x_q + max(z.pads, z.out))
        if z.kind == "heads":
            yield Moment("from heads", kept + moved + both + z.out * (4 + (own.chunks == 2)))
    out = own.tokens * own.config.model.dim * s
    yield Moment("out of heads", kept_bytes(own, "A", pieces) + z.out + out)


def first_latent(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """What the first A block of a forward does beside what each does."""
    z = LatentSizes.of(own)
    held = 2 * z.latent + 3 * z.c + 2 * z.pe + z.q + z.k + z.v
    moved = {"all_gather": z.all_c, "heads": z.q + z.all_c}.get(z.kind, 0)
    yield Moment("masks", held + moved + masks(own))


def latent_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """The projection back, attention, keys and values, queries, latents."""
    z, x = LatentSizes.of(own), own.tokens * own.config.model.dim * own.compute
    dy, kept = given(own, "A"), kept_bytes(own, "A", pieces)
    wo, wb = gradient_bytes(own, "A", "wo"), gradient_bytes(own, "A", "wkv_b")
    again = z.q if "mla_q_upproj" in pieces else 0
    again += z.k + z.v if "mla_kv" in pieces and z.kind != "ring" else 0
    if "core_attn" in pieces and z.kind != "ring":
        again += z.out + z.sums
        yield Moment("attention again", dy + kept + again + z.pads + z.x_q, reads=False)
    held = kept + again
    yield Moment("out of heads", dy + held + z.out, wo, reads=False)
    if z.kind == "ring":
        yield from _ring_back(own, z, held, wo)
    else:
        if z.kind == "heads":
            held -= z.out  # what the projection read
            yield Moment("from heads", held + z.out * (3 + copied(own)), wo, reads=False)
        pads = z.pads + (2 * z.x_q if z.pads_v else 0)
        grads = z.x_q + 2 * z.x_k
        yield Moment("attention", held + z.out + pads + grads, wo, reads=False)
        left = kept + again - (z.q + z.k + z.v + z.out)
        yield Moment("expand", max(0, left) + grads + z.k + z.v, wo, reads=False)
    queries = gradient_bytes(own, "A", "wq_b") or gradient_bytes(own, "A", "wq")
    made = gradient_bytes(own, "A")
    yield Moment("queries", 2 * z.latent + z.x_q + 2 * z.q, wo + wb, reads=False)
    yield Moment("into latents", 2 * x + z.latent + (z.latent == 0) * z.q, wo + wb + queries)
    yield Moment("sum of gradients", 3 * x - reads(own, "A"), made)


def _ring(own: Share, z: LatentSizes, kept: int) -> Iterator[Moment]:
    """Blocks of latents, expanded where they are; sums and logits in fp32."""
    w, s, block = own.wide, own.compute, z.all_c
    tile = own.rows * BLOCK * w * z.sums // w // own.tokens * own.here
    passing = block * (2 if own.cp > 2 else 1)
    sums = 2 * z.sums + z.out // s * w
    wide = block // s * w + (z.k + z.v) * 2 + z.k // s * w
    yield Moment("ring", kept + block + passing + sums + wide + 2 * tile)


def _ring_back(own: Share, z: LatentSizes, held: int, wo: int) -> Iterator[Moment]:
    w, s, block = own.wide, own.compute, z.all_c
    tile = own.rows * BLOCK * w * z.sums // w // own.tokens * own.here
    blocks, gradients = {2: (1, 2), 3: (1, 4)}.get(own.cp, (2, 4))
    passing = blocks * block + gradients * block // s * w
    sums = z.sums + z.q // s * w + z.out
    wide = block // s * w + (z.k + z.v) * 2 + (2 * z.k + z.v) // s * w
    weights = gradient_bytes(own, "A", "wkv_b") // s * w
    yield Moment("ring", held + passing + sums + wide + weights + 2 * tile, wo, reads=False)
