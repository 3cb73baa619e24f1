"""Engram (arXiv 2601.07372): memories of the last few tokens, looked up and gated by the stream.

The n-grams of order 2 to max_order that end at a token choose a row in each of several tables; the
rows side by side are the memory e. Each residual stream takes as much of it as its key fits:

    v = gate * (W_v e)            gate from <RMS(W_k e), RMS(x)> (megacpp/kernels/memory_gate.py)
    out = v + silu(conv(RMS(v)))  depthwise, causal, taps max_order tokens apart

W_v, both biases and the convolution start at zero, so the block starts as the one without: the
source starts with the convolution alone at zero. W_v gets a gradient at once, everything in front
of it after the first step.

Legend: B rows, T tokens of a row, D model, S residual streams, C = S D channels, M memory width,
H tables, N width of a row of a table, J past tokens, V ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn

from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.engram.sizes import engram_primes, memory_width, table_rows
from megacpp.blocks.ngram.hashing import PAD, hashed_orders, odd_multipliers
from megacpp.config.schema import ModelConfig
from megacpp.kernels.causal_conv_steps import causal_conv_step, last_inputs
from megacpp.kernels.memory_gate import memory_gate
from megacpp.kernels.rms_norm import rms_norm
from megacpp.model.beside import tokens_beside
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.head import Table
from megacpp.model.init import Constant, Normal, Rule
from megacpp.model.linear_init import input_rule
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.short_conv import Convolve, ShortConv
from megacpp.torch_extras import autocast_dtype, listed

NORM_EPS = 1e-5  # in front of the convolution, as in the source


@dataclass(frozen=True)
class EngramState:
    """State that decoding carries from token to token.

    Attributes:
        ids_BJ: the last max_order - 1 ids.
        taps_BCJ: the last (conv_kernel - 1) * max_order inputs of the convolution.
    """

    ids_BJ: Tensor
    taps_BCJ: Tensor


@dataclass(frozen=True)
class LayerHash:
    """Hash of n-grams to rows of a layer's tables: a pure function of settings and layer.

    Attributes:
        multipliers: one odd number per token of an n-gram.
        primes: rows of each table, by order; no other table of the model has as many.
        offsets: the first row of each table among all of them.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    def rows(self, ids_by_shift: Sequence[Tensor]) -> Tensor:
        """Return int64 `[B, T, H]` among the rows of all tables, orders one after the other."""
        offsets_H = listed(self.offsets, ids_by_shift[0].device)
        return hashed_orders(ids_by_shift, self.multipliers, self.primes) + offsets_H


@lru_cache(maxsize=256)
def layer_hash(config: ModelConfig, layer: int, num_ids: int) -> LayerHash:
    """Return the hash of a layer of a model with ids below `num_ids`."""
    e = config.engram
    primes = engram_primes(config, layer)
    flat = [prime for order in primes for prime in order]
    offsets = tuple(sum(flat[:i]) for i in range(len(flat)))
    return LayerHash(odd_multipliers(e.seed, layer, num_ids, e.max_order), primes, offsets)


class StreamNorm(Fp32Contract):
    """RMSNorm of each stream by itself, with weights of its own; `(..., S, D)`."""

    def __init__(self, streams: int, dim: int) -> None:
        super().__init__()
        self.streams, self.weight = streams, nn.Parameter(torch.empty(streams * dim))

    @property
    def weight_SD(self) -> Tensor:
        """Weights of each stream, a view `[S, D]`."""
        return self.weight.view(self.streams, -1)

    def forward(self, x_SD: Tensor) -> Tensor:
        """Return the RMS norm of each stream `[..., S, D]`, with the weights of the stream."""
        streams = zip(x_SD.unbind(-2), self.weight_SD, strict=True)
        normed = [rms_norm(x_D, weight_D, NORM_EPS) for x_D, weight_D in streams]
        return normed[0][..., None, :] if len(normed) == 1 else torch.stack(normed, -2)


class DilatedConv(ShortConv):
    """ShortConv whose taps are `dilation` tokens apart, with its SiLU."""

    def __init__(self, num_channels: int, num_taps: int, dilation: int) -> None:
        super().__init__(num_channels, num_taps)
        self.dilation = dilation
        self.convolve = Convolve("engram", dilation)

    def forward(self, x_BTC: Tensor, docs: Documents | None) -> Tensor:
        """Return the convolution `[B, T, C]` within documents."""
        return self.convolve(x_BTC, self.weight, docs)


