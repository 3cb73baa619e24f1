"""Run folder and corpus: checks that all nodes see the same ones before the first step."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from megacpp.config.mix import data_setting
from megacpp.config.schema import Config
from megacpp.errors import DataError, config_error
from megacpp.outcome import STATUS, write_status
from megacpp.run.lock import FILE, LEASE_S, take
from megacpp.run.rank_store import RankStore
from megacpp.state.files import read_parsed
from megacpp.state.published import STEP, published, step_of
from megacpp.state.remote import fetch_newer, url_of

PATIENCE_S = 5.0  # wait for a network file system to show another node's file


def open_folder(peers: RankStore, config: Config, fingerprint: str) -> None:
    """Create and lock the run folder on rank 0; check that all ranks see it, and the same corpus.

    With `checkpoint.resume never` an existing folder is renamed first, unless the launcher only
    restarted the ranks of this run.

    Args:
        peers: store of all ranks.
        config: configuration of the run.
        fingerprint: fingerprint of this rank's corpus.

    Raises:
        ConfigError: (as MegacppError with its code) the folder can't be created, isn't shared, or
            another start is using it.
        DataError: (likewise) the corpus differs from rank 0's.
    """
    folder = Path(config.run.dir)
    token = folder / f".{peers.table[0].pid}-{peers.table[0].host}.start"
    try:
        with peers.agree("folder"):
            if peers.rank == 0:
                _check_replay(config)
                _claim(peers, config, token)
                peers.tell("corpus", fingerprint)
        with peers.agree("seen"):
            _compare(peers, config, fingerprint, token)
    except BaseException:
        if peers.lock is not None:
            peers.lock.release(refused=True)
        raise
    finally:
        if peers.rank == 0:
            with contextlib.suppress(OSError):
                token.unlink()
    peers.home = folder
    if peers.lock is not None:
        before = read_parsed(folder / STATUS)
        peers.finished = before if before.get("code") == 0 else None
        write_status(folder, followed_a_kill=peers.lock.followed)


def _check_replay(config: Config) -> None:
    """Raise ConfigError for a replay of steps in the folder of a run that has gone on since."""
    folder, source = Path(config.run.dir), Path(config.checkpoint.resume)
    newest = max(map(step_of, published(folder / "checkpoints")), default=0)
    if config.run.until and STEP.fullmatch(source.name) and step_of(source) < newest:
        rule = f"{folder} has step {newest}, a later one than {source}, and would lose its records"
        raise config_error("run.until", config.run.until, rule, "use another --run.dir")


def _claim(peers: RankStore, config: Config, token: Path) -> None:
    """Lock the run folder and put the token there; move an earlier run aside if it is asked for."""
    folder = Path(config.run.dir)
    anew = config.checkpoint.resume == "never" and not peers.restarted
    wait_s = LEASE_S if peers.restarted else 0.0  # a rank of the start before may still be leaving
    try:
        if anew and folder.exists():
            peers.lock = take(folder, config.run.force)
            peers.lock.path = _set_aside(folder) / FILE  # held until then: no start writes into it
            peers.lock.release()
        peers.lock = take(folder, config.run.force, wait_s)
        token.touch()
        if url_of(config) and start_point(peers, config) == "auto":
            fetch_newer(config)
        if config.run.monitor:
            from megacpp.run.monitor import serve  # a server, which few runs have

            serve(config.run.monitor, folder)
    except OSError as error:
        reason = f"is not usable ({error.strerror})"
        raise config_error("run.dir", folder, reason, "choose a folder you may write") from None


def _compare(peers: RankStore, config: Config, fingerprint: str, token: Path) -> None:
    """Compare folder and corpus with rank 0's."""
    if (other := peers.hear("corpus")) != fingerprint:
        raise DataError(
            f"{data_setting(config.data)}: this node's corpus [{fingerprint}] isn't rank 0's "
            f"[{other}]. Fix: copy one corpus to all nodes, or use a shared file system."
        )
    if not _seen(token):
        raise config_error(
            "run.dir",
            config.run.dir,
            "isn't the folder that rank 0 made; checkpoints are written by all nodes",
            "choose a --run.dir on a file system that all nodes share",
        )


def _set_aside(folder: Path) -> Path:
    """Rename an existing run folder, so that no run mixes with it; return its new path."""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(old)
    print(f"moved the earlier run to {old}")
    return old


def _seen(token: Path) -> bool:
    """Return whether another node's file is visible; listing refreshes network caches."""
    deadline = time.monotonic() + PATIENCE_S
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(token.parent.parent)
            os.listdir(token.parent)
        time.sleep(0.1)
    return True


def start_point(peers: RankStore, config: Config) -> str:
    """Return `checkpoint.resume` of this start: restarted ranks resume from their own run."""
    own = Path(config.run.dir) / "checkpoints" / "latest"
    resume = config.checkpoint.resume
    return "auto" if peers.restarted and (resume == "never" or own.exists()) else resume
