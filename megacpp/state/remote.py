"""Copy of a run at a URL (`checkpoint.remote`), in the form of a run folder; no torch import here.

    URL/config.json, metrics.jsonl, ...     what a resumed run goes on with, and a report reads
    URL/samples/, memory/, tensorboard/     likewise
    URL/checkpoints/step-000100/            the files, and its manifest after all of them
    URL/checkpoints/latest                  after the manifest
    URL/final/                              at the end; its manifest comes last, too

A store renames nothing, so a manifest is what names a checkpoint as complete: it is the last file
to come and the first to go. A run folder without the newest of these downloads it (`fetch`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from megacpp.config.schema import Config
from megacpp.downloads import RemoteFile, fetch_file
from megacpp.errors import CheckpointError, config_error
from megacpp.state.files import PENDING, publish_folder, write_json, write_text
from megacpp.state.manifest import NAME, DamagedError, Manifest, parse_manifest, read_manifest
from megacpp.state.published import (
    EXTRA,
    LATEST,
    STEP,
    candidates,
    checked_extra,
    in_order,
    latest_text,
    name_in,
    step_of,
)
from megacpp.terminal.progress import progress_bars
from megacpp.urls import ATTEMPTS, NoStoreError, one_line, open_store, retried

KEY = "checkpoint.remote"
# Files of a run folder that go along with a checkpoint.
BESIDE = ("config.json", "launch*.json", "*.jsonl", "samples/*.txt", "memory/*.json")
BESIDE += ("failures/*.txt", "tensorboard/*")
UPLOADED = "uploaded.json"  # the newest checkpoint that a run folder has uploaded itself
PROBE = "writable"  # an object that is written and removed at the start
CHECK = "check the URL, the network and your rights"


class GoneError(Exception):
    """Checkpoint that was replaced or deleted while it was uploaded."""


@dataclass(frozen=True)
class RemoteRun:
    """Run at a URL.

    Attributes:
        url: of its folder.
        system: file system of fsspec.
        root: path of the folder in it.
        sent: sizes and times of files beside checkpoints, as they were uploaded.
    """

    url: str
    system: Any
    root: str
    sent: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    def names(self) -> list[str]:
        """Return complete checkpoints, the one to resume from first, as a run folder has them."""
        found: dict[str, dict[str, Any]] = {}
        for path, info in self.below("checkpoints").items():
            folder, _, file = path.rpartition("/")
            if STEP.fullmatch(folder):
                found.setdefault(folder, {})[file] = info.get("size")
        whole = [name for name, files in found.items() if self._complete(name, files)]
        return [path.name for path in in_order([Path(name) for name in whole], Path(self._named()))]

    def newer(self, folder: Path) -> str | None:
        """Return the newest checkpoint if it has a later step than those of a run folder.

        One that the folder has uploaded itself and went back from since isn't newer.
        """
        here, there = candidates(folder / "checkpoints"), self.names()
        if not there or (here and step_of(Path(there[0])) <= step_of(here[0])):
            return None
        try:
            own = json.loads((folder / UPLOADED).read_bytes())
        except (OSError, ValueError):
            own = None
        raw = self.read(f"checkpoints/{there[0]}/{NAME}") or b""
        return None if here and own == _mark(there[0], raw) else there[0]

    def extra(self, name: str) -> dict[str, Any]:
        """Return the `extra` of a checkpoint.

        Raises:
            DamagedError: it, or the manifest, isn't as it was written.
        """
        with tempfile.TemporaryDirectory() as made:
            for file in (NAME, EXTRA):
                (Path(made) / file).write_bytes(self.read(f"checkpoints/{name}/{file}") or b"")
            manifest = read_manifest(Path(made), "checkpoint")
            return checked_extra(Path(made), manifest)["extra"]

    def probe(self) -> None:
        """Write a small object and remove it."""
        retried(lambda: self._write(PROBE, b"1"))
        self._remove(PROBE)

    # ---- upload ---------------------------------------------------------------------------------

    def upload(
        self, path: Path, keep: int, keep_every: int, sent: Callable[[int, int], None]
    ) -> int:
        """Upload a published checkpoint and the files beside it; return the bytes sent.

        Args:
            path: its folder, in the `checkpoints` of a run folder.
            keep, keep_every: retention, as in `save_checkpoint`.
            sent: is told the bytes sent so far, and those of all files.

        Raises:
            GoneError: the folder was replaced or deleted meanwhile.
            Exception: the store has failed `ATTEMPTS` times.
        """
        there, run = f"checkpoints/{path.name}", path.parent.parent
        total = self._send(path, there, "checkpoint", sent, lambda: self.upload_beside(run))
        target = not total and retried(self._named) != path.name  # of a rewind: it is there already
        if target:
            self.upload_beside(run)
        if total or target:
            latest = latest_text(path.name).encode()
            retried(lambda: self._write(f"checkpoints/{LATEST}", latest))
            if keep:
                self._retire(path, keep, keep_every)
        return total

    def upload_final(self, run: Path, sent: Callable[[int, int], None]) -> int:
        """Upload the final weights of a run folder, if it has any; return the bytes sent.

        Args:
            run: run folder.
            sent: is told the bytes sent so far, and those of all files.

        Raises:
            Exception: the store has failed `ATTEMPTS` times.
        """
        final = run / "final"
        return self._send(final, "final", "export", sent) if (final / NAME).is_file() else 0

    def _send(
        self,
        path: Path,
        there: str,
        kind: str,
        sent: Callable[[int, int], None],
        beside: Callable[[], None] = lambda: None,
    ) -> int:
        """Upload a published folder, its manifest last; return the bytes sent."""
        try:
            raw, manifest = (path / NAME).read_bytes(), read_manifest(path, kind)
            if retried(lambda: self.read(f"{there}/{NAME}")) == raw:
                return 0
            retried(lambda: self._remove(f"{there}/{NAME}"))
            total, done = sum(entry.bytes for entry in manifest.files.values()), 0
            for name, entry in manifest.files.items():
                retried(lambda name=name: self._put(path / name, f"{there}/{name}"))
                done += entry.bytes
                sent(done, total)
            beside()
            if (path / NAME).read_bytes() != raw:
                raise GoneError(f"{path} was replaced")
        except (FileNotFoundError, DamagedError) as error:
            if (path / NAME).is_file():
                raise
            raise GoneError(f"{path} is gone") from error
        if lost := _lacking(manifest, self._sizes(there)):
            raise OSError(f"{there}/{lost} hasn't the bytes that were sent")
        if kind == "checkpoint":
            write_json(path.parents[1] / UPLOADED, _mark(path.name, raw))
        retried(lambda: self._write(f"{there}/{NAME}", raw))
        return total

    def upload_beside(self, run: Path) -> None:
        """Upload the files of a run folder that go along with a checkpoint, if they are new."""
        for path in sorted(run.glob("*")) + sorted(run.glob("*/*")):
            name = path.relative_to(run).as_posix()
            if not path.is_file() or not goes_along(name):
                continue
            facts = path.stat().st_size, path.stat().st_mtime_ns
            if self.sent.get(name) == facts:
                continue
            content = path.read_bytes()
            if path.suffix == ".jsonl":  # its last line may be in the making
                content = content[: content.rfind(b"\n") + 1]
            retried(lambda name=name, content=content: self._write(name, content))
            self.sent[name] = facts

    def _retire(self, path: Path, keep: int, keep_every: int) -> None:
        """Delete what the retention of a run folder would: later steps, and old ones."""
        here = {other.name for other in candidates(path.parent)}
        step, kept = step_of(path), 0
        for name in sorted(self.names(), key=lambda name: step_of(Path(name)), reverse=True):
            other = step_of(Path(name))
            kept += other <= step
            old = other > step or kept > keep
            if old and name not in here and not (keep_every and other % keep_every == 0):
                retried(lambda name=name: self._remove(f"checkpoints/{name}/{NAME}"))
                for file in self.below(f"checkpoints/{name}"):
                    retried(lambda file=f"checkpoints/{name}/{file}": self._remove(file))

    # ---- download -------------------------------------------------------------------------------

    def fetch(self, folder: Path, name: str, say: Callable[[str], None]) -> None:
        """Download a checkpoint, verify it, and publish it in a run folder as the newest one.

        Args:
            folder: run folder; its files that go along are replaced.
            name: checkpoint.
            say: prints a line.

        Raises:
            CheckpointError: a file can't be fetched, or isn't as it was written.
        """
        from megacpp.state.checkpoint import verify  # imports torch

        final = folder / "checkpoints" / name
        pending = final.with_name(f"{name}.{uuid.uuid4().hex[:8]}{PENDING}")
        for left in final.parent.glob(f"step-*{PENDING}"):
            shutil.rmtree(left)
        pending.mkdir(parents=True)
        try:
            self._get(f"checkpoints/{name}/{NAME}", pending / NAME)
            manifest = read_manifest(pending, "checkpoint")
            total = sum(entry.bytes for entry in manifest.files.values())
            if (free := shutil.disk_usage(pending).free) < total:
                raise CheckpointError(
                    f"{final}: needs {total:,} bytes, the disk has {free:,} free. "
                    "Fix: free disk space or choose another --run.dir."
                )
            say(f"fetching {name} from {self.url}: {size(total)}")
            with progress_bars() as stage:
                advance = stage(f"fetching {name}", total)
                for file, entry in manifest.files.items():
                    there = f"{self.root}/checkpoints/{name}/{file}"
                    whole = RemoteFile(there, entry.bytes, entry.sha256)
                    fetch_file(self.system, whole, pending / file, advance)
            if problems := verify(pending):
                raise DamagedError(problems[0])
            for file in filter(goes_along, self.below("")):
                self._get(file, folder / file)
        except Exception as error:
            shutil.rmtree(pending, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            what = str(error) if isinstance(error, DamagedError) else one_line(error)
            raise CheckpointError(
                f"{KEY}={self.url}: {name} can't be fetched in {ATTEMPTS} attempts ({what}). "
                f"Fix: check network and rights, or delete {name} there to go on from an older one."
            ) from None
        publish_folder(pending, final)
        write_text(final.parent / LATEST, latest_text(name))

    # ---- the store ------------------------------------------------------------------------------

    def below(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """Return the files below a folder, by their paths from it."""
        top = f"{self.root}/{folder}".rstrip("/")
        self.system.invalidate_cache()
        try:
            found = self.system.find(top, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(top) + 1 :]: info for path, info in found.items()}

    def _sizes(self, folder: str) -> dict[str, int]:
        return {name: info["size"] for name, info in retried(lambda: self.below(folder)).items()}

    def _complete(self, name: str, sizes: Mapping[str, int]) -> bool:
        """Return whether a checkpoint has its manifest and, by their sizes, all files of it."""
        raw = self.read(f"checkpoints/{name}/{NAME}") if NAME in sizes else None
        try:
            return raw is not None and not _lacking(parse_manifest(NAME, raw, "checkpoint"), sizes)
        except DamagedError:  # it came in part only
            return False

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None."""
        try:
            return self.system.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None

    def _named(self) -> str:
        """Return the checkpoint that `latest` names, or nothing."""
        return name_in((self.read(f"checkpoints/{LATEST}") or b"").decode(errors="replace"))

    def _get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        retried(lambda: self.system.get_file(f"{self.root}/{name}", str(path)))

    def _put(self, path: Path, name: str) -> None:
        self.system.put_file(str(path), f"{self.root}/{name}")

    def _write(self, name: str, content: bytes) -> None:
        self.system.pipe_file(f"{self.root}/{name}", content)

    def _remove(self, name: str) -> None:
        try:
            self.system.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return


