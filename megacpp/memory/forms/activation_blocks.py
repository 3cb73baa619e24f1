"""What A and F blocks keep for the backward, and the norm in front of every mixer.

Legend: n tokens of this rank, T of a whole row, D model, N query heads, K key/value heads, H query
and key head dim, V value head dim, Q and C latents of MLA, R its rotated dim, F hidden; heads and
hidden units are this rank's.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_share import INDEX, Kept, Pieces, Share
from megacpp.model.regions import BLOCK


def residual(own: Share) -> Kept:
    """What a block adds to: its sum is the next one's input."""
    model = own.config.model
    return "residual", own.stream * model.mhc.streams * model.dim, own.residual


def normed(own: Share, letter: str, pieces: Pieces) -> Iterator[Kept]:
    """1 / rms, and what all projections read: gathered where sequence parallelism cuts it."""
    again, D = "norm" in pieces, own.config.model.dim
    if not again:
        yield "normed", own.stream, own.wide
    if letter != "E" and own.tp > 1:
        yield "normed", own.tokens * D, own.compute  # what is sent is never sent again
    elif not again:
        yield "normed", own.stream * D, own.compute


def feed_forward(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Gate and up, or what the squared ReLU is taken of."""
    mlp = own.config.model.mlp
    if not pieces & {"block", "mlp"}:
        hidden = mlp.hidden_dim // own.tp * (2 if mlp.activation == "swiglu" else 1)
        yield "hidden units", own.tokens * hidden, own.compute
    yield from hidden_product(own, "F", mlp.hidden_dim // own.tp, pieces)


def hidden_product(own: Share, letter: str, hidden: int, pieces: Pieces) -> Iterator[Kept]:
    """act(gate) up: the projection back keeps it in FP8, and makes it again otherwise."""
    if letter in own.fp8 and "block" not in pieces:
        yield "hidden units", own.tokens * hidden, own.compute


def attention(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Grouped-query or latent."""
    if pieces >= BLOCK:
        return
    latent = own.config.model.attention.kind == "mla"
    yield from (_latent if latent else _grouped)(own, pieces)


def _grouped(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """q, k, v; with norms on q and k, these before the norm too."""
    a, n, s, everywhere = own.config.model.attention, own.tokens, own.compute, own.rows * own.row
    N, K, H = a.num_heads // own.tp, a.num_kv_heads // own.tp, a.head_dim
    rebuilt, kind = a.qk_norm and "norm" in pieces, context_kind(own)
    if a.qk_norm:
        yield "projections", n * (N + K) * H, s
        if not rebuilt:
            yield "projections", n * (N + K), own.wide
    if kind == "heads":
        yield "exchanged", everywhere * (N + 2 * K) // own.cp * H, s
        yield from _came_from(own, exchanges=2)
    else:
        yield "attention", n * (0 if rebuilt else N) * H, s
    if kind == "all_gather":
        yield "gathered", everywhere * 2 * K * H, s
    elif kind == "ring":
        yield "gathered", n * 2 * K * H, s  # this rank's, side by side
    elif kind == "none":
        yield "attention", n * (K if rebuilt else 2 * K) * H, s
    if "core_attn" not in pieces:
        yield "expanded", expanded(own) * (2 * (N - K) + (K if rebuilt else 0)) * H, s
    yield from _outputs(own, pieces, N, H)


def expanded(own: Share) -> int:
    """Tokens whose keys and values masked SDPA on CUDA wants in all heads, and keeps so."""
    a = own.config.model.attention
    kinds = {"none": own.tokens, "all_gather": own.rows * own.row}
    kinds["heads"] = own.rows * own.row // own.cp
    wants = own.on_gpu and own.masked and a.kind == "gqa" and a.softcap is None
    return kinds.get(context_kind(own), 0) if wants and a.num_heads != a.num_kv_heads else 0


def _latent(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Latents before and after their norms, and what each head makes of them."""
    a, n, s, everywhere = own.config.model.attention, own.tokens, own.compute, own.rows * own.row
    N, R, V = a.num_heads // own.tp, a.qk_rope_head_dim, a.v_head_dim
    C, Q, H = a.kv_lora_rank, a.q_lora_rank, a.qk_nope_head_dim + R
    expands, kind = "mla_kv" not in pieces, context_kind(own)
    yield "latents", n * (Q + C + R), s
    if Q and not pieces & {"norm", "mla_q_upproj"}:
        yield "latents", n * Q, s
        yield "latents", n, own.wide
    if "norm" not in pieces:
        yield "latents", n, own.wide
        yield "latents", n * (C if kind == "none" else 0), s
    if kind == "none" and not expands:
        yield "latents", n * R, s
    if kind == "heads":
        yield "exchanged", everywhere * N // own.cp * H, s
        yield from _came_from(own, exchanges=3)
    elif "mla_q_upproj" not in pieces:
        yield "attention", n * N * H, s
    if kind == "ring":
        yield "gathered", n * (C + R), s
    elif kind != "none":
        # Gathered tokens come in front of rows, so that heads are made of a copy of their latents.
        copied = kind == "all_gather" and own.rows > 1 and expands
        yield "gathered", everywhere * (C if copied else C + R), s
    if expands and kind != "ring":
        heads = N // own.cp if kind == "heads" else N
        yield "attention", everywhere * heads * (H + V), s
    yield from _outputs(own, pieces, N, V)
    if own.attends_by == "varlen_padded" and "core_attn" not in pieces:
        # Zero columns of the narrower arguments, and an output as wide as all of them.
        yield "zero columns", n * N * (abs(H - V) * (1 if H > V else 2) + max(H, V)), s


def _outputs(own: Share, pieces: Pieces, heads: int, dim: int) -> Iterator[Kept]:
    """What attention returns, and the logarithm of its softmax's sums."""
    numbers, kind = own.tokens * heads, context_kind(own)
    if kind == "heads":
        yield "exchanged", numbers * dim, own.compute  # outputs, back on their tokens' rank
    if kind == "ring" or "core_attn" not in pieces:  # a ring would have to send again
        yield "attention", numbers * dim, own.compute
        yield "attention", numbers, own.wide


def _came_from(own: Share, exchanges: int) -> Iterator[Kept]:
    """Places of tokens in the row, for each exchange whose tokens come out of order."""
    yield "exchanged", own.row * (exchanges if own.chunks == 2 else 0), INDEX


def context_kind(own: Share) -> str:
    """How attention meets the context axis."""
    return own.config.mesh.cp_attention if own.cp > 1 else "none"
