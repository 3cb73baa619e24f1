"""Pictures of blocks: what attention reads and keeps, memory of the head, tokens of M2RNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bench.pictures.charts import Axes, ticks
from bench.pictures.memory import thinned
from bench.pictures.svg import Drawing
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.gqa import GroupedQueryAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.config.schema import ModelConfig
from megacpp.kernels.attention.causal import causal_attention
from megacpp.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.model.documents import Documents

MIB = 1 << 20
DOCUMENTS = [0] * 5 + [1] * 7 + [2] * 4


def kept_numbers(kind: str, heads: int) -> int:
    """Return how many numbers of a token a layer keeps to decode, with 12 heads of 64."""
    config = AttentionConfig(kind="mla" if kind == "mla" else "gqa", num_heads=12,
                             num_kv_heads=heads, head_dim=64)  # fmt: skip
    block = {"mla": MultiHeadLatentAttention}.get(kind, GroupedQueryAttention)
    layer = block(ModelConfig(dim=32, attention=config))
    torch.nn.init.zeros_(next(layer.parameters()))
    _, state = layer.step(
        torch.zeros(1, 32), layer.init_state(1, torch.device("cpu"), torch.float32)
    )
    return sum(part[0, 0].numel() for part in state.parts_BS)


def attention_reads_and_keeps() -> Drawing:
    """Draw the weights of three packed documents, and what a token leaves behind to be read."""
    generator, T = torch.Generator().manual_seed(0), len(DOCUMENTS)
    q, k = (torch.randn(1, T, 1, 8, generator=generator) for _ in range(2))
    docs = Documents.from_ids(torch.tensor([DOCUMENTS]))
    # Values that are rows of the identity: the outputs are the weights.
    weights_TT = causal_attention(q, k, torch.eye(T).view(1, T, 1, T), docs, 8**-0.5)[0, :, 0]
    drawing = Drawing(760, "Which earlier tokens a token reads in a row of three documents, and the"
                      " numbers that it keeps by the kind of attention")  # fmt: skip
    left, top, cell = 44.0, 62.0, 18.0
    drawing.text(14, 24, "may look at: earlier tokens of its document", "head")
    drawing.text(left, top - 10, "token that is read", "note")
    for t in range(T):
        drawing.text(left - 8, top + t * cell + 13, f"{t}", "note", end=True)
        for s in range(T):
            x, y = left + s * cell, top + t * cell
            drawing.rect(x, y, cell - 1, cell - 1, "off")
            if weight := weights_TT[t, s].item():
                size = max(2.0, (cell - 1) * weight**0.5)
                at = (cell - 1 - size) / 2
                drawing.rect(x + at, y + at, size, size, DOCUMENTS[t])
    drawing.text(left, top + T * cell + 16, "A larger square weighs more.", "note")
    x = 420.0
    drawing.text(x, 24, "must keep: numbers per token and layer", "head")
    bars = [(f"{h} key head{'s' * (h > 1)} of 12", kept_numbers("gqa", h)) for h in (12, 4, 1)]
    bars.append(("MLA, one latent", kept_numbers("mla", 12)))
    most = max(size for _, size in bars)
    for i, (name, size) in enumerate(bars):
        drawing.text(x, top + i * 60 + 8, name, "note")
        drawing.rect(x, top + i * 60 + 14, size / most * 260, 24, 3 + i)
        drawing.text(x + size / most * 260 + 6, top + i * 60 + 31, f"{size:,}")
    return drawing


class Heights(LiveBytes):
    """Live bytes after every operator.

    Attributes:
        seen: bytes, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.append(self.now)
        return out


def memory_of_the_head() -> Drawing:
    """Draw the bytes alive in forward and backward of a plain and of a fused head."""
    N, D, V = 1024, 64, 8192
    drawing = Drawing(760, f"Bytes alive in forward and backward of a head, {N:,} tokens and {V:,}"
                      " words: plain and fused")  # fmt: skip
    found = {}
    for name in ("plain", "fused"):
        x, w = torch.zeros(N, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
        targets = torch.zeros(N, dtype=torch.int64)
        with Heights() as live:
            if name == "plain":
                loss = F.cross_entropy(F.linear(x, w), targets, reduction="sum")
            else:
                loss = linear_cross_entropy(x, w, targets).loss_sum
            middle = len(live.seen)
            loss.backward()
        found[name] = live.seen, middle
    most = max(max(seen) for seen, _ in found.values()) / MIB
    for i, (name, (seen, middle)) in enumerate(found.items()):
        axes = Axes(drawing, 60 + i * 340, 62, 320, 230, (0, len(seen)), (0, most))
        axes.frame([], ticks(most) if not i else [], ("", "MiB" if not i else ""))
        drawing.text(axes.left + 8, 24, f"{name}: at most {max(seen) / MIB:.1f} MiB", "head")
        points = [axes.at(n + end, size / MIB) for n, size in enumerate(seen) for end in (0, 1)]
        edge = [axes.at(0, 0), *thinned(points), axes.at(len(seen), 0)]
        drawing.path(edge, i, close=True)
        at, bottom = axes.at(middle, 0)
        drawing.path([(at, axes.top), (at, bottom + 6)], "line")
        room = at + 60 < axes.left + axes.wide
        drawing.text(at + (4 if room else -4), axes.top - 4, "backward", "note", end=not room)
    drawing.text(60, 314, "Left to right: one operator after the other.", "note")
    return drawing


class TanhOrder(TorchDispatchMode):
    """Numbers of the tokens whose tanh is computed, in order.

    Attributes:
        seen: tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.tanh_.default:
            self.seen.append(round(float(args[0].flatten()[0]) * 1000))
        return func(*args, **(kwargs or {}))


def tokens_of_m2rnn() -> Drawing:
    """Draw which token's state is computed when, in forward and backward, and what is kept."""
    T, chunk = 48, 8
    ones = torch.ones(1, T, 1, 1, dtype=torch.float64)
    # With W = 0 the argument of the tanh is k v: here the number of its token.
    v = (torch.arange(T, dtype=torch.float64) / 1000).view(1, T, 1, 1).requires_grad_()
    w, f = torch.zeros(1, 1, 1, dtype=torch.float64), torch.full((1, T, 1), 0.5).double()
    with TanhOrder() as tokens:
        out, _ = m2rnn_chunked(ones, ones, v, f, w, chunk_size=chunk)
        forward = len(tokens.seen)
        out.sum().backward()
    left, top, high = 90.0, 62.0, 240.0
    step, cell = 620 / len(tokens.seen), high / T
    drawing = Drawing(760, "Which token's state is computed when: once in the forward, and chunk by"
                      " chunk again in the backward")  # fmt: skip
    drawing.legend(left, 12, [(0, "computed"), (1, "computed again"), (2, "kept: chunk starts")])
    drawing.text(left - 8, top + 8, "token 0", "note", end=True)
    drawing.text(left - 8, top + high, f"token {T - 1}", "note", end=True)
    for start in range(0, T, chunk):
        x = left + start * step
        drawing.rect(x, top + start * cell, 620 - start * step, 2, 2)
    for n, token in enumerate(tokens.seen):
        drawing.rect(left + n * step, top + token * cell, step - 1, cell, int(n >= forward))
    at = left + forward * step
    drawing.path([(at, top - 10), (at, top + high + 6)], "line")
    drawing.text(left, top + high + 20, "forward", "note")
    drawing.text(at + 4, top + high + 20, f"backward, chunks of {chunk} from last to first", "note")
    return drawing
