"""Linear layers that save a random projection of their input (CompAct, arXiv 2410.15352).

    y = x W^T                     exact
    dx = g W                      exact
    dS = g^T (x P) = (g^T x) P    the weight's gradient in Z dims, from x P alone

(Activation memory.) W has no gradient. Beside it is a latent S `[O, Z]`, zero except during the
optimizer's step, whose gradient is dS: it is sharded, reduced and clipped like any other, and has
AdamW's moments. The optimizer updates S, adds S P^T to W and zeroes S (optim/compressed.py). E[P
P^T] = 1, so the expectation of this direction is g^T x.

Layers that read one tensor share its projection, which is saved once. P is recomputed when needed,
from (seed, layer, number of redraws), so it is equal on all ranks and in recomputation.

Legend: N tokens, D input dims, Z dims of the projection, O output dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from megacpp.blocks.descriptor import BlockKind
from megacpp.blocks.kinds import KINDS
from megacpp.errors import config_error
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Constant, Rule, tensor_key, uniform
from megacpp.model.sizes import projected_width
from megacpp.torch_extras import autocast_dtype, is_dtensor, needs_input_grad_now


def compress_linears(model: HybridLM, ratio: float, seed: int) -> list[str]:
    """Give layers that `Parameter.compress` marks a latent, in place; names of their weights.

    Call it before FSDP2 shards the blocks, on the meta device or not; after tensor parallelism a
    latent is sharded like its weight. The last layer keeps its inputs: its backward comes at once.

    Args:
        model: this rank's part of the model.
        ratio: Z / D.
        seed: seed of the run.

    Raises:
        ConfigError: the whole model has no layer but the last.
    """
    last = len(model.letters) - 1
    if not last:
        raise config_error(
            "recompute.compress",
            ratio,
            "compresses all layers but the last, and model.depth is 1",
            "use recompute.compress=0",
        )
    found = []
    for key in model.blocks:
        if int(key) == last:
            continue
        name = f"blocks.{key}.mixer"
        mixer = model.get_submodule(name)
        there = {n.removesuffix(".weight") for n, _ in mixer.named_parameters()}
        names = _layers(KINDS[model.letters[int(key)]])
        layers = [layer for layer in names if layer in there]
        _compress(mixer, layers, ratio, seed, name)
        found += [f"{name}.{layer}.weight" for layer in layers]
    return found


def _layers(kind: BlockKind) -> tuple[str, ...]:
    """Linear layers that read the normed input.

    Not among them, since their input is kept anyway: output projections (attention keeps what it
    returned), what follows SwiGLU (made again from gate and up), what reads a latent of MLA (narrow
    already, and its norm keeps it), and the router and routed experts, which keep the rank's own
    tokens. Beside these, shared experts save activations only under tensor parallelism, where they
    read all tokens of the group; their gradients and moments are narrower in any case.
    """
    rows = (row for row in kind.parameters if row.compress)
    return tuple(name.removesuffix(".weight") for row in rows for name in row.names)


class Projection:
    """Random projection P `[D, Z]` of signs / sqrt(Z), for the layers that read one tensor.

    Signs rather than normal numbers: 64 signs cost as much as one normal number, and the variance
    of the estimate is no larger (Achlioptas 2003).

    Args:
        name: name of the block.
        width: D.
        projected: Z.
        seed: seed of the run.

    Attributes:
        number: number of redraws so far; code that sets it also resets the moments.
    """

    def __init__(self, name: str, width: int, projected: int, seed: int) -> None:
        self.name, self.width, self.projected, self.seed = name, width, projected, seed
        self.number = 0
        self._kept = WeakTensorKeyDictionary()  # input to a weak reference to its projection

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return P, from hashes of (seed, name, number, index): the same on every device."""
        key = tensor_key(self.seed, f"{self.name}.projection.{self.number}")
        count = self.width * self.projected
        index_W = torch.arange(-(-count // 32), device=device)  # W words of 32 bits
        words_W = (uniform(index_W, key) * 2.0**32).long()
        bytes_W4 = words_W.view(torch.uint8).view(-1, 8)[:, :4]
        bit_8 = torch.arange(8, device=device)
        bits = torch.arange(256, device=device)[:, None] >> bit_8 & 1
        signs = (bits * 2 - 1).to(dtype) / math.sqrt(self.projected)
        return F.embedding(bytes_W4.int(), signs).flatten()[:count].view(self.width, self.projected)

    @torch.no_grad()
    def project(self, x: Tensor) -> Tensor:
        """Return x P, `[..., Z]`, for the backward; computed once for all layers while it is alive.

        Args:
            x: `[..., D]`.
        """
        known = self._kept.get(x)
        z = None if known is None else known()
        if z is None:
            dtype = autocast_dtype(x) or x.dtype
            z = x.to(dtype) @ self.matrix(dtype, x.device)
            self._kept[x] = TensorWeakRef(z)
        return z


class CompressedProduct(torch.autograd.Function):
    """Product x W^T that saves z = x P; the latent receives the weight's gradient.

    The backward reads W from its layer again: W may be gathered again by then, and saved-tensor
    hooks aren't meant for weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, latent: Tensor, z: Tensor, layers: Sequence[nn.Linear]
    ) -> Tensor:
        """Return x W^T, `[..., O]`, and save z.

        Args:
            x: `[..., D]`.
            latent: `[O, Z]`, of all layers.
            z: `[..., Z]`, x P.
            layers: layers with the weights W, `[O, D]` together.
        """
        ctx.layers = layers
        ctx.save_for_backward(z)
        return F.linear(x, _weight(layers))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of x, `[..., D]`, and of the latent, `[O, Z]`.

        Args:
            g: `[..., O]`, gradient of the product.
        """
        (z,) = ctx.saved_tensors
        need_x, need_latent = needs_input_grad_now(ctx)[:2]
        g_NO = g.flatten(0, -2)
        dx = dlatent_OZ = None
        if need_x:
            dx = (g_NO @ _weight(ctx.layers).to(g.dtype)).view(*g.shape[:-1], -1)
        if need_latent:
            dlatent_OZ = g_NO.t() @ z.flatten(0, -2)
        return dx, dlatent_OZ, None, None


def compressed_linear(projection: Projection, x: Tensor, *layers: nn.Linear) -> Tensor:
    """Return the output of layers that have latents, `[..., O]`, in one product.

    Args:
        projection: projection of their input.
        x: `[..., D]`.
        layers: layers that read it.
    """
    if not torch.is_grad_enabled():
        return F.linear(x, _weight(layers))
    latents = [_latent(layer) for layer in layers]
    latent = latents[0] if len(latents) == 1 else torch.cat(latents)
    return CompressedProduct.apply(x, latent, projection.project(x), layers)  # type: ignore[no-any-return]


def _forward(layer: nn.Linear, projection: Projection, x: Tensor) -> Tensor:
    return compressed_linear(projection, x, layer)


def _weight(layers: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of layers, one below the other: `[O, D]`."""
    return layers[0].weight if len(layers) == 1 else torch.cat([x.weight for x in layers])


def _latent(layer: nn.Linear) -> Tensor:
    """Return this rank's rows of a layer's latent, `[O, Z]`."""
    latent = layer._parameters["latent"]
    assert latent is not None
    if is_dtensor(latent):  # sharded by tensor parallelism, and so is its gradient
        latent = latent.to_local(grad_placements=latent.placements)
    return latent


def _compress(mixer: nn.Module, names: list[str], ratio: float, seed: int, owner: str) -> None:
    """Give layers of one mixer that read the same tensor their latents."""
    if not names:
        return
    width = mixer.get_submodule(names[0]).in_features
    assert isinstance(width, int)
    projection = Projection(owner, width, projected_width(width, ratio), seed)
    for name in names:
        layer = mixer.get_submodule(name)
        assert isinstance(layer, nn.Linear) and layer.bias is None, f"{owner}.{name}"
        assert layer.in_features == width, f"{owner}.{name} reads something else"
        weight = layer._parameters["weight"]
        assert weight is not None
        weight.requires_grad_(False)
        # A slice of the weight, so that it is sharded like the weight.
        like = weight.detach()[:, : projection.projected]
        layer.register_parameter("latent", nn.Parameter(torch.zeros_like(like)))
        vars(layer)["projection"] = projection
        layer.forward = partial(_forward, layer, projection)  # type: ignore[method-assign]
    if hasattr(mixer, "thin"):
        joint: tuple[str, ...] = mixer.thin  # type: ignore[assignment]
        thin: list[Any] = [mixer.get_submodule(name) for name in joint]
        vars(mixer)["linear"] = lambda x, _: compressed_linear(projection, x, *thin)
    rules: Callable[[], dict[str, Rule]] = mixer.init_rules  # type: ignore[assignment]
    latents: dict[str, Rule] = {f"{name}.latent": Constant(0.0) for name in names}
    mixer.init_rules = lambda: rules() | latents  # type: ignore[assignment]