class Engram(nn.Module):
    """Addition of an n-gram memory to a residual stream `[B, T, D]`, or to several `[B, T, S, D]`.

    Attributes:
        lookup_V: int64: ids that spell the same word as one; None: each is its own.
        pad: the id in front of a document.
    """

    recompute: Recompute = PLAIN

    def __init__(self, config: ModelConfig, layer: int, streams: int = 1) -> None:
        super().__init__()
        e: EngramConfig = config.engram
        self.config, self.layer, self.streams = config, layer, streams
        self.lookup_V: Tensor | None = None
        self.pad = PAD
        width, channels = memory_width(config), streams * config.dim
        self.tables = Table(table_rows(config), e.dim // e.heads)
        self.wk = nn.Linear(width, channels)
        self.wv = nn.Linear(width, config.dim)
        self.key_norm = StreamNorm(streams, config.dim)
        self.x_norm = StreamNorm(streams, config.dim)
        self.value_norm = StreamNorm(streams, config.dim)
        self.conv = DilatedConv(channels, e.conv_kernel, e.max_order)

    def forward(self, x: Tensor, docs: Documents) -> Tensor:
        """Return the addition to the streams `x_BTD` or `x_BTSD`, of the same shape."""
        e_BTM = self.recall(self.rows(docs))
        x_BTSD = x.reshape(*x.shape[:2], self.streams, -1)
        v_BTSD = self.recompute("engram", self._gated, e_BTM, x_BTSD)
        normed_BTC = self.recompute("engram", self._normed, v_BTSD)
        mixed_BTC = self.conv(normed_BTC, docs)
        return self.recompute("engram", torch.add, v_BTSD.view_as(x), mixed_BTC.view_as(x))

    def rows(self, docs: Documents) -> Tensor:
        """Return the table rows that each token looks up, `[B, T, H]`, memoized per batch."""
        return docs.memo(self._key, lambda: self._rows(self.shifted(docs)))

    def recall(self, rows_BTH: Tensor) -> Tensor:
        """Return the memory `[B, T, M]` in the dtype of products, which both projections read."""
        e_BTHN = self.tables(rows_BTH)
        return e_BTHN.flatten(-2).to(autocast_dtype(e_BTHN) or e_BTHN.dtype)

    def shifted(self, docs: Documents) -> list[Tensor]:
        """Ids `[B, T]` of each token, of the one before it, ..."""
        order = self.config.engram.max_order
        return [self._ids(tokens_beside(docs, -shift, self.pad)) for shift in range(order)]

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> EngramState:
        """Return the state of `batch` empty documents."""
        e = self.config.engram
        past = torch.full((batch, e.max_order - 1), self.pad, dtype=torch.int64, device=device)
        taps_shape = batch, self.conv.num_channels, (e.conv_kernel - 1) * e.max_order
        return EngramState(past, torch.zeros(taps_shape, dtype=dtype, device=device))

    def prefill(self, x: Tensor, docs: Documents) -> tuple[Tensor, EngramState]:
        """Return the addition to the streams of a prompt, of the shape of `x`, and the state."""
        x_BTSD = x.reshape(*x.shape[:2], self.streams, -1)
        v_BTSD = self._gated(self.recall(self.rows(docs)), x_BTSD)
        normed_BTC = self._normed(v_BTSD)
        e = self.config.engram
        by_shift = [tokens_beside(docs, -n, self.pad)[:, -1] for n in range(e.max_order - 1)]
        taps = last_inputs(normed_BTC, (e.conv_kernel - 1) * e.max_order)
        state = EngramState(torch.stack(by_shift[::-1], 1), taps)
        return v_BTSD.view_as(x) + self.conv(normed_BTC, docs).view_as(x), state

    def step(self, x: Tensor, ids_B: Tensor, state: EngramState) -> tuple[Tensor, EngramState]:
        """Decode one token: return the addition, of the shape of `x`, and the next state.

        Args:
            x: `[B, D]`, or `[B, S, D]` with several streams.
            ids_B: ids of the tokens.
            state: of the tokens before it.
        """
        window_BJ = torch.cat([state.ids_BJ, ids_B[:, None]], 1)
        rows_B1H = self._rows([self._ids(ids_B)[:, None] for ids_B in window_BJ.flip(1).unbind(1)])
        x_B1SD = x.reshape(len(x), 1, self.streams, -1)
        v_B1SD = self._gated(self.recall(rows_B1H), x_B1SD)
        normed_BC = self._normed(v_B1SD)[:, 0]
        mixed_BC, taps_BCJ = causal_conv_step(
            normed_BC, state.taps_BCJ, self.conv.weight, "silu", self.conv.dilation
        )
        out = v_B1SD.view_as(x) + mixed_BC.view_as(x)
        return out, EngramState(window_BJ[:, 1:], taps_BCJ)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter, by name below the memory."""
        zero, one = Constant(0.0), Constant(1.0)
        return {
            "tables.weight": Normal(self.config.init_std),
            "wk.weight": input_rule(self.config),
            "wk.bias": zero,
            "wv.weight": zero,
            "wv.bias": zero,
            "key_norm.weight": one,
            "x_norm.weight": one,
            "value_norm.weight": one,
            "conv.weight": zero,
        }

    @property
    def _key(self) -> tuple[str, int]:
        return "engram", self.layer

    def _ids(self, ids: Tensor) -> Tensor:
        return ids if self.lookup_V is None else self.lookup_V[ids]

    def _rows(self, ids_by_shift: Sequence[Tensor]) -> Tensor:
        num_ids = self.config.vocab_size
        if self.lookup_V is not None:
            num_ids = int(self.lookup_V.max()) + 1
        return layer_hash(self.config, self.layer, num_ids).rows(ids_by_shift)

    def _gated(self, e_BTM: Tensor, x_BTSD: Tensor) -> Tensor:
        """Return the gated memory of each stream, `[B, T, S, D]`."""
        key_BTSD = self.wk(e_BTM).unflatten(-1, (self.streams, -1))
        norms = self.key_norm.weight_SD, self.x_norm.weight_SD
        return memory_gate(key_BTSD, self.wv(e_BTM), x_BTSD, *norms)

    def _normed(self, v_BTSD: Tensor) -> Tensor:
        return self.value_norm(v_BTSD).flatten(-2)


def look_ahead(blocks: Iterable[nn.Module], docs: Documents) -> None:
    """Hashes for every Engram of some blocks at once, before the first of them runs.

    Rows depend on ids alone, so they need not wait for anything that a model computes.
    """
    found = [cast(Engram, b.engram) for b in blocks if getattr(b, "engram", None) is not None]
    if found:
        by_shift = found[0].shifted(docs)
        for engram in found:
            docs.memo(engram._key, lambda engram=engram: engram._rows(by_shift))
