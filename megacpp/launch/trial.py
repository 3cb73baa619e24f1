"""Trial of a candidate: four steps in new processes on the ranks of the run.

Every rank starts `train.py` again beside itself, with the candidate's mesh and a rendezvous of its
own. A new process is needed, because nothing less recovers from running out of memory: a failed
rank may leave collectives unfinished and the allocator fragmented, or be killed. A fork isn't
enough, because neither a CUDA driver nor threads survive one. The waiting ranks communicate through
the launcher's store: rank 0 names the command and collects the results; one failed child ends all
of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from megacpp.config.arguments import flatten, parse_run, replace_keys
from megacpp.config.schema import Config
from megacpp.launch.command import command_words
from megacpp.launch.fit import STEPS, Outcome, outcome_of
from megacpp.outcome import PEER_LOST, end_with
from megacpp.run.oom import NO_MEMORY
from megacpp.run.rank_store import POLL_S, RankStore

LINE = 400  # characters of a message
GRACE_S = 10.0  # time for children to detect a lost peer
KILLED = -signal.SIGKILL  # exit code after the kernel's out-of-memory killer
SAID = (*NO_MEMORY, "OutOfMemoryError:", "MemoryError:", "std::bad_alloc")
# Settings in which a trial differs from the run: its results are discarded.
SETTINGS: dict[str, Any] = {
    "run.steps": STEPS,
    "run.eval_every": 0,
    "run.tasks": "",
    "run.tasks_every": 0,
    "run.log_every": 1,
    "run.sample_tokens": 0,
    "run.tensorboard": False,
    "run.wandb": "",
    "run.profile": "",
    "train.batch_warmup_steps": 0,
    "optim.warmup_steps": 0,
    "optim.warmup_ratio": 0.0,
    "checkpoint.every": 0,
    "memory.fit": "smoke",
    "memory.gate": "off",
    "memory.snapshot_every": 0,
}


@dataclass(frozen=True)
class TrialCommand:
    """Command that all ranks start: `train.py` with these arguments.

    Attributes:
        number: index of the command; an attempt may need several.
        arguments: arguments of train.py.
        folder: folder of the attempt, the same path on every machine.
        address, port: rendezvous of the trial's process group.
    """

    number: int
    arguments: tuple[str, ...]
    folder: str
    address: str
    port: int


def trial_command(number: int, config: Config, size: int, folder: Path) -> TrialCommand:
    """Return the command for four steps of a resolved configuration.

    The arguments are parsed again and compared: the trial runs exactly the scored configuration.

    Args:
        number: index of the command.
        config: resolved configuration.
        size: number of ranks.
        folder: folder of the attempt.
    """
    smoke = replace_keys(config, {**SETTINGS, "run.dir": str(folder)})
    arguments = command_words(config.preset, flatten(smoke))
    assert parse_run(arguments, size).config == smoke, "flags that don't say the configuration"
    return TrialCommand(number, tuple(arguments), str(folder), *_meeting_point())


def run_trial(order: TrialCommand, peers: RankStore) -> Outcome | None:
    """Run a command on all ranks; return the outcome on rank 0, None elsewhere."""
    folder, began = Path(order.folder), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"log-{peers.rank}.txt").open("w") as log:
        child = spawn(order.arguments, _environment(order, peers), log)
        try:
            code, ended = _until_over(child, f"{order.number}/failed", peers)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    end = {"code": code, "ended": ended, "said": _last_words(folder, peers.rank)}
    ends = peers.gather(f"{order.number}/end", end)
    if peers.rank:
        return None
    outcome = replace(_outcome(ends, folder), wall_s=time.perf_counter() - began)
    if outcome.kind == "ok":
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def port_conflict(outcome: Outcome) -> bool:
    """Return whether another process took the port before the trial bound it."""
    return outcome.kind == "failed" and "EADDRINUSE" in outcome.detail


def spawn(
    arguments: Sequence[str], environment: Mapping[str, str], log: IO[str]
) -> subprocess.Popen[bytes]:
    """Start the current script in a new interpreter that ends with this process."""
    return subprocess.Popen(
        [sys.executable, sys.argv[0], *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=partial(end_with, os.getpid()),  # a launcher doesn't know of it
    )


def _until_over(child: subprocess.Popen[bytes], failed: str, peers: RankStore) -> tuple[int, bool]:
    """Return the child's exit code, and whether it was killed because another failed."""
    deadline: float | None = None
    while (code := child.poll()) is None:
        if deadline is None and peers.told(failed):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            child.kill()
            return child.wait(), True
        time.sleep(POLL_S)
    if code:
        peers.tell(failed, peers.rank)
    return code, False


def _environment(order: TrialCommand, peers: RankStore) -> dict[str, str]:
    """Return this rank's environment with the rendezvous of the trial."""
    if peers.size == 1:
        return dict(os.environ)
    where = {"MASTER_ADDR": order.address, "MASTER_PORT": str(order.port)}
    # Its rank 0 opens the store; torchrun's is for the run itself.
    return {**os.environ, **where, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _outcome(ends: Sequence[Mapping[str, Any]], folder: Path) -> Outcome:
    """Combine all ranks' results: out of memory explains every other failure."""
    for rank, end in enumerate(ends):
        if out_of_memory(end):
            return Outcome("oom", f"rank {rank}: {end['said'] or 'killed'}", code=end["code"])
    bad = [(rank, end) for rank, end in enumerate(ends) if end["code"] and not end["ended"]]
    if bad:  # the failed peer's message is preferred to that of ranks that lost it
        rank, end = min(bad, key=lambda one: (one[1]["code"] == PEER_LOST, one[0]))
        said = f"rank {rank}: {end['said'] or 'no message'} ({folder}/log-{rank}.txt)"
        kind = "unsound" if end["code"] == 5 else "failed"
        return Outcome(kind, said, code=max(end["code"], 1))
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return outcome_of([json.loads(row) for row in rows])


def out_of_memory(end: Mapping[str, Any]) -> bool:
    """Return whether a rank ended for lack of memory, by its message or its signal."""
    if end["ended"] or not end["code"]:
        return False
    return end["code"] == KILLED or any(word in end["said"] for word in SAID)


def _last_words(folder: Path, rank: int) -> str:
    """Return the message of a failed rank: its exception, else the end of its output."""
    own, log = folder / "failures" / f"rank-{rank}.txt", folder / f"log-{rank}.txt"
    with contextlib.suppress(OSError):
        lines = own.read_text(errors="replace").splitlines()
        frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
        message = lines[frames[-1] + 1 :] if frames else lines
        return " ".join(" ".join(message).split())[:LINE]
    with contextlib.suppress(OSError):
        lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()][-50:]
        for telling in (SAID, ("error: ",), ("",)):
            found = [line for line in lines if any(word in line for word in telling)]
            if found:
                return found[-1][:LINE]
    return ""


def _meeting_point() -> tuple[str, int]:
    """Return an address that all ranks know, with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return os.environ.get("MASTER_ADDR", "localhost"), probe.getsockname()[1]
