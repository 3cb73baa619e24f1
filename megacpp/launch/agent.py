"""Torchrun in this process, with this project's exit codes, for `megacpp train`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacpp.outcome import PEER_LOST, PREEMPTED, UNSAVED, end_when_told


def launch(words: Sequence[str], script: Path, flags: Sequence[str]) -> int:
    """Run `torchrun WORDS SCRIPT FLAGS` to its end; return the first failed rank's exit code.

    torchrun's log lines, traceback and table are suppressed: ranks print their own message, and a
    killed rank is named here. SIGTERM and SIGINT are passed to the ranks.
    """
    end_when_told()  # until torch starts the ranks and hears the signals itself
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # read at import: silences this process, whose store may close first at the end
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    from torch.distributed.run import parse_args, run

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    publish_each_store(DynamicRendezvousHandler)
    hear_once(api)
    with tempfile.TemporaryDirectory(prefix="megacpp-") as name:
        logs = Path(name)
        if not any(word.split("=")[0] == "--log-dir" for word in words):
            words = [*words, f"--log-dir={logs}"]
        else:
            logs = Path(next(w.partition("=")[2] for w in words if w.startswith("--log-dir=")))
        try:
            run(parse_args([*words, str(script), *flags]))
            return 0
        except ChildFailedError as error:
            ends = {rank: (f.exitcode, f.timestamp) for rank, f in error.failures.items()}
            said = [note for note in notes(logs) if note["errorCode"] != PEER_LOST]
            if not said and not any(printed(note) for note in notes(logs)):
                print(killed(ends), file=sys.stderr)
            return exit_code([code for code, _ in sorted(ends.values(), key=lambda end: end[1])])
        except api.SignalException as error:
            if codes := [note["errorCode"] for note in notes(logs)]:
                return exit_code(codes)
            if error.sigval not in (signal.SIGTERM, signal.SIGHUP):
                return 128 + error.sigval
            print(UNSAVED, file=sys.stderr)
            return PREEMPTED
        except RendezvousError as error:  # its store went with the launcher that served it
            codes = [note["errorCode"] for note in notes(logs)]
            if not codes:
                where = next((w for w in words if w.startswith("--rdzv-endpoint=")), "--standalone")
                fix = "Fix: start the command on that machine too, then on this one again."
                print(f"error: {where[2:]}: {type(error).__name__}: {error} {fix}", file=sys.stderr)
            return exit_code(codes)


def publish_each_store(handlers: Any) -> None:
    """Make an agent serve a new store for each start of the ranks, and publish its address.

    torch publishes the first one alone: an agent that joins a later start waits a minute for an
    address, and then all agents fail (pytorch/pytorch#135712).

    Args:
        handlers: torch's class of rendezvous handlers.
    """
    joined = handlers.next_rendezvous

    def next_rendezvous(handler: Any) -> Any:
        handler._bootstrap_store_info = None
        return joined(handler)

    handlers.next_rendezvous = next_rendezvous


def hear_once(processes: Any) -> None:
    """Ignore further SIGTERMs and SIGHUPs while ranks save: torch's second one would kill them.

    Args:
        processes: torch's module that handles the signals of an agent.
    """
    raised = processes._terminate_process_handler

    def first(signum: int, frame: Any) -> None:
        if signum in (signal.SIGTERM, signal.SIGHUP):
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        raised(signum, frame)

    processes._terminate_process_handler = first


def exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of the first rank that failed by itself, else 6."""
    return next((code for code in codes if code > 0 and code != PEER_LOST), PEER_LOST)


def notes(logs: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages that ranks of the last start left for their launcher (outcome.py)."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    for path in sorted(attempts[-1].glob("*/error.json")) if attempts else ():
        message = json.loads(path.read_text()).get("message")
        if isinstance(message, dict) and "errorCode" in message:
            yield message


def printed(note: dict[str, Any]) -> bool:
    """Return whether a rank that lost another one has named it."""
    return note["message"] != "lost another rank"


def killed(ends: dict[int, tuple[int, int]]) -> str:
    """Return the line for ranks that were killed before any other rank could report it."""
    # torch's watchdog of NCCL ends a rank by SIGABRT a minute after it lost another machine.
    first = min(ends, key=lambda rank: (ends[rank][0] == -signal.SIGABRT, ends[rank][1]))
    code, again = ends[first][0], "Fix: start the same command again."
    if code == PREEMPTED:
        return UNSAVED
    if code == PEER_LOST:
        return f"error: rank {first} lost a rank of another machine, which says why. {again}"
    if code == -signal.SIGABRT:
        why = "compiled code failed, or NCCL lost another machine (its lines are above)"
        return f"error: rank {first} ended by SIGABRT: {why}. {again}"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"error: rank {first} lost: {how} without a message. {again}"
