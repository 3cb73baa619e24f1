"""Copies of a run's state in the memory of two nodes (`checkpoint.mirror_every`).

    /dev/shm/megacpp-UID/KEY/step-000012-rank-00003-of-00008-DIGEST  what a rank holds (safetensors)

Each rank writes what it holds to its node's memory, and sends it to the rank of the same place on
the next node, which writes it too. Files there outlive the processes: when a rank is killed, or a
node is lost, the same ranks on the same mesh go on from the newest step of which every rank's piece
is found somewhere, with the hash that its name has. MEGACPP_MIRROR names another folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.schema import Config
from megacpp.state.agreement import gather, share, this_rank
from megacpp.state.behind import SaveThread, host_copies
from megacpp.state.files import PENDING
from megacpp.state.published import latest_checkpoint, step_of
from megacpp.state.rng import rng_state
from megacpp.torch_extras import is_dtensor

if TYPE_CHECKING:
    from megacpp.state.training import TrainingState

PIECE = re.compile(r"step-(\d{6,18})-rank-(\d{5})-of-(\d{5})-([0-9a-f]{32})", re.ASCII)
SENT_BYTES = 1 << 28  # of one message


class Mirror:
    """Mirror of one run; every rank makes it and calls its methods.

    Args:
        run: run folder, whose file `mirror.key` names the pieces of this run.
        layout: what decides which part of each tensor a rank holds.

    """

    def __init__(self, run: Path, layout: Mapping[str, Any]) -> None:
        self.rank, self.size = this_rank()
        self.layout = json.dumps(layout, sort_keys=True)
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size)))
        self.to, self.source = (self.rank + beside) % self.size, (self.rank - beside) % self.size
        memory = os.environ.get("MEGACPP_MIRROR", f"/dev/shm/megacpp-{os.getuid()}")
        self.folder = Path(memory) / _key(run)
        self.thread = SaveThread()

    def copy(self, state: TrainingState) -> None:
        """Copy the state after a step; the steps go on once it is in this process's memory."""
        self.thread.wait()
        step, group = state.step, self.thread.group
        copies = {n: _local(t).contiguous() for n, t in host_copies(state.tensors()).items()}
        extra = json.dumps(state.extra() | {"rng": rng_state()})
        metadata = {"state": extra, "layout": self.layout}
        self.thread.start(lambda: self._spread(step, copies, metadata, group))

    def newest(self, saved: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Load the newest whole mirror in place; return its `extra`, or None: nothing is changed.

        Args:
            saved: folder of checkpoints; only later steps than those count.
            tensors: this rank's tensors by name.
        """
        found = share(latest_checkpoint(saved), 0)
        after = step_of(found) if found else 0
        held = [_read_name(path) for path in self._files()]
        everyone = gather([piece for piece in held if piece and piece[2] == self.size])
        for step in sorted({step for names in everyone for step, *_ in names}, reverse=True):
            holders = [_holders(everyone, step, rank) for rank in range(self.size)]
            if step <= after or not all(holders):
                continue
            piece = self._collect(step, holders)
            state = self._fitting(piece, tensors)
            if all(gather(state is not None)):
                assert state is not None
                self._fill(piece, tensors)
                return state
        return None

    def drop(self) -> None:
        """Delete the pieces on this node: the state is saved, or given up."""
        self.thread.finish()
        gather(None)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another run has pieces there
            self.folder.parent.rmdir()

    # ---- writing --------------------------------------------------------------------------------

    def _spread(
        self,
        step: int,
        copies: dict[str, Tensor],
        metadata: dict[str, str],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write this rank's piece here and on the next node, then delete older ones."""
        import safetensors.torch

        piece = bytearray(safetensors.torch.save(copies, metadata))
        copies.clear()
        written = self._write(step, self.rank, piece)
        if self.to != self.rank:
            sizes = gather(len(piece), group)
            arriving = torch.empty(sizes[self.source], dtype=torch.uint8)
            _exchange(_as_tensor(piece), self.to, arriving, self.source, group)
            written = self._write(step, self.source, arriving.numpy().data) and written
        if all(gather(written, group)):
            for path in self._files():
                if (piece_of := _read_name(path)) and piece_of[0] != step:
                    path.unlink(missing_ok=True)
        elif self.rank == 0:
            print(f"warning: step {step} isn't mirrored: no room in {self.folder}", flush=True)

    def _write(self, step: int, rank: int, piece: bytearray | memoryview) -> bool:
        digest = hashlib.sha256(piece).hexdigest()[:32]
        final = self.folder / f"step-{step:06d}-rank-{rank:05d}-of-{self.size:05d}-{digest}"
        pending = final.with_name(final.name + PENDING)
        try:
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)  # weights: not for other users
            pending.write_bytes(piece)
            pending.replace(final)
        except OSError:
            pending.unlink(missing_ok=True)
            return False
        return True

    # ---- reading --------------------------------------------------------------------------------

    def _collect(self, step: int, holders: list[list[int]]) -> bytes:
        """Return this rank's piece from the first rank that has it whole; empty: none has.

        Args:
            step: of the pieces.
            holders: for each rank, those that see a file with the name of its piece.
        """
        own, group = self._read(step, self.rank), self.thread.group
        for rank, found in enumerate(gather(len(own))):
            for holder in () if found else holders[rank]:
                piece = self._read(step, rank) if self.rank == holder else b""
                if not (size := share(len(piece), holder)):  # its hash was wrong
                    continue
                if self.rank == holder:
                    _exchange(_as_tensor(bytearray(piece)), rank, None, rank, group)
                elif self.rank == rank:
                    arriving = torch.empty(size, dtype=torch.uint8)
                    _exchange(None, holder, arriving, holder, group)
                    own = arriving.numpy().tobytes()
                break
        return own

    def _read(self, step: int, rank: int) -> bytes:
        """Return a piece of this node whose hash is right, or nothing."""
        for path in self._files():
            named = _read_name(path)
            if named and named[:3] == (step, rank, self.size):
                piece = path.read_bytes()
                if hashlib.sha256(piece).hexdigest()[:32] == named[3]:
                    return piece
        return b""

    def _fitting(self, piece: bytes, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Return the `state` of a piece that has exactly these tensors, or None."""
        if not piece:
            return None
        header = json.loads(piece[8 : 8 + int.from_bytes(piece[:8], "little")])
        metadata = header.pop("__metadata__")
        shapes = {name: entry["shape"] for name, entry in header.items()}
        if metadata["layout"] != self.layout:
            return None
        wanted = {name: list(_local(t).shape) for name, t in tensors.items()}
        return json.loads(metadata["state"]) if shapes == wanted else None

    @torch.no_grad()
    def _fill(self, piece: bytes, tensors: Mapping[str, Tensor]) -> None:
        import safetensors.torch

        for name, t in safetensors.torch.load(piece).items():
            target = _local(tensors[name])
            assert target.dtype == t.dtype, f"{name}: {t.dtype} in the mirror"
            target.copy_(t)

    def _files(self) -> Iterator[Path]:
        return iter(sorted(self.folder.iterdir()) if self.folder.is_dir() else ())


def open_mirror(config: Config, run: Path) -> Mirror | None:
    """Return the mirror of a run, or None: it has none, or is a trial or a replay."""
    if config.saves and config.checkpoint.mirror_every:
        return Mirror(run, dataclasses.asdict(config.mesh))
    return None


def _key(run: Path) -> str:
    """Return the random key of a run folder, the same on every rank."""
    key = ""
    if this_rank()[0] == 0:
        path = run / "mirror.key"
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        key = path.read_text()
    return share(key, 0)


def _read_name(path: Path) -> tuple[int, int, int, str] | None:
    """Return step, rank, number of ranks and digest in the name of a piece."""
    if (match := PIECE.fullmatch(path.name)) is None:
        return None
    step, rank, size, digest = match.groups()
    return int(step), int(rank), int(size), digest


def _holders(everyone: list[list[tuple[int, int, int, str]]], step: int, rank: int) -> list[int]:
    """Return the ranks that see a rank's piece on their node, this rank itself first."""
    found = [at for at, names in enumerate(everyone) if any(n[:2] == (step, rank) for n in names)]
    return sorted(found, key=lambda at: (at != rank, at))


def _local(t: Tensor) -> Tensor:
    return (t.to_local() if is_dtensor(t) else t).detach()


def _as_tensor(piece: bytearray) -> Tensor:
    return torch.frombuffer(piece, dtype=torch.uint8)


def _exchange(
    sent: Tensor | None,
    to: int,
    arriving: Tensor | None,
    source: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Send bytes to a rank while others arrive, in messages of `SENT_BYTES`."""
    works = []
    for part in () if arriving is None else arriving.split(SENT_BYTES):
        works.append(dist.irecv(part, source, group))
    for part in () if sent is None else sent.split(SENT_BYTES):
        works.append(dist.isend(part, to, group))
    for work in works:
        assert work is not None
        work.wait()
