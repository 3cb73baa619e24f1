"""End of a failed run: one line for a person, an exit code for the launcher, no hang."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megacpp.config.arguments import Resolved, exit_on_error
from megacpp.config.checks.every import hang_limits
from megacpp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegacppError,
    PreemptedError,
    path_error,
)
from megacpp.outcome import PEER_LOST, note, write_status
from megacpp.run.hang import HangWatch
from megacpp.run.rank_store import RankStore
from megacpp.state.published import latest_checkpoint
from megacpp.state.remote import url_of
from megacpp.terminal.screen import INTERRUPTED, NOBODY_READS, end_on_interrupt, nobody_reads

DISK = 4  # the code of a checkpoint that can't be saved
REFUSED = (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code)
# Errors of a run folder that is full, was mounted read-only, or is gone.
OF_A_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTCONN, errno.EFBIG),
)
# Errors of an invalid path: a mistake in the command line.
WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
# Messages of gloo and NCCL on ranks that lost a peer, and of torch without its store.
OF_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "Application timeout caused pair closure",
)
TIMED_OUT = ("Timed out waiting", "wait timeout", "Watchdog caught collective operation timeout")
UPLOAD_S = 15.0  # for the last upload after SIGTERM: launchers give 30 s in all
PATIENCE_S = 2.0  # a rank that lost a peer waits for the peer's message
NEXT = "Fix: start the same command again, it goes on from the last checkpoint."


def guarded(main: Callable[[Resolved, RankStore], None], resolved: Resolved) -> None:
    """Run `main`; an error of any rank ends all of them, with one message.

    An exception that isn't a MegacppError is a bug: its first line is printed with the rank that
    raised it, and the traceback goes to `failures/rank-N.txt` in the run folder. Ranks that only
    lost that peer exit with code 6; torchrun ends ranks that still wait. A killed rank prints
    nothing: the first remaining rank names it. If memory ran out, a longer report is printed
    (oom.py). torchrun's table shows the message too (outcome.py).

    Args:
        main: the run.
        resolved: configuration of the run.
    """
    folder, peers = Path(resolved.config.run.dir), None
    first = os.environ.get("RANK", "0") == "0"
    try:
        end_on_interrupt(at_once=False)
        peers = RankStore()
        limits = hang_limits(resolved.config.run.timeout)
        with HangWatch(peers, limits, folder, partial(_hung, peers)):
            try:
                main(resolved, peers)
            finally:
                if peers.writer is not None:
                    peers.writer.finish()
        _uploaded(peers, resolved)
        sys.stdout.flush()
        steps, until = resolved.config.run.steps, resolved.config.run.until
        left = f"left after step {until} of {steps} (run.until), nothing was saved"
        _ended(peers, 0, left if until and until < steps else "all steps are done")
        if "WORLD_SIZE" in os.environ:
            _leave(0)  # process groups aren't destroyed: no work is left that could fail
    except PreemptedError as left:
        line = f"{left}: {what_is_saved(resolved)}"
        _uploaded(peers, resolved, UPLOAD_S)
        _ended(peers, left.exit_code, line)
        if first:
            print(line, file=sys.stderr)
        _leave(left.exit_code)
    except MegacppError as error:  # equal on every rank, except for a corrupt row
        _said(peers)
        own = isinstance(error, DataError) and "WORLD_SIZE" in os.environ and not error.agreed
        if first or own:
            _ended(peers, error.exit_code, str(error))
        exit_on_error(error, own=own)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # told twice is told once from here on
        line = f"stopped: {what_is_saved(resolved)}"
        _ended(peers, INTERRUPTED, line)
        if first:  # an interrupt reaches every rank
            print(f"\n{line}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:  # gloo raises RuntimeError instead
        if not nobody_reads(error):
            raise
        line = f"stopped, the output is closed: {what_is_saved(resolved)}"
        _ended(peers, NOBODY_READS, line)
        _said(peers)
        print(line, file=sys.stderr, flush=True)
        _leave(NOBODY_READS)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in WRONG_PATH:
            _said(peers)
            wrong = path_error(error)
            _ended(peers, wrong.exit_code, str(wrong))
            exit_on_error(wrong)
        _leave(report(error, folder, peers))


def what_is_saved(resolved: Resolved) -> str:
    """Return a phrase that names the checkpoint from which a stopped run would resume."""
    saved = latest_checkpoint(Path(resolved.config.run.dir) / "checkpoints")
    if saved is None:
        return "nothing was saved yet (--checkpoint.every)"
    same = resolved.config.checkpoint.resume == "auto"
    return (
        f"the same command{'' if same else ' with --checkpoint.resume auto'} goes on from {saved}"
    )


def report(error: Exception, folder: Path, peers: RankStore | None = None) -> int:
    """Write the traceback, print one line unless another rank has to, and return the exit code.

    Args:
        error: exception of this rank.
        folder: folder of the run.
        peers: store of all ranks; None before they have met.
    """
    rank = os.environ.get("RANK", "0")
    if isinstance(error, OSError) and _of_the_folder(error, folder):
        _said(peers)
        return _failed(
            peers,
            DISK,
            f"rank {rank}: run.dir={folder}: {os.strerror(error.errno or 0).lower()}. "
            "Fix: free disk space, make the folder writable or choose another --run.dir; the same "
            "command goes on.",
        )
    path = folder / "failures" / f"rank-{rank}.txt"
    late = any(words in str(error) for words in TIMED_OUT)
    lost = late or is_peer_failure(error)
    try:
        # A run folder that was there and is gone isn't made anew.
        path.parent.mkdir(parents=peers is None or peers.home is None, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        if not lost:
            traceback.print_exception(error)  # the folder isn't writable: print it instead
    from megacpp.run.oom import forensics_of, out_of_memory, show_once  # imports the planner

    with contextlib.suppress(Exception):  # the first error must be reported
        if (forensics := forensics_of(error)) is not None and folder.exists():
            forensics.at_error()
    if lost:
        return _alone(peers, path, late)
    _said(peers)
    if out_of_memory(error):
        path = show_once(error, folder)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return _failed(peers, 1, f"rank {rank}: {type(error).__name__}: {first} ({path})")


def _of_the_folder(error: OSError, folder: Path) -> bool:
    """Return whether an error is one of the run folder's disk; of a path, one inside the folder."""
    if error.errno not in OF_A_DISK:
        return False
    if not isinstance(error.filename, str | bytes | os.PathLike):  # a write to an open file
        return error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM)
    path = os.path.abspath(os.fsdecode(error.filename))
    return os.path.commonpath([path, os.path.abspath(folder)]) == os.path.abspath(folder)