def url_of(config: Config) -> str:
    """Return `checkpoint.remote`; empty in trials and replays, which save nothing."""
    return config.checkpoint.remote if config.saves else ""


def remote_run(config: Config) -> RemoteRun:
    """Return the run at `checkpoint.remote`; nothing is read yet.

    Raises:
        ConfigError: no package for its protocol, or no such protocol.
    """
    url = config.checkpoint.remote.rstrip("/")
    try:
        return RemoteRun(url, *open_store(url))
    except NoStoreError as error:
        raise config_error(KEY, url, str(error), error.fix) from None
    except Exception as error:  # each file system has errors of its own
        raise config_error(KEY, url, f"can't be opened ({one_line(error)})", CHECK) from None


def check_remote(config: Config, restarted: bool) -> None:
    """Write to `checkpoint.remote` and read it, before anything starts; rank 0 calls it.

    Args:
        config: configuration of the run.
        restarted: the launcher has restarted ranks of this run.

    Raises:
        ConfigError: it can't be opened, written or read, or has another run.
    """
    remote, resume = remote_run(config), config.checkpoint.resume
    try:
        remote.probe()
        there = remote.names()
    except Exception as error:  # each file system has errors of its own
        rule = f"can't be written and read ({one_line(error)})"
        raise config_error(KEY, remote.url, rule, CHECK) from None
    own = resume != "never" and candidates(Path(config.run.dir) / "checkpoints")
    if there and resume != "auto" and not own and not restarted:
        rule = f"has {there[0]} of a run, and checkpoint.resume={resume} starts another"
        raise config_error(KEY, remote.url, rule, "choose another URL, or delete that run")


