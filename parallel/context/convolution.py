"""Short convolutions over the context axis: each chunk receives the tokens in front of it.

Legend: B rows, t this rank's tokens of a row, J chunks of a rank, C tokens of a chunk, S = B J
segments, L chunks of a row, X channels, K taps; a suffix K1 is (K - 1) * dilation past tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.model.documents import Documents
from megacpp.model.short_conv import Convolve
from parallel.collectives import gather
from parallel.context.layout import ContextLayout
from parallel.context.segments import cut, joined, linked, segment_documents


class ContextConvolve(nn.Module):
    """Convolution of this rank's tokens of whole rows.

    One all-gather of the last K1 tokens of every chunk; its backward is one reduce-scatter. A
    chunk must hold them: C >= K1. What is gathered is kept; the rest is one recompute region.
    """

    def __init__(self, convolve: Convolve, layout: ContextLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.convolve, self.layout, self.group = convolve, layout, group

    def forward(self, x_BtX: Tensor, weight_X1K: Tensor, docs: Documents | None) -> Tensor:
        """Return the convolution `[B, t, X]` of this rank's tokens; documents span whole rows."""
        layout, convolve = self.layout, self.convolve
        segments = segment_documents(docs, layout)
        num_past = (weight_X1K.shape[-1] - 1) * convolve.dilation
        x_SCX = cut(x_BtX, layout)
        assert x_SCX.shape[1] >= num_past, f"{num_past} past tokens from chunks of {x_SCX.shape[1]}"

        def convolved(x_SCX: Tensor, past_SK1X: Tensor, weight_X1K: Tensor) -> Tensor:
            y_SCX = convolve(torch.cat([past_SK1X, x_SCX], 1), weight_X1K, with_past)
            return joined(y_SCX[:, num_past:], layout)

        if num_past == 0:
            return joined(convolve(x_SCX, weight_X1K, segments), layout)
        ends_JBK1X = x_SCX[:, -num_past:].unflatten(0, (-1, layout.per_rank)).transpose(0, 1)
        ends_LBK1X = gather(ends_JBK1X.contiguous(), 0, self.group)
        with_past = segments.memo(("past", num_past), lambda: _with_past(segments, num_past))
        past_SK1X = _in_front(ends_LBK1X, layout)
        y_BtX = convolve.recompute(convolve.region, convolved, x_SCX, past_SK1X, weight_X1K)
        return linked(y_BtX, ends_LBK1X)


class ContextConv(ParallelStyle):
    """Style that swaps `convolve` of a module on the 1-D context mesh, with any dilation."""

    def __init__(self, layout: ContextLayout) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module.convolve, Convolve)
        module.convolve = ContextConvolve(module.convolve, self.layout, device_mesh.get_group())
        return module


def _in_front(ends_LBK1X: Tensor, layout: ContextLayout) -> Tensor:
    """Return the tokens in front of each segment: the end of the chunk before, or zeros."""
    place = {chunk: i for i, chunk in enumerate(layout.gathered_chunks())}
    nothing = torch.zeros_like(ends_LBK1X[0])
    mine = layout.chunks[layout.rank]
    past = [ends_LBK1X[place[chunk - 1]] if chunk else nothing for chunk in mine]
    return torch.stack(past, 1).flatten(0, 1)


def _with_past(segments: Documents, num_past: int) -> Documents:
    """Return the segments with `num_past` tokens in front of each, whose outputs are dropped."""
    if segments.whole:  # in front of a row's first chunk are zeros, as a document's past is
        S, C = segments.ids_BT.shape
        return Documents.rows(S, num_past + C, segments.ids_BT.device)
    ids_SC, positions_SC = (
        F.pad(x, (num_past, 0)) for x in (segments.ids_BT, segments.positions_BT)
    )
    return Documents(ids_SC, positions_SC)