def is_peer_failure(error: Exception) -> bool:
    """Return whether a collective failed because another rank had ended."""
    return any(words in str(error) for words in OF_A_PEER)


def _alone(peers: RankStore | None, path: Path, late: bool) -> int:
    """Wait for the failed rank to report; if none does, one rank names the ranks that are gone."""
    with contextlib.suppress(Exception):  # the store may be lost too
        if peers is not None:
            peers.tell(f"left/{peers.rank}", True)
            peers.tell(f"heard/{peers.table[peers.rank].node}", True)
    time.sleep(PATIENCE_S)
    gone, speaks = _missing(peers, late)
    if not speaks:
        note(PEER_LOST, "lost another rank")
        _free(peers)
    elif gone:
        ranks = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        _failed(peers, PEER_LOST, f"{ranks} lost: ended without a message (killed?). {NEXT}")
    elif late:
        _failed(peers, PEER_LOST, f"waited in vain for other ranks, none of which is gone ({path})")
    else:
        _failed(peers, PEER_LOST, f"lost the connection to another rank ({path}). {NEXT}")
    return PEER_LOST


def _missing(peers: RankStore | None, late: bool) -> tuple[list[int], bool]:
    """Return the ranks that are gone, and whether this rank reports them.

    Gone are killed ranks of this node, or else all ranks of silent nodes. On each node the first
    remaining rank may report, and of all nodes the first one does.
    """
    if peers is None or peers.size == 1:
        return [], late
    own = peers.table[peers.rank].node
    beside = [rank for rank, process in enumerate(peers.table) if process.node == own]
    try:
        gone = [r for r in beside if not peers.told(f"left/{r}") and not peers.table[r].alive()]
        if peers.rank != next(rank for rank in beside if rank not in gone) or peers.said():
            return gone, False
        if not gone:  # a rank of another node failed, or a whole node
            time.sleep(PATIENCE_S)
            silent = {p.node for p in peers.table if not peers.told(f"heard/{p.node}")}
            gone = [rank for rank, process in enumerate(peers.table) if process.node in silent]
        return gone, peers.say()
    except Exception:  # the process that served the store has ended
        gone = [r for r in beside if not peers.table[r].alive()]
        return gone, peers.rank == next(rank for rank in beside if rank not in gone)


def _ended(peers: RankStore | None, code: int, line: str) -> None:
    """Write how the run ended for the launcher and in status.json, and free the run folder.

    A start that is refused before it resumes a finished run leaves that run's status.
    """
    note(code, line)
    if peers is None or peers.home is None:
        return  # refused before the folder was this start's
    if peers.finished and code in REFUSED:
        write_status(peers.home, **peers.finished)
    elif peers.rank == 0 or code not in (0, PreemptedError.exit_code, INTERRUPTED):
        write_status(peers.home, code, line, rank=peers.rank)
    if peers.rank == 0 and code == 0:
        for stale in (peers.home / "failures").glob("*rank-*.txt"):  # of a start before this one
            stale.unlink(missing_ok=True)
    _free(peers)


def _uploaded(peers: RankStore | None, resolved: Resolved, within_s: float = math.inf) -> None:
    """Wait for the last upload of rank 0; a launcher would end it if another rank left before."""
    if peers is None or peers.writer is None or not url_of(resolved.config):
        return
    if peers.writer.uploads is not None:
        peers.writer.uploads.finish(Path(resolved.config.run.dir), within_s)
        peers.tell("uploaded", True)
    else:
        with contextlib.suppress(Exception):  # the process that served the store has ended
            peers.hear("uploaded")


def _free(peers: RankStore | None) -> None:
    """Free the run folder; the first rank of a start that has it does."""
    if peers is not None and peers.lock is not None:
        peers.lock.release()


def _said(peers: RankStore | None) -> None:
    """Tell ranks that will miss this one that it prints a message."""
    with contextlib.suppress(Exception):
        if peers is not None:
            peers.say()


def _hung(peers: RankStore, line: str) -> None:
    _failed(peers, PEER_LOST, f"{line}. {NEXT}")


def _failed(peers: RankStore | None, code: int, line: str) -> int:
    _ended(peers, code, line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


def _leave(code: int) -> None:
    """End the process at once: the shutdown of a process group may wait for its peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
