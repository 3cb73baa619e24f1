"""Mamba-3 over the context axis, exactly: states handed to the right, or heads for tokens.

`state`: each rank scans its own chunks. What a chunk's tokens leave to the right is known without
a scan (megacpp/kernels/mamba3/segments.py), so one all-gather tells every rank which state enters
each of its chunks. `heads`: an all-to-all turns tokens of all heads into whole rows of some.

Legend: B rows, T tokens of a row, t this rank's tokens of it, H heads, h the rank's share of them,
G groups, R MIMO rank, N state size, P head dim, A rotated pairs, S segments (this rank's chunks of
all rows), C tokens of a segment, L chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from megacpp.blocks.mamba3.module import Mamba3
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.segments import SegmentSummary, fold, summarize
from megacpp.model.documents import Documents
from parallel.collectives import gather
from parallel.context.convolution import convolve_with_halo
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

Scan = Callable[..., tuple[Tensor, Mamba3State | None]]


class ContextMamba3(ParallelStyle):
    """Replaces `scan` and `convolve` of a Mamba-3 mixer on the 1-D context mesh.

    Its documents must then be a part of whole rows (`Documents.take`) in the layout's order.
    `heads` needs the heads that this process holds to divide by the number of context ranks. The
    state that the replaced scan returns is not the row's: of `state` it is that of each segment in
    its own frame, of `heads` that of the rank's heads.
    """

    def __init__(self, kind: Literal["state", "heads"], layout: ContextLayout) -> None:
        super().__init__()
        self.kind, self.layout = kind, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Mamba3)
        layout, group = self.layout, device_mesh.get_group()
        assert layout.degree == group.size() and layout.rank == group.rank()
        if self.kind == "state":
            scan = partial(scan_with_states, module.scan, module.pairing, layout, group)
        else:
            scan = partial(scan_by_heads, module.scan, layout, group)
        module.scan = scan  # type: ignore[method-assign]
        module.convolve = partial(  # type: ignore[method-assign]
            convolve_with_halo, module, module.convolve, layout, group
        )
        return module


def scan_with_states(
    scan: Scan,
    pairing: Pairing,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
) -> tuple[Tensor, Mamba3State | None]:
    """`scan` of this rank's chunks, each entered by the state that the chunks before it leave.

    One all-gather of H (P N + A + P + 2) + R G N numbers per chunk and row, at least fp32; its
    backward is one reduce-scatter. Parameters that the fold uses get their gradients on the rank
    that entered a state with them: partial over the axis, as all gradients are.
    """
    segments = segment_documents(docs, layout)
    parts = _segments(inputs, layout)
    summary = summarize(parts, weights, segments, pairing)
    flat_JBX = summary.packed().unflatten(0, (-1, layout.per_rank)).transpose(0, 1)
    flat_LBX = gather(flat_JBX.contiguous(), 0, group)
    states = fold(_in_row_order(flat_LBX, summary, layout), carries(docs, layout), weights, pairing)
    entering = _own(states, layout).kept(continues(segments))
    y_SCHP, last = scan(parts, weights, segments, entering)
    return joined(linked(y_SCHP, flat_LBX), layout), last


def scan_by_heads(
    scan: Scan,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
) -> tuple[Tensor, Mamba3State | None]:
    """`scan` of whole rows for this rank's share of the heads.

    One all-to-all there (one more where dtypes differ) and one back. B, C and angles that heads of
    several ranks share are gathered instead.
    """
    row, num_heads = row_of(docs, layout), inputs.V.shape[2]
    own = own_heads(num_heads, layout)
    parts = {"V": inputs.V, "ADT": inputs.ADT.mT, "DT": inputs.DT.mT, "Trap": inputs.Trap.mT}
    if inputs.Z is not None:
        parts["Z"] = inputs.Z
    # Q and K have their groups behind the ranks.
    parts |= {"Q": inputs.Q.transpose(2, 3), "K": inputs.K.transpose(2, 3), "Angles": inputs.Angles}
    rows = to_own_heads(parts, num_heads, layout, group)
    whole = ScanInputs(
        Q=rows["Q"].transpose(2, 3),
        K=rows["K"].transpose(2, 3),
        V=rows["V"],
        Z=rows.get("Z"),
        ADT=rows["ADT"].mT,
        DT=rows["DT"].mT,
        Trap=rows["Trap"].mT,
        Angles=rows["Angles"],
    )
    y_BThP, last = scan(whole, weights.heads(own), row)
    return from_heads(y_BThP, layout, group), last


def _segments(inputs: ScanInputs, layout: ContextLayout) -> ScanInputs:
    """The rank's chunks as rows (views where they can be)."""
    return ScanInputs(
        Q=cut(inputs.Q, layout),
        K=cut(inputs.K, layout),
        V=cut(inputs.V, layout),
        Z=None if inputs.Z is None else cut(inputs.Z, layout),
        ADT=cut(inputs.ADT, layout, 2),
        DT=cut(inputs.DT, layout, 2),
        Trap=cut(inputs.Trap, layout, 2),
        Angles=cut(inputs.Angles, layout),
    )


def _in_row_order(
    flat_LBX: Tensor, like: SegmentSummary, layout: ContextLayout
) -> list[SegmentSummary]:
    """The gathered summaries of all chunks, from left to right."""
    summaries = [like.unpacked(flat_BX) for flat_BX in flat_LBX]
    place = {chunk: i for i, chunk in enumerate(layout.gathered_chunks())}
    return [summaries[place[chunk]] for chunk in range(layout.num_chunks)]


def _own(states: list[Mamba3State], layout: ContextLayout) -> Mamba3State:
    """The states that enter this rank's chunks, by segment."""
    mine = [states[chunk] for chunk in layout.chunks[layout.rank]]
    fields = zip(*(vars(state).values() for state in mine), strict=True)
    return Mamba3State(*(torch.stack(xs, 1).flatten(0, 1) for xs in fields))
