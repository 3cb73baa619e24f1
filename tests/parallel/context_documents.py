"""Reach of a document into others, where the tokens of a mixer are cut over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacpp.lessons.differences import largest
from megacpp.model.documents import Documents
from parallel.context.layout import ContextLayout, Order

ORDERS: tuple[Order, ...] = ("contiguous", "head_tail")


def outside(
    mixer: nn.Module, layout: ContextLayout, x_BTD: Tensor, dy_BTD: Tensor, docs: Documents
) -> list[float]:
    """Return how much a document reaches others on this rank, at most: outputs, gradients.

    One document after the other is changed, and must change its own outputs; then the gradient of
    the outputs of all others must not reach it, and must reach their own inputs.

    Args:
        mixer: sequence mixer of a block, its tokens over ranks.
        layout: tokens of this rank.
        x_BTD: inputs of all ranks.
        dy_BTD: gradient of the output of all ranks.
        docs: documents of the rows.
    """
    index_T = layout.index(x_BTD.shape[1])
    part, numbers = docs.take(index_T), number_of(docs)
    mine_Bt = numbers[:, index_T]
    x_BtD = x_BTD[:, index_T].requires_grad_()
    y_BtD = mixer(x_BtD, part)
    reached = [0.0, 0.0]
    for number in range(int(numbers.max()) + 1):
        own_BT = numbers == number
        own_Bt = mine_Bt == number
        changed_BTD = torch.where(own_BT[..., None], x_BTD + 1.0, x_BTD)
        with torch.no_grad():
            difference = (mixer(changed_BTD[:, index_T], part) - y_BtD).abs().amax(-1)
        (dx_BtD,) = torch.autograd.grad(
            y_BtD, x_BtD, dy_BTD[:, index_T] * ~own_Bt[..., None], retain_graph=True
        )
        gradient = dx_BtD.abs().amax(-1)
        assert (difference[own_Bt] > 0).all() and (gradient[~own_Bt] > 0).all()
        reached[0] = largest([reached[0], *difference[~own_Bt].tolist()])
        reached[1] = largest([reached[1], *gradient[own_Bt].tolist()])
    return reached


def number_of(docs: Documents) -> Tensor:
    """Return the documents of tokens, `[B, T]`, numbered through all rows."""
    return docs.starts_BT.flatten().cumsum(0).view_as(docs.ids_BT) - 1
