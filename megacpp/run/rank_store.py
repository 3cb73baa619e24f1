"""Agreement of ranks before their process group exists, through the store of their launcher.

torchrun's store outlives a restart of the ranks, with every key of the earlier start. A start
therefore begins with a handshake that no old key can answer, and all its keys share a new prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megacpp.errors import MegacppError
from megacpp.outcome import started_ticks, this_node
from megacpp.run.lock import RunLock

if TYPE_CHECKING:
    from megacpp.run.goodput import Goodput
    from megacpp.state.behind import SaveThread

POLL_S = 0.1
TIMEOUT = timedelta(minutes=10)  # wait for the slowest rank to begin
LONG = timedelta(days=1)  # wait for it later; `run.timeout` ends a hang (megacpp/run/hang.py)


@dataclass(frozen=True)
class Process:
    """Process of a rank, for the other ranks.

    Attributes:
        node: machine and process namespace; within one node a pid tells whether it is alive.
        host: name of the machine.
        pid: process id.
        restarts: number of times that its launcher has restarted ranks.
    """

    node: str
    host: str
    pid: int
    restarts: int

    def alive(self) -> bool:
        """Return whether this process, on this node, still runs (a zombie doesn't)."""
        return started_ticks(self.pid) is not None


def this_process() -> Process:
    """Return this rank's process, for the table of all ranks."""
    node, host = this_node()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Process(node, host, os.getpid(), restarts)


class RankStore:
    """Key-value store of all ranks of this start, before and beside their process group.

    Attributes:
        rank: this rank.
        size: number of ranks.
        store: store for keys of this start alone; the process group uses it too.
        table: every rank's process, in rank order.
        home: run folder of this start; None until it is locked.
        lock: its lock, on rank 0.
        finished: on rank 0, the status of a run that ended well there, until this start resumes.
        waits: what this rank waits for in the store; empty: nothing.
        meetings: number of such waits so far.
        clock: phase and step of this rank; None before the run has them.
        writer: asynchronous save in flight; None before the run has one.
    """

    waits, meetings = "", 0
    finished: Mapping[str, Any] | None = None
    clock: Goodput | None = None
    writer: SaveThread | None = None

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.store: dist.Store = dist.HashStore()
        self.table = [this_process()]
        self.home: Path | None = None
        self.lock: RunLock | None = None
        if self.size > 1:
            # The rank that serves the store without torchrun must keep this object: it does.
            self._base, _, _ = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
            name, table = _handshake(self._base, self.rank, self.size)
            self.store = dist.PrefixStore(name, self._base)
            self.table = [Process(**row) for row in table]

    @property
    def restarted(self) -> bool:
        """Whether a launcher has restarted ranks of this run (torchrun --max-restarts)."""
        return any(process.restarts for process in self.table)

    @property
    def nodes(self) -> int:
        """Number of machines, as the launcher counts them."""
        return self.size // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size))))

    def tell(self, key: str, value: Any) -> None:
        """Store a JSON value under a key."""
        self.store.set(key, json.dumps(value))

    def told(self, key: str) -> bool:
        """Return whether a rank has stored the key."""
        return self.store.check([key])

    def hear(self, key: str) -> Any:
        """Return the value of a key; wait until it is stored, without a timeout."""
        while not self.told(key):
            time.sleep(POLL_S)
        return json.loads(self.store.get(key))

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on rank 0; an empty list elsewhere."""
        self.tell(f"{key}/{self.rank}", value)
        if self.rank:
            return []
        return [self.hear(f"{key}/{rank}") for rank in range(self.size)]

    def say(self) -> bool:
        """Claim the report of the run's end; return whether this rank is the first to claim it."""
        return self.store.add("said", 1) == 1

    def said(self) -> bool:
        """Return whether a rank has claimed the report of the run's end."""
        return self.store.add("said", 0) > 0

    @contextlib.contextmanager
    def agree(self, key: str) -> Iterator[None]:
        """Run a block on every rank; an error of any rank ends all of them, with one message.

        Raises:
            MegacppError: the error of the first rank that had one, with its exit code.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
            if self.store.add(f"{key}/errors", 1) == 1:
                self.tell(f"{key}/error", self._words(error))
        if self.store.add(f"{key}/count", 1) == self.size:
            self.tell(f"{key}/all", True)
        self.waits, self.meetings = key, self.meetings + 1
        self.store.wait([f"{key}/all"], LONG)
        self.waits = ""
        if mine is not None and not isinstance(mine, MegacppError):
            raise mine  # a bug: its own rank prints it
        if self.store.add(f"{key}/errors", 0):
            said = self.hear(f"{key}/error")
            error = mine if self.size == 1 and mine else MegacppError(said["said"])
            error.exit_code, error.agreed = said["code"], True
            raise error

    def _words(self, error: Exception) -> dict[str, Any]:
        """Return an error for all ranks; with several nodes it names its rank and host."""
        where = f"rank {self.rank} on {self.table[self.rank].host}: " if self.nodes > 1 else ""
        return {"said": f"{where}{error}", "code": getattr(error, "exit_code", 1)}


def _handshake(store: dist.Store, rank: int, size: int) -> tuple[str, list[dict[str, Any]]]:
    """Return a prefix that only ranks of this start know, and the table of processes.

    Rank 0 offers a fresh name, every rank answers under it with a fresh word of its own, and rank 0
    confirms each word: an answer or a confirmation from an earlier start fits neither.
    """
    own = {"word": uuid.uuid4().hex, "process": asdict(this_process())}
    if rank == 0:
        name, rows = own["word"], [own["process"]]
        store.set("start", name)
        words = []
        for other in range(1, size):
            answer = json.loads(store.get(f"{name}/answer/{other}"))
            rows.append(answer["process"])
            words.append(answer["word"])
        table = json.dumps(rows)
        for word in words:
            store.set(f"{name}/confirmed/{word}", table)
        return name, rows
    answered, deadline = "", time.monotonic() + TIMEOUT.total_seconds()
    while True:
        name = store.get("start").decode()
        if name != answered:
            store.set(f"{name}/answer/{rank}", json.dumps(own))
            answered = name
        if store.check([key := f"{name}/confirmed/{own['word']}"]):
            return name, json.loads(store.get(key))
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"wait timeout: rank 0 didn't answer rank {rank}")
        time.sleep(POLL_S / 5)
