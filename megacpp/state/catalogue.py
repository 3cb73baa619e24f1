"""Catalogue of all ranks' tensors: under pipeline parallelism no rank holds every tensor."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.errors import CheckpointError
from megacpp.state.agreement import gather, share, this_rank
from megacpp.state.manifest import Manifest, TensorEntry, describe
from megacpp.torch_extras import is_dtensor


@dataclass(frozen=True)
class Catalogue:
    """All tensors of a run by name: those of the lowest rank first, each in its rank's order.

    Attributes:
        entries: dtype and global shape.
        first: lowest rank that holds a shard.
        count: number of ranks that hold a shard or a replica.
    """

    entries: dict[str, TensorEntry]
    first: dict[str, int]
    count: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def everywhere(self) -> bool:
        """Whether every rank holds a shard of every tensor."""
        return all(number == this_rank()[1] for number in self.count.values())


def catalogue(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> Catalogue:
    """Merge the tensors of all ranks; every rank calls it and gets the same catalogue.

    Ranks with the same tensors (those of a pipeline stage) send one description, so the traffic
    grows with the number of stages, not of ranks.

    Args:
        tensors: this rank's tensors by name.
        group: all ranks in a process group of their own; None: the default one.
    """
    mine = describe(tensors)
    text = json.dumps([(name, entry.dtype, entry.shape) for name, entry in mine.items()])
    alike: dict[str, list[int]] = {}
    for rank, digest in enumerate(gather(_digest(text), group)):
        alike.setdefault(digest, []).append(rank)
    found = Catalogue({}, {}, {})
    for ranks in alike.values():
        held = mine if len(alike) == 1 else share(mine, ranks[0], group)
        for name, entry in held.items():
            known = found.entries.setdefault(name, entry)
            assert known == entry, f"{name} is {known}, but {entry} on rank {ranks[0]}"
            found.first.setdefault(name, ranks[0])
            found.count[name] = found.count.get(name, 0) + len(ranks)
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_parts(tensors: Mapping[str, Tensor]) -> None:
    """Assert that this rank's shard of each DTensor is the one that its placements describe.

    FSDP2 shards a dim again that an inner axis already shards. Where that axis doesn't divide the
    dim, the placements describe other shards than the ranks hold (torch 2.13: pytorch#161368,
    pytorch#168134), and saved offsets would be wrong.
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
    """Return a whole tensor on rank 0 and an empty one elsewhere; every rank calls it.

    Ranks that hold shards gather them. If rank 0 isn't among these ranks, the first of them sends
    the result to it.

    Args:
        t: shard of this rank, any shape; None if it holds none.
        entry: dtype and global shape.
        first: lowest rank that holds a shard.
        device: device on which rank 0 receives.
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
        if full.device.type != "cpu":  # otherwise whole tensors would accumulate on this device
            torch.accelerator.synchronize(full.device)
        return torch.empty(0)
    flat = torch.empty(entry.numel, dtype=entry.torch_dtype, device=device)
    dist.recv(flat, first)
    return flat.view(entry.shape)


@contextmanager
def _unwarned() -> Iterator[None]:
    """Silence DTensor's warning that a tensor sharded twice on one dim is gathered in two steps."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_saved(path: Path, manifest: Manifest, whole: Catalogue, prefix: str) -> None:
    """Check names, dtypes and global shapes against the saved ones (DCP would cast silently).

    Args:
        path: folder of the checkpoint.
        manifest: what it has.
        whole: tensors to load.
        prefix: start of the saved names that matter.

    Raises:
        CheckpointError: the checkpoint has other tensors.
    """
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    wanted = whole.entries
    found = [f"has no tensor {n}" for n in sorted(wanted.keys() - saved.keys())]
    found += [f"has a tensor {n} that this run lacks" for n in sorted(saved.keys() - wanted.keys())]
    found += [
        f"tensor {name} is {saved[name]}, this run needs {wanted[name]}"
        for name in sorted(saved.keys() & wanted.keys())
        if saved[name] != wanted[name]
    ]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise CheckpointError(
            f"{path}: {found[0]}{more}. Fix: resume with the model, optimizer and precision "
            "settings of the checkpoint, or use --checkpoint.resume never."
        )
