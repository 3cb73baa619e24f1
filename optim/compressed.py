"""Low-rank updates: AdamW moves a latent S `[O, Z]`, then W += S P^T and S = 0.

A layer with a parameter `latent` beside its `weight` is updated this way
(checkpointing/compress.py). P `[D, Z]` is a random projection, shared by layers that read one
tensor, and redrawn every few steps. In terms of W a step is

    w <- (1 - lr * weight_decay) w - lr * adamw(g P) P^T

Rows of S are sharded like the rows of W, so ranks exchange nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacpp.torch_extras import dtensors, local_part
from optim.low_bit import plain, write


class Projected(Protocol):
    """Random projection P of the layers that read one tensor.

    Attributes:
        number: number of redraws so far; P depends on it.
    """

    number: int

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return P, `[D, Z]`."""
        ...


@dataclass(eq=False)
class LowRankUpdate:
    """Weight `[O, D]`, its latent `[O, Z]`, and the projection between them.

    Attributes:
        weight: parameter that the model reads.
        latent: parameter that AdamW updates; zero between steps.
        projection: random projection.
        updates: number of steps applied so far.
    """

    weight: nn.Parameter
    latent: nn.Parameter
    projection: Projected
    updates: int = 0

    @staticmethod
    def of_layer(layer: nn.Module) -> LowRankUpdate:
        """Return the low-rank update of a layer that has a latent."""
        weight, latent = layer._parameters["weight"], layer._parameters["latent"]
        assert weight is not None and latent is not None
        return LowRankUpdate(weight, latent, vars(layer)["projection"])


def has_latent(layer: nn.Module) -> bool:
    """Return whether a layer's weight is updated through a latent."""
    return layer._parameters.get("latent") is not None


@torch.no_grad()
def apply_low_rank_updates(group: dict[str, Any], folds: Sequence[LowRankUpdate]) -> None:
    """Add latents to their weights in place and zero the latents; one P is alive at a time.

    Args:
        group: parameter group with `lr`, `weight_decay` and `cautious` (weights decay only where
            the update shrinks them).
        folds: updates to apply.
    """
    for same in _by_projection(folds):
        first = local_part(same[0].latent)
        p_DZ = same[0].projection.matrix(first.dtype, first.device)
        for member in same:
            w_OD, s_OZ = local_part(member.weight), local_part(member.latent)
            assert len(w_OD) == len(s_OZ), "rows of a latent lie where those of its weight do"
            _decay_and_add(group, w_OD, s_OZ, p_DZ)
            s_OZ.zero_()
            member.updates += 1
    torch.autograd.graph.increment_version(dtensors(f.weight for f in folds))


@torch.no_grad()
def redraw(folds: Iterable[LowRankUpdate], states: Iterable[dict[str, Tensor]], every: int) -> None:
    """Draw new projections after every `every` steps (0: never), and reset the moments.

    First moments in the old Z dims say nothing about the new ones: they restart at zero and grow
    again over 1 / (1 - beta1) steps. Second moments become the mean of their row, which is the same
    for any P: E[(g P)_oz^2] = |g_o|^2 / Z. Otherwise the first steps after a redraw would be
    several times too long.
    """
    for f, state in zip(folds, states, strict=True):
        if every and f.updates % every == 0:
            f.projection.number = f.updates // every
            first, second = state["exp_avg"], local_part(plain(state["exp_avg_sq"]))
            write(first, torch.zeros_like(local_part(plain(first))))
            write(state["exp_avg_sq"], second.mean(1, keepdim=True).expand_as(second).contiguous())


def resume(update: LowRankUpdate, state: dict[str, Tensor], every: int) -> None:
    """Restore the projection that a loaded optimizer state belongs to."""
    update.updates = int(state["step"].item())
    update.projection.number = update.updates // every if every else 0


def _decay_and_add(group: dict[str, Any], w_OD: Tensor, s_OZ: Tensor, p_DZ: Tensor) -> None:
    lr, decay = group["lr"], group["weight_decay"]
    if decay and group.get("cautious"):
        update_OD = s_OZ @ p_DZ.t()
        w_OD.sub_(torch.where(update_OD * w_OD <= 0, w_OD, 0) * (lr * decay)).add_(update_OD)
    elif isinstance(lr, Tensor):
        w_OD.mul_(1 - lr * decay).addmm_(s_OZ, p_DZ.t())
    else:
        w_OD.addmm_(s_OZ, p_DZ.t(), beta=1 - lr * decay)


def _by_projection(folds: Sequence[LowRankUpdate]) -> list[list[LowRankUpdate]]:
    """Group updates that share a projection."""
    found: dict[int, list[LowRankUpdate]] = {}
    for f in folds:
        found.setdefault(id(f.projection), []).append(f)
    return list(found.values())
