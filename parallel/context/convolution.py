"""Short convolutions over the context axis: each chunk borrows the tokens in front of it.

Legend: B rows, t this rank's tokens of a row, J chunks of a rank, C tokens of a chunk, S = B J
segments, L chunks of a row, X channels, K taps; a suffix K1 is (K - 1) * dilation past tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.engram.module import DilatedConv
from megacpp.model.documents import Documents
from megacpp.model.pieces import Piece
from megacpp.model.seam import Seam
from parallel.collectives import gather
from parallel.context.layout import ContextLayout
from parallel.context.segments import cut, joined, linked, segment_documents

Convolve = Callable[[Tensor, Tensor, Documents], Tensor]


class Mixer(Protocol):
    """A mixer that convolves."""

    seam: Seam


def convolve_with_halo(
    mixer: Mixer,
    convolve: Convolve,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    x_BtX: Tensor,
    weight_X1K: Tensor,
    docs: Documents | None,
    dilation: int = 1,
    piece: Piece = "conv_bc",
) -> Tensor:
    """What `convolve` makes of this rank's tokens of whole rows, `[B, t, X]`.

    One all-gather of the last K1 tokens of every chunk; its backward is one reduce-scatter. A
    chunk must hold them: C >= K1. What is gathered is kept; all that is made of it is a piece.

    Args:
        dilation: tokens from tap to tap.
    """
    segments = segment_documents(docs, layout)
    num_past = (weight_X1K.shape[-1] - 1) * dilation
    x_SCX = cut(x_BtX, layout)
    assert x_SCX.shape[1] >= num_past, f"{num_past} past tokens from chunks of {x_SCX.shape[1]}"

    def convolved(x_SCX: Tensor, past_SK1X: Tensor, weight_X1K: Tensor) -> Tensor:
        y_SCX = convolve(torch.cat([past_SK1X, x_SCX], 1), weight_X1K, with_past)
        return joined(y_SCX[:, num_past:], layout)

    if num_past == 0:
        return joined(convolve(x_SCX, weight_X1K, segments), layout)
    ends_JBK1X = x_SCX[:, -num_past:].unflatten(0, (-1, layout.per_rank)).transpose(0, 1)
    ends_LBK1X = gather(ends_JBK1X.contiguous(), 0, group)
    with_past = segments.memo(("past", num_past), lambda: _with_past(segments, num_past))
    past_SK1X = _in_front(ends_LBK1X, layout)
    return linked(mixer.seam(piece, convolved, x_SCX, past_SK1X, weight_X1K), ends_LBK1X)


class ContextConv(ParallelStyle):
    """A convolution of an n-gram memory on the 1-D context mesh; its taps lie far apart."""

    def __init__(self, layout: ContextLayout) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, DilatedConv)
        module.convolve = partial(  # type: ignore[method-assign]
            convolve_with_halo,
            module,
            module.convolve,
            self.layout,
            device_mesh.get_group(),
            dilation=module.dilation,
            piece="engram",
        )
        return module


def _in_front(ends_LBK1X: Tensor, layout: ContextLayout) -> Tensor:
    """In front of each segment: the end of the chunk before it, zeros before a row's first."""
    place = {chunk: i for i, chunk in enumerate(layout.gathered_chunks())}
    nothing = torch.zeros_like(ends_LBK1X[0])
    mine = layout.chunks[layout.rank]
    past = [ends_LBK1X[place[chunk - 1]] if chunk else nothing for chunk in mine]
    return torch.stack(past, 1).flatten(0, 1)


def _with_past(segments: Documents, num_past: int) -> Documents:
    """The segments with `num_past` tokens in front of each, whose own outputs nobody reads."""
    if segments.whole:  # in front of a row's first chunk are zeros, as a document's past is
        S, C = segments.ids_BT.shape
        return Documents.rows(S, num_past + C, segments.ids_BT.device)
    ids_SC, positions_SC = (
        F.pad(x, (num_past, 0)) for x in (segments.ids_BT, segments.positions_BT)
    )
    return Documents(ids_SC, positions_SC)
