"""Compiled graphs of blocks, as their kinds describe them: parts, documents, reasons for none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from megacpp.kernels.causal_conv import reach
from megacpp.model.documents import Documents
from megacpp.model.short_conv import Convolve

CUT = "its scan is cut over ranks"


class GraphPart(NamedTuple):
    """Part of a mixer that can be a compiled graph, each token by itself.

    Attributes:
        module: whose method it is.
        method: name of the function, from tensors to one tensor.
        inside: modules that it calls.
        name: what it does, in messages.
    """

    module: nn.Module
    method: str
    inside: tuple[nn.Module, ...]
    name: str


def why_eager(
    mixer: Any, scan: type[nn.Module], operation: str, traced: Collection[str]
) -> str | None:
    """Return the reason why a block with a scan can't be one compiled graph, or None.

    Args:
        mixer: with submodules `scan` and `convolve`.
        scan: class of a scan that isn't cut.
        operation: that the scan does (megacpp/kernels/selection.py).
        traced: its backends that a compiler can trace.
    """
    if not (isinstance(mixer.scan, scan) and isinstance(mixer.convolve, Convolve)):
        return CUT
    backend = getattr(mixer.scan.kernels, operation)
    return None if backend in traced else f"no compiler sees into the {backend} form of its scan"


def graph_documents(
    docs: Documents, key: tuple[Any, ...], taps: int, *made: Callable[[Documents], object]
) -> Documents:
    """Return the documents with only the cached values that a scan and a convolution need.

    They are computed once a batch. Other cached values differ between layers, and each difference
    would be another graph.

    Args:
        docs: documents of the batch.
        key: whatever the values depend on.
        taps: of the convolution; 0: none.
        made: functions that cache a value each in the documents that they are given.
    """

    def make() -> Documents:
        read = Documents(docs.ids_BT, docs.positions_BT, docs.whole)
        for each in made:
            each(read)
        if taps and not docs.whole:
            reach(read, taps)
        return read

    return docs.memo(("compiled scan", *key, taps), make)
