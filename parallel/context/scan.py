"""Recurrences over the context axis: heads for tokens, states folded, or a state passed on.

Submodules that take the place of a mixer's `scan` (megacpp/model/scan.py), for every kind of
recurrence. `heads`: an all-to-all turns tokens of all heads into whole rows of some. `state`: what
a chunk leaves to the right is known before it is scanned, so one all-gather of summaries tells
every rank which state enters each of its chunks. `serial`: parallel/context/serial.py.

Legend: B rows, T tokens of a row, t this rank's tokens of it, H heads, h the rank's share of them,
V value dim, J chunks of a rank, S = B J segments, C tokens of a segment, L chunks of a row, X
numbers of a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.model.documents import Documents
from megacpp.model.scan import FoldingScan, HeadTensors, RowTensors, SequenceScan, TokenTensors
from megacpp.model.short_conv import Convolve
from parallel.collectives import gather
from parallel.context.convolution import ContextConvolve
from parallel.context.heads import from_heads, own_heads, to_own_heads
from parallel.context.layout import ContextLayout
from parallel.context.segments import (
    carries,
    continues,
    cut,
    joined,
    linked,
    row_of,
    segment_documents,
)
from parallel.context.serial import SerialScan

Kind = Literal["heads", "state", "serial"]


class ContextScan(ParallelStyle):
    """Style that swaps `scan` and `convolve` of a mixer for those of the 1-D context mesh.

    The mixer's documents must then be a part of whole rows (`Documents.take`) in the layout's
    order. `heads` needs the heads that this process holds to divide by the number of context ranks;
    `state` needs a `FoldingScan`; `serial`, for a `CarryingScan`, takes as long as one rank with
    the whole row.
    """

    def __init__(self, kind: Kind, layout: ContextLayout) -> None:
        super().__init__()
        self.kind, self.layout = kind, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout, group = self.layout, device_mesh.get_group()
        assert layout.degree == group.size() and layout.rank == group.rank()
        kinds = {"heads": ScanByHeads, "state": ScanFromStates, "serial": SerialScan}
        module.scan = kinds[self.kind](module.scan, layout, group)  # type: ignore[arg-type]
        if isinstance(module.convolve, Convolve):
            module.convolve = ContextConvolve(module.convolve, layout, group)
        return module


def heads_if_divisible(wanted: Kind | Literal["auto"], num_heads: int, degree: int) -> Kind:
    """Return `heads` for `auto` if context ranks divide a process's heads, else `serial`."""
    if wanted != "auto":
        return wanted
    return "serial" if num_heads % degree else "heads"


class ScanByHeads(nn.Module):
    """Scan of whole rows for this rank's share of the heads.

    One all-to-all there (one more where dtypes differ) and one back. What heads of several ranks
    share is gathered instead.
    """

    def __init__(self, scan: SequenceScan, layout: ContextLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.scan, self.layout, self.group = scan, layout, group

    def forward(self, inputs: TokenTensors, weights: HeadTensors, docs: Documents | None) -> Tensor:
        """Return outputs `[B, t, H, V]` of this rank's tokens."""
        layout, num_heads = self.layout, inputs.num_heads
        in_order = inputs.map_dims(lambda x, dims: x.movedim(dims, (1, 2)))
        rows = to_own_heads(in_order.tensors(), num_heads, layout, self.group)
        whole = inputs.with_tensors(rows).map_dims(lambda x, dims: x.movedim((1, 2), dims))
        own = weights.heads(own_heads(num_heads, layout))
        return from_heads(self.scan(whole, own, row_of(docs, layout)), layout, self.group)


class ScanFromStates(nn.Module):
    """Scan of this rank's chunks, each entered by the state that the chunks before it leave.

    One all-gather of a summary per chunk and row, at least fp32; its backward is one
    reduce-scatter. Parameters that the fold uses get their gradients on the rank that entered a
    state with them: partial over the axis, as all gradients are.
    """

    def __init__(self, scan: FoldingScan, layout: ContextLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.scan, self.layout, self.group = scan, layout, group

    def forward(self, inputs: TokenTensors, weights: HeadTensors, docs: Documents) -> Tensor:
        """Return outputs `[B, t, H, V]` of this rank's tokens."""
        layout, scan = self.layout, self.scan
        segments = segment_documents(docs, layout)
        parts = inputs.map_dims(lambda x, dims: cut(x, layout, dims.tokens))
        summary = scan.summarize(parts, weights, segments)
        flat_JBX = summary.packed().unflatten(0, (-1, layout.per_rank)).transpose(0, 1)
        flat_LBX = gather(flat_JBX.contiguous(), 0, self.group)
        summaries = _in_row_order(flat_LBX, summary, layout)
        states = scan.fold(summaries, carries(docs, layout), weights)
        entering = _own(states, layout).kept(continues(segments))
        y_SCHV = scan(parts, weights, segments, entering)
        return joined(linked(y_SCHV, flat_LBX), layout)


def _in_row_order(flat_LBX: Tensor, like: RowTensors, layout: ContextLayout) -> list[RowTensors]:
    """Return the gathered summaries of all chunks, from left to right."""
    summaries = [like.unpacked(flat_BX) for flat_BX in flat_LBX]
    place = {chunk: i for i, chunk in enumerate(layout.gathered_chunks())}
    return [summaries[place[chunk]] for chunk in range(layout.num_chunks)]


def _own(states: Sequence[RowTensors], layout: ContextLayout) -> RowTensors:
    """Return the states that enter this rank's chunks, by segment."""
    mine = [states[chunk] for chunk in layout.chunks[layout.rank]]
    return RowTensors.joined(mine, lambda xs: torch.stack(xs, 1).flatten(0, 1))
