"""Tensors in a folder of safetensors files, read in boxes, without loading a file.

A tensor is whole in one file, or in pieces that ranks wrote: then each file has their offsets, as
torch's distributed checkpoint stores them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacpp.errors import CheckpointError, shortened
from megacpp.state.manifest import UNREADABLE, whole_number

OFFSETS = "DCP_SHARDING_INFO"
Box = Sequence[tuple[int, int]]  # first and one past the last, of each dim


@dataclass(frozen=True)
class StoredPiece:
    """Part of a tensor in a file."""

    file: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class StoredTensors:
    """Open files of a folder.

    Args:
        folder: folder of the files.
        files: names of the files.
        prefix: start of the names to see; it is left out of them.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file.
    """

    def __init__(self, folder: Path, files: Iterable[str], prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix
        self.pieces: dict[str, list[StoredPiece]] = {}
        self._open = ExitStack()
        for name in files:
            try:
                self._add(self._open.enter_context(safe_open(folder / name, framework="pt")))
            except (SafetensorError, *UNREADABLE) as error:
                raise CheckpointError(
                    f"{folder / name}: can't be read ({shortened(error)}). Fix: fetch the file "
                    "again."
                ) from None
        self.shapes = {name: _extent(pieces) for name, pieces in self.pieces.items()}

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as the format names it: F32, BF16, F8_E4M3."""
        return self.pieces[name][0].file.get_slice(self.prefix + name).get_dtype()

    def rows(self, name: str, first: int, count: int, columns: slice = slice(None)) -> Tensor:
        """Return rows `[count, W]` of a tensor whose dims but the last are flattened.

        Args:
            name: of the tensor.
            first: row to start with.
            count: number of rows.
            columns: numbers of a row.
        """
        shape = self.shapes[name]
        if len(shape) < 2:
            return self.box(name, [(first, first + count)] if shape else []).reshape(-1, 1)
        low, high, _ = columns.indices(shape[-1])
        boxes = [[*box, (low, high)] for box in boxes_of(shape[:-1], first, count)]
        found = [self.box(name, box).flatten(0, -2) for box in boxes]
        return found[0] if len(found) == 1 else torch.cat(found)

    def box(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        pieces = self.pieces[name]
        if not box:
            return pieces[0].file.get_tensor(self.prefix + name)
        found: Tensor | None = None
        for piece in pieces:
            cut = [
                (max(lo, at), min(hi, at + size))
                for (lo, hi), at, size in zip(box, piece.offset, piece.shape, strict=True)
            ]
            if any(lo >= hi for lo, hi in cut):
                continue
            inside = tuple(
                slice(lo - at, hi - at) for (lo, hi), at in zip(cut, piece.offset, strict=True)
            )
            values = piece.file.get_slice(self.prefix + name)[inside]
            if cut == list(box):
                return values
            if found is None:
                found = torch.empty([hi - lo for lo, hi in box], dtype=values.dtype)
            found[
                tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(cut, box, strict=True))
            ] = values
        if found is None:  # an empty box
            sample = pieces[0].file.get_slice(self.prefix + name)
            return sample[tuple(slice(0, 0) for _ in box)].new_empty([hi - lo for lo, hi in box])
        return found

    def _add(self, file: Any) -> None:
        metadata: Mapping[str, str] = file.metadata() or {}
        saved = json.loads(metadata.get(OFFSETS, "{}"))
        for key in file.keys():  # noqa: SIM118 - no mapping
            if not key.startswith(self.prefix):
                continue
            shape = tuple(file.get_slice(key).get_shape())
            offset = tuple(saved.get(key, {}).get("saved_offsets", [0] * len(shape)))
            name = key.removeprefix(self.prefix)
            others = self.pieces.setdefault(name, [])
            if {len(offset), *(len(other.shape) for other in others)} - {len(shape)}:
                raise ValueError(f"the pieces of {name} have different numbers of dims")
            others.append(StoredPiece(file, shape, tuple(map(whole_number, offset))))


def boxes_of(shape: Sequence[int], first: int, count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield boxes that hold consecutive rows and nothing else, in their order.

    Args:
        shape: dims that number the rows.
        first: row to start with.
        count: number of rows.
    """
    if len(shape) == 1:
        yield [(first, first + count)]
        return
    inner = math.prod(shape[1:])
    while count:
        at, within = divmod(first, inner)
        if within or count < inner:
            taken = min(count, inner - within)
            yield from ([(at, at + 1), *box] for box in boxes_of(shape[1:], within, taken))
        else:
            taken = count - count % inner
            yield [(at, at + taken // inner), *((0, size) for size in shape[1:])]
        first, count = first + taken, count - taken


def _extent(pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    """Return the shape that pieces make together."""
    dims = zip(
        *([at + n for at, n in zip(p.offset, p.shape, strict=True)] for p in pieces), strict=True
    )
    return tuple(max(ends) for ends in dims)
