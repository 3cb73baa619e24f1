"""However a run ends early: one line for a person, an exit code for the launcher, no hang."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megacpp.arguments import Resolved, exit_on_error
from megacpp.errors import DataError, MegacppError, PreemptedError
from megacpp.run.oom import out_of_memory, show_once
from megacpp.state.checkpoint import latest_checkpoint

PEER_LOST = 6
DISK_FULL = 4  # the code of a checkpoint that can't be saved
INTERRUPTED = 130  # what a shell says of Ctrl-C
# What gloo and NCCL say on the ranks that did nothing wrong.
OF_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")
PATIENCE_S = 2.0  # of a rank that lost a peer, for the peer to say why


def guarded(main: Callable[[Resolved], None], resolved: Resolved) -> None:
    """Runs `main`; an error of any rank ends all of them, with one message.

    An exception that is no message of ours is a bug: its first line is printed with the rank that
    raised it, and the traceback goes to `failures/rank-N.txt` in the run folder. Ranks that only
    lost that peer stay silent and leave with code 6; torchrun ends those that still wait. Of memory
    that ran out a screen tells more (oom.py).
    """
    folder = Path(resolved.config.run.dir)
    try:
        main(resolved)
        if "WORLD_SIZE" in os.environ:
            _leave(0)  # meshes keep their groups; nothing is left to do that could fail
    except PreemptedError as left:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{left}: {what_is_saved(resolved)}", file=sys.stderr)
        _leave(left.exit_code)
    except MegacppError as error:  # every rank has the same one, unless it read a bad row
        exit_on_error(error, own=isinstance(error, DataError) and "WORLD_SIZE" in os.environ)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # an interrupt reaches every rank
            print(f"\nstopped: {what_is_saved(resolved)}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        _leave(report(error, folder))


def what_is_saved(resolved: Resolved) -> str:
    """From where a run that was stopped would go on."""
    saved = latest_checkpoint(Path(resolved.config.run.dir) / "checkpoints")
    if saved is None:
        return "nothing was saved yet (--checkpoint.every)"
    same = resolved.config.checkpoint.resume == "auto"
    return (
        f"the same command{'' if same else ' with --checkpoint.resume auto'} goes on from {saved}"
    )


def report(error: Exception, folder: Path) -> int:
    """Writes the traceback, prints one line unless a peer has to, and returns the exit code."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print(
            f"error: rank {rank}: run.dir={folder}: {os.strerror(error.errno).lower()}. "
            "Fix: free disk space or choose another --run.dir.",
            file=sys.stderr,
        )
        return DISK_FULL
    path = folder / "failures" / f"rank-{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        traceback.print_exception(error)  # better here than nowhere
    if lost_a_peer(error):
        time.sleep(PATIENCE_S)
        return PEER_LOST
    if any(words in str(error) for words in TIMED_OUT):  # all ranks wait for each other
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"error: rank {rank}: waited in vain for other ranks ({path})",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(PATIENCE_S)
        return PEER_LOST
    if out_of_memory(error):
        path = show_once(error, folder)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    print(f"error: rank {rank}: {type(error).__name__}: {first} ({path})", file=sys.stderr)
    return 1


def lost_a_peer(error: Exception) -> bool:
    """Another rank ended, and this one noticed in a collective."""
    return any(words in str(error) for words in OF_A_PEER)


def _leave(code: int) -> None:
    """Ends the process at once: the shutdown of a process group may wait for its peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
