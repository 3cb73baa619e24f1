"""Mixer whose tokens are cut over ranks against the same on one process, on packed rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megacpp.lessons.differences import largest, relative
from megacpp.model.documents import Documents
from parallel.context.layout import ContextLayout, Order
from parallel.simulate.collective_log import Collective, CollectiveLog

ROWS, TOKENS = 2, 32
# Chunks are of 4 tokens at the least (head_tail on 4 ranks). Row 0: a document that crosses into
# the second chunk, one that starts exactly at a boundary, a chunk with two starts, a document over
# three whole chunks of 4 tokens. Row 1: starts at boundaries of every layout and at the last token.
STARTS = ((0, 5, 8, 9, 11, 27), (0, 16, 24, 31))


@dataclass(frozen=True, eq=False)
class Pass:
    """Forward and backward of a mixer: what came out, and the gradients."""

    y_BTD: Tensor
    dx_BTD: Tensor
    gradients: dict[str, Tensor]


def packed_rows() -> Documents:
    """Return two rows of documents that start at `STARTS`."""
    starts_BT = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    for row, starts in enumerate(STARTS):
        starts_BT[row, list(starts)] = True
    return Documents.from_ids(starts_BT.cumsum(1))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers in fp64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(mixer: nn.Module, x_BTD: Tensor, dy_BTD: Tensor, docs: Documents) -> Pass:
    """Run forward and backward of a copy of the mixer.

    Args:
        mixer: sequence mixer of a block.
        x_BTD: inputs.
        dy_BTD: gradient of the output.
        docs: documents of the rows.
    """
    mixer, x_BTD = copy.deepcopy(mixer), x_BTD.clone().requires_grad_()
    y_BTD = mixer(x_BTD, docs)
    y_BTD.backward(dy_BTD)
    return _pass(mixer, x_BTD, y_BTD)


def run_part(
    mixer: nn.Module,
    style: ParallelStyle,
    layout: ContextLayout,
    x_BTD: Tensor,
    dy_BTD: Tensor,
    docs: Documents,
) -> tuple[Pass, list[Collective], list[Collective]]:
    """Run a rank's tokens; return the pass, and the collectives of forward and of backward.

    Args:
        mixer: sequence mixer of a block.
        style: way of its tokens over ranks.
        layout: tokens of this rank.
        x_BTD: inputs of all ranks.
        dy_BTD: gradient of the output of all ranks.
        docs: documents of the rows.
    """
    mesh = init_device_mesh("cpu", (layout.degree,), mesh_dim_names=("cp",))
    mixer, index_T = copy.deepcopy(mixer), layout.index(x_BTD.shape[1])
    parallelize_module(mixer, mesh, style)
    x_BtD = x_BTD[:, index_T].requires_grad_()
    with CollectiveLog() as forward:
        y_BtD = mixer(x_BtD, docs.take(index_T))
    with CollectiveLog() as backward:
        y_BtD.backward(dy_BTD[:, index_T])
    return _pass(mixer, x_BtD, y_BtD), forward.calls, backward.calls


def _pass(mixer: nn.Module, x: Tensor, y: Tensor) -> Pass:
    found = {name: p.grad for name, p in mixer.named_parameters()}
    gradients = {name: g for name, g in found.items() if g is not None}
    assert x.grad is not None and gradients.keys() == found.keys()
    return Pass(y.detach(), x.grad, gradients)


def whole(parts: Iterable[Pass], order: Order) -> Pass:
    """Return whole rows from the parts of all ranks, and parameter gradients summed over them."""
    parts = list(parts)
    tokens = sum(part.y_BTD.shape[1] for part in parts)
    index_T = ContextLayout.for_rank(order, 0, len(parts)).gathered_index(tokens).argsort()
    return Pass(
        torch.cat([part.y_BTD for part in parts], 1)[:, index_T],
        torch.cat([part.dx_BTD for part in parts], 1)[:, index_T],
        {name: sum(p.gradients[name] for p in parts) for name in parts[0].gradients},  # type: ignore[misc]
    )


def error(got: Pass, want: Pass) -> float:
    """Return the largest difference relative to the largest reference value, of all tensors."""
    pairs = [(got.y_BTD, want.y_BTD), (got.dx_BTD, want.dx_BTD)]
    pairs += [(got.gradients[name], grad) for name, grad in want.gradients.items()]
    assert got.gradients.keys() == want.gradients.keys()
    return largest(relative(a, b) for a, b in pairs)
