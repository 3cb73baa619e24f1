"""Digests of bits: copies of one tensor on several ranks are compared, and recorded for replays.

    RUN/digests.jsonl    {"step": 99, "digest": "8c1f...", "s": 0.012}

A digest is the sum of a tensor's 64-bit words, each times an odd number of its place, modulo 2**64.
One flipped bit changes it by a power of two times an odd number, so it is always seen; of other
changes one in 2**64 isn't.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.state.agreement import gather, is_distributed, this_rank
from megacpp.state.files import rows_by_step
from megacpp.torch_extras import is_dtensor

FILE = "digests.jsonl"
ROW = 1 << 16  # words that are multiplied at once
LEAST = -(2**63)
SHORT = 8  # bytes of a hash


class Digests:
    """Digests of a run's state every `run.digest_every` steps and before each save.

    Which ranks hold copies of the same part of a tensor is found once. All parts that the same
    ranks hold make one number, so the one all-reduce has two words for each such set of ranks, and
    a word of each rank.

    Args:
        folder: folder of the run.
        tensors: returns this rank's tensors by name: plain ones, equal on every rank that has them,
            or DTensors.
        config: steps between two comparisons, and between saves: none saves unequal copies.
        device: device of the collectives.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Callable[[], Mapping[str, Tensor]],
        config: Config,
        device: torch.device,
    ) -> None:
        self.folder, self.tensors, self.config, self.device = folder, tensors, config, device
        self._sets: dict[str, int] = {}  # number of the set of ranks that holds a tensor's part
        self._number = -1

    def difference(self, step: int) -> str:
        """Return which copies differ after a step; empty: none, or it isn't time to look.

        Every rank calls it and gets the same text.
        """
        steps, every = self.config.run.steps, self.config.run.digest_every
        times = [n for n in (every, self.config.checkpoint.every, steps) if n]
        if not every or all((step + 1) % n for n in times):
            return ""
        began, tensors = time.perf_counter(), dict(self.tensors())
        if self._number < 0:
            self._find_copies(tensors)
        names = list(tensors)
        digests = digests_on(self.device, tensors.values())
        marks = torch.tensor([_mark(name) for name in names], device=self.device)
        mixed, total = digests * marks, (digests * marks).sum()
        rank, size = this_rank()
        words = torch.full((2 * self._number + size,), LEAST, device=self.device)
        for own in sorted(set(self._sets.values())):
            held = [n for n, name in enumerate(names) if self._sets.get(name) == own]
            word = mixed[held].sum()
            words[2 * own], words[2 * own + 1] = word, ~word
        words[rank - size] = total
        if is_distributed():
            dist.all_reduce(words, dist.ReduceOp.MAX)
        copies, totals = words.split([2 * self._number, size])
        if bool((copies[::2] != ~copies[1::2]).any()):
            return self._named(dict(zip(names, digests.tolist(), strict=True)))
        if rank == 0:
            line = {"step": step, "digest": f"{int(totals.sum()) % 2**64:016x}"}
            with (self.folder / FILE).open("a") as file:
                file.write(json.dumps(line | {"s": time.perf_counter() - began}) + "\n")
        return ""

    def _find_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """Find the sets of ranks that hold the same part of a tensor, and number them."""
        holders: dict[bytes, list[int]] = {}
        self._places = {name: f"{name} {_offsets(t)}" for name, t in tensors.items()}
        short = {name: _short(place) for name, place in self._places.items()}
        for rank, places in enumerate(gather(b"".join(short.values()))):  # 24 MB of 1,024 ranks
            for at in range(0, len(places), SHORT):
                holders.setdefault(places[at : at + SHORT], []).append(rank)
        sets = dict.fromkeys(tuple(ranks) for ranks in holders.values() if len(ranks) > 1)
        number = {ranks: n for n, ranks in enumerate(sets)}
        found = {name: tuple(holders[place]) for name, place in short.items()}
        self._sets = {name: number[ranks] for name, ranks in found.items() if ranks in number}
        self._number = len(number)

    def _named(self, own: Mapping[str, int]) -> str:
        """Return the first tensor whose copies differ, with the ranks that have the rarer bits."""
        mine = {self._places[name]: own[name] for name in self._sets}
        found, first = gather(mine), []
        for place in dict.fromkeys(place for of_rank in found for place in of_rank):
            bits = {rank: held[place] for rank, held in enumerate(found) if place in held}
            if len(set(bits.values())) > 1:
                first.append((place.partition(" ")[0], bits))
        name, bits = first[0]
        (common, most), *_ = Counter(bits.values()).most_common()
        odd = [rank for rank, one in bits.items() if one != common]
        more = f" (and {len(first) - 1} further tensors)" if len(first) > 1 else ""
        if 2 * most > len(bits):
            ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
            return f"{name} on {ranks} differs from its copies{more}"
        ranks = " and ".join(map(str, (min(set(bits) - set(odd)), odd[0])))
        return f"{name} differs between ranks {ranks}{more}"


@torch.no_grad()
def digests_on(device: torch.device, tensors: Iterable[Tensor]) -> Tensor:
    """Return the digests of tensors of any shape, `[n]` int64 on a device.

    Some may be in host memory: moments of AdamW in few bits.
    """
    return torch.stack([digest(t).to(device) for t in tensors])


def digest(t: Tensor) -> Tensor:
    """Return the digest of a tensor's bits, or of this rank's shard: 0-d int64.

    Args:
        t: any shape and dtype.
    """
    local = (t.to_local() if is_dtensor(t) else t).detach().contiguous()
    raw = (
        local.view(-1).view(torch.uint8) if local.numel() else local.new_zeros(8).view(torch.uint8)
    )
    if spare := -len(raw) % 8:
        raw = torch.cat([raw, raw.new_zeros(spare)])
    words, found = raw.view(torch.int64), torch.zeros((), dtype=torch.int64, device=raw.device)
    odd = torch.arange(1, 2 * min(ROW, len(words)), 2, device=raw.device) * 0x1E3779B97F4A7C15
    for number, row in enumerate(words.split(ROW)):
        found += (row * odd[: len(row)]).sum() * (2 * number + 1)
    return found


def recorded(folder: Path) -> dict[int, str]:
    """Return the recorded digests of a run by step; the last one where a step was made again."""
    rows = rows_by_step(folder / FILE)
    return {step: str(row["digest"]) for step, row in rows.items() if "digest" in row}


def _offsets(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's shard in the whole tensor."""
    if not is_dtensor(t):
        return tuple(t.shape), (0,) * t.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, at = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return tuple(shape), tuple(at)


def _short(place: str) -> bytes:
    return hashlib.blake2b(place.encode(), digest_size=SHORT).digest()


def _mark(name: str) -> int:
    """Return an odd number of a name, the same in every process."""
    return (zlib.crc32(name.encode()) << 1 | 1) * 0x1E3779B9 % 2**62 | 1
