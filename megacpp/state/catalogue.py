"""What all ranks hold together: under pipeline parallelism no rank has every tensor."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.dtensor import is_dtensor
from megacpp.state.agreement import gather, share, this_rank
from megacpp.state.manifest import TensorEntry, describe


@dataclass(frozen=True)
class Catalogue:
    """Every tensor of a run by name: those of the lowest rank first, each in its rank's order.

    Attributes:
        entries: dtype and global shape.
        first: the lowest rank that holds a part.
        count: ranks that hold a part (or a copy).
    """

    entries: dict[str, TensorEntry]
    first: dict[str, int]
    count: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, each counted once."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def everywhere(self) -> bool:
        """Every rank holds a part of every tensor."""
        return all(number == this_rank()[1] for number in self.count.values())


def catalogue(tensors: Mapping[str, Tensor]) -> Catalogue:
    """The tensors of all ranks, from those of each; every rank calls it and gets the same.

    Ranks with the same tensors (those of one stage) are heard once, so that what travels grows
    with the number of stages, not of ranks.
    """
    mine = describe(tensors)
    text = json.dumps([(name, entry.dtype, entry.shape) for name, entry in mine.items()])
    alike: dict[str, list[int]] = {}
    for rank, digest in enumerate(gather(hashlib.sha256(text.encode()).hexdigest())):
        alike.setdefault(digest, []).append(rank)
    found = Catalogue({}, {}, {})
    for ranks in alike.values():
        held = mine if len(alike) == 1 else share(mine, ranks[0])
        for name, entry in held.items():
            known = found.entries.setdefault(name, entry)
            assert known == entry, f"{name} is {known}, but {entry} on rank {ranks[0]}"
            found.first.setdefault(name, ranks[0])
            found.count[name] = found.count.get(name, 0) + len(ranks)
    return found


def check_parts(tensors: Mapping[str, Tensor]) -> None:
    """Asserts that this rank holds of each DTensor the box that its placements name.

    FSDP2 cuts what an axis inside it has cut already; where that axis doesn't divide a dim, the
    placements describe other boxes than those that ranks hold (torch 2.13: pytorch#161368,
    pytorch#168134), and offsets would lie.
    """
    for name, t in tensors.items():
        if is_dtensor(t):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            mesh, placements = t.device_mesh, t.placements
            shape, _ = compute_local_shape_and_global_offset(t.shape, mesh, placements, True)
            held = tuple(t.to_local().shape)
            assert held == shape, f"{name} of {list(t.shape)} is {held} under {placements}"


@torch.no_grad()
def whole_on_main(t: Tensor | None, entry: TensorEntry, first: int, device: torch.device) -> Tensor:
    """A whole tensor on rank 0; every rank calls it, other ranks get an empty one.

    Ranks that hold parts make it whole together; if rank 0 isn't one of them, the first of them
    sends it there.

    Args:
        t: what this rank holds of it, None if nothing.
        first: the lowest rank that holds a part.
        device: where rank 0 receives it.
    """
    rank, _ = this_rank()
    full = torch.empty(0)
    if t is not None:
        with _unwarned():
            full = t.full_tensor() if is_dtensor(t) else t
    if first == 0 or rank not in (0, first):
        return full if rank == 0 else torch.empty(0)
    if rank == first:
        dist.send(full.detach().contiguous().view(-1), 0)
        if full.device.type != "cpu":  # else whole tensors would queue up on this device
            torch.accelerator.synchronize(full.device)
        return torch.empty(0)
    flat = torch.empty(entry.numel, dtype=entry.torch_dtype, device=device)
    dist.recv(flat, first)
    return flat.view(entry.shape)


@contextmanager
def _unwarned() -> Iterator[None]:
    """DTensor warns of gathering a tensor that is cut twice in two steps; there is no other way."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