def newer_extra(config: Config, folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return name and `extra` of a checkpoint that the run folder lacks, if it is the newest.

    Raises:
        ConfigError: the store can't be opened or read.
    """
    remote = remote_run(config)
    try:
        name = remote.newer(folder)
        return (f"{remote.url}/checkpoints/{name}", remote.extra(name)) if name else None
    except DamagedError:  # reported when it is fetched
        return None
    except Exception as error:  # each file system has errors of its own
        raise config_error(KEY, remote.url, f"can't be read ({one_line(error)})", CHECK) from None


def fetch_newer(config: Config) -> None:
    """Download the newest checkpoint into the run folder, unless that has it; rank 0 calls it.

    Raises:
        CheckpointError: it can't be fetched whole.
    """
    remote, folder = remote_run(config), Path(config.run.dir)
    if name := remote.newer(folder):
        remote.fetch(folder, name, lambda line: print(line, flush=True))


def size(num_bytes: int) -> str:
    """Return bytes as text, in GB or MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def goes_along(name: str) -> bool:
    """Return whether a file of a run folder, by its path, is one that goes along."""
    path = PurePosixPath(name)
    return any(path.parent == PurePosixPath(p).parent and path.match(p) for p in BESIDE)


def _lacking(manifest: Manifest, sizes: Mapping[str, int]) -> str:
    """Return the first file that isn't there with its bytes, or nothing."""
    return next((n for n, entry in manifest.files.items() if sizes.get(n) != entry.bytes), "")


def _mark(name: str, manifest: bytes) -> dict[str, str]:
    return {"checkpoint": name, "manifest": hashlib.sha256(manifest).hexdigest()}
