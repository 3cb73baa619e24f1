"""Manifold-constrained hyper-connections: several residual streams instead of one.

    u = sum_i pre_i x_i          what the layer reads
    y = mixer(norm(u))
    x'_o = sum_i res[o, i] x_i + post_o y

A layer finds its coefficients in the streams of each token
(megacpp/kernels/hyper_connections/reference.py). `res` is doubly stochastic, so that streams are
exchanged and never grow (arXiv 2512.24880). A token meets no other here: documents, rows in parts
and decoding need nothing of their own.

Legend: B rows, T tokens, n streams, D model, C = n D, K = n^2 + 2 n coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.config.schema import ModelConfig
from megacpp.kernels.hyper_connections.reference import Coefficients, mix, read
from megacpp.kernels.hyper_connections.sinkhorn import EPS
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.init import Constant, Normal, Rule, Uniform

SCALE = 0.01  # of what streams tell about coefficients, at the start (Megatron-LM, paper)
STAYS = 6.0  # logit by which a stream at first prefers itself: 0.993 of four stay


class HyperConnection(Fp32Contract):
    """Connection of one layer to the residual streams `[..., n, D]`: its input and its output.

    Args:
        layer: its number: neighbours prefer other streams at the start (`init=plain`).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mhc, n = config.mhc, config.mhc.streams
        self.config, self.layer, self.streams = config, layer, n
        self.how = Coefficients(n, mhc.ordering, mhc.iterations, config.norm_eps)
        self.phi = nn.Parameter(torch.empty(n * n + 2 * n, n * config.dim))
        self.scale = nn.Parameter(torch.empty(3))  # of pre, post and res
        self.bias = nn.Parameter(torch.empty(n * n + 2 * n))

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u `[..., D]`, post `[..., n]` and res `[..., n, n]`."""
        return read(x, self.phi, self.scale, self.bias, self.how)

    def mix(self, x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
        """Return the streams behind the layer, `[..., n, D]`.

        Args:
            x: streams before the layer, `[..., n, D]`.
            y: output of the mixer, `[..., D]`.
            post: coefficients of `y`, `[..., n]`.
            res: coefficients of `x`, `[..., n, n]`.
        """
        return mix(x, y, post, res)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rules of `model.mhc.init`; with `plain` the first step is one stream's."""
        mhc, n = self.config.mhc, self.streams
        if mhc.init == "published":
            return published_rules(mhc, n * self.config.dim)
        phi, scale = Constant(0.0), Constant(SCALE)
        return {"phi": phi, "scale": scale, "bias": PlainBias(n, self.layer, mhc.ordering)}


@dataclass(frozen=True)
class PlainBias:
    """Biases of a connection that at first does what a residual sum does.

    post is one and res doubly stochastic, so equal streams stay equal; what a layer reads of them
    sums to one. It reads another part of each: with equal parts all streams would always have the
    same gradients and never differ.
    """

    streams: int
    layer: int
    ordering: str

    def __call__(self, index: Tensor, shape: tuple[int, ...], key: int) -> Tensor:
        """Return the biases of pre, post and res at `index`."""
        n = self.streams
        parts = [2 * (1 + (i + self.layer) % n) / (n * (n + 1)) for i in range(n)]
        added = EPS if self.ordering == "deepseek_v4" else 0.0
        pre = [math.log(p - added) - math.log1p(added - p) for p in parts]
        res = [STAYS * (o == i) for o in range(n) for i in range(n)]
        values = torch.tensor([*pre, *[0.0] * n, *res], dtype=torch.float64, device=index.device)
        return values[index]


def published_rules(mhc: HyperConnectionConfig, width: int) -> dict[str, Rule]:
    """Return the rules that transformers' DeepSeek-V4 or Megatron-LM has, by `mhc.ordering`."""
    bias = Constant(0.0)
    if mhc.ordering == "deepseek_v4":
        return {"phi": Normal(0.02), "scale": Constant(1.0), "bias": bias}
    bound = math.sqrt(6.0 / (width + mhc.streams * (mhc.streams + 2)))  # Xavier's
    return {"phi": Uniform(-bound, bound), "scale": Constant(SCALE), "bias": bias}


class Spread(nn.Module):
    """Copy of the embedding into each stream, in front of the first block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.streams = config.mhc.streams

    def forward(self, x: Tensor) -> Tensor:
        """Return streams `[..., n, D]` of inputs `[..., D]`."""
        return x[..., None, :].repeat(*[1] * (x.ndim - 1), self.streams, 1)

    def init_rules(self) -> dict[str, Rule]:
        """Return no rules: there are no parameters."""
        return {}


class Collapse(nn.Module):
    """Mean or sum of all streams, behind the last block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mean = config.mhc.collapse == "mean"

    def forward(self, x: Tensor) -> Tensor:
        """Return one stream `[..., D]` of streams `[..., n, D]`."""
        return x.mean(-2) if self.mean else x.sum(-2)

    def init_rules(self) -> dict[str, Rule]:
        """Return no rules: there are no parameters."""
        return {}
