"""Training checkpoints: tensors in safetensors files, everything else in JSON, all of it hashed.

    checkpoints/latest                  the name of the newest checkpoint
    checkpoints/step-000100/
        shard-00001-model-...safetensors    pieces of tensors, written by one rank
        extra.json                          counters, data position, generators of every rank
        manifest.json                       shapes, dtypes, sizes and SHA-256 (manifest.py)

Tensors are saved by torch's distributed checkpoint (DCP) with its safetensors storage. It records
the offset of each piece in the whole tensor, so any mesh can load what any other mesh saved. No
file is a pickle, and none is read as one.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from megacpp.dtensor import is_dtensor
from megacpp.errors import CheckpointError
from megacpp.state.agreement import agreed, gather, is_distributed, this_rank
from megacpp.state.catalogue import Catalogue, catalogue, check_parts
from megacpp.state.files import (
    ASIDE,
    PENDING,
    aside_of,
    pending_folder,
    publish_folder,
    remove_folder,
    tensor_bytes,
    write_text,
)
from megacpp.state.manifest import (
    NAME,
    DamagedError,
    FileEntry,
    Manifest,
    file_problems,
    hash_file,
    read_manifest,
    stray_problems,
    write_manifest,
)
from megacpp.state.rng import rng_state

EXTRA, LATEST = "extra.json", "latest"
_NAME = re.compile(rf"step-(\d+)(?:{re.escape(ASIDE)})?")
# DCP holds two copies of a file's content in host memory while it writes that file.
_FILE_BYTES = 1 << 28


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any], keep: int
) -> Path:
    """Save a checkpoint as `folder/step-<step>`; every rank calls it and waits for the last one.

    Args:
        folder: folder of checkpoints.
        step: optimizer steps made.
        tensors: this rank's tensors by name: plain tensors (equal on every rank that has them) or
            DTensors. Other ranks may hold others; each tensor is saved once.
        extra: JSON of rank 0; the generator states of every rank are added.
        keep: number of newest checkpoints to keep (0: all). Older ones are deleted after this one
            is published.

    Raises:
        CheckpointError: the disk is full or not writable; raised on every rank, older checkpoints
            are unchanged.
    """
    assert "rng" not in extra
    final = folder / f"step-{step:06d}"
    pending = final.with_name(final.name + PENDING)
    what, fix = f"{pending}: cannot be saved", "free disk space or choose another --run.dir"
    rank, _ = this_rank()
    whole = catalogue(tensors)
    try:
        with agreed(what, fix):
            check_parts(tensors)
            if rank == 0:
                _prepare(folder, final, whole)
        with agreed(what, fix):
            _write_tensors(pending, tensors, whole)
        with agreed(what, fix):
            files = {p.name: hash_file(p) for p in _own_files(pending)}
            written = sum(map(tensor_bytes, _own_files(pending)))
        everyone = gather((files, written, rng_state()))
        with agreed(what, fix):
            if rank == 0:
                stored = sum(written for _, written, _ in everyone)
                assert stored == whole.num_bytes, f"{stored} bytes of {whole.num_bytes} written"
                hashes = {name: entry for files, *_ in everyone for name, entry in files.items()}
                state = {"extra": extra, "rng": [rng for *_, rng in everyone]}
                _finish(pending, step, whole, hashes, state)
                _publish(pending, final, step, keep)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(pending, ignore_errors=True)
        raise
    return final


def load_checkpoint(path: Path, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Load a checkpoint into `tensors` in place, on any mesh; every rank calls it.

    Nothing is modified before every file is verified and every name, shape and dtype matches. A
    rank gets the tensors that it asks for, whichever rank saved them; together the ranks must ask
    for all.

    Args:
        path: folder of the checkpoint.
        tensors: targets by name.
        prefix: restrict to tensors whose name starts with it (`model.`: weights alone).

    Returns:
        The saved `extra`; its `rng` is this rank's (for `set_rng_state`), or None if the number of
        ranks has changed.

    Raises:
        CheckpointError: missing, unfinished or damaged checkpoint, or other tensors than expected;
            one line, the same on every rank.
    """
    what, fix = f"{path}: cannot be loaded", _advice(path)
    rank, world_size = this_rank()
    wanted = catalogue(tensors)
    with agreed(what, fix):
        check_parts(tensors)
        try:
            manifest = read_manifest(path, "checkpoint")
        except DamagedError as damage:
            raise CheckpointError(f"{damage}. Fix: {fix}.") from None
        # Each rank verifies a share of the files. DCP would load stray tensor files.
        names = sorted(manifest.files)[rank::world_size]
        problems = stray_problems(path, manifest) + file_problems(path, manifest, names)
        if problems:
            raise CheckpointError(f"{problems[0]}. Fix: {fix}.")
        _match(path, manifest, wanted, prefix)
    with agreed(what, fix):
        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(path))
        with _quiet():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not is_distributed())
        state = json.loads((path / EXTRA).read_text())
    same_ranks = manifest.world_size == world_size
    return {**state["extra"], "rng": state["rng"][rank] if same_ranks else None}


def read_extra(path: Path) -> dict[str, Any]:
    """Return the `extra` of a checkpoint without its tensors, before `load_checkpoint` verifies it.

    Raises:
        CheckpointError: there is no such checkpoint, or the file can't be read.
    """
    try:
        return json.loads((path / EXTRA).read_text())["extra"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path / EXTRA}: cannot be read ({type(error).__name__}). Fix: {_advice(path)}."
        ) from None


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that was saved last, or None."""
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text().strip()
        if _NAME.fullmatch(name) and (folder / name / NAME).is_file():
            return folder / name
    return next(iter(_published(folder)), None)


def passed_over(folder: Path, path: Path | None) -> list[str]:
    """Return a line for each unusable folder of a later step than `path`.

    Checkpoints are published whole, so a folder without a manifest lost it afterwards.
    """
    if not folder.is_dir():
        return []
    later = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and not (p / NAME).is_file()]
    after = _step(path) if path else -1
    return [f"{p} is passed over: it has no {NAME}" for p in sorted(later) if _step(p) > after]


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and return its problems, one line each."""
    try:
        manifest = read_manifest(path, "checkpoint")
    except DamagedError as damage:
        return [str(damage)]
    return stray_problems(path, manifest) + file_problems(path, manifest, manifest.files)


# ---- saving -------------------------------------------------------------------------------------


def _prepare(folder: Path, final: Path, whole: Catalogue) -> None:
    """Delete leftovers of a crash, check the free space, and create the pending folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"step-*{PENDING}"):
        shutil.rmtree(leftover)
    needed, free = whole.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{final}: needs {needed:,} bytes, the disk has {free:,} free. "
            "Fix: free disk space, lower --checkpoint.keep or choose another --run.dir."
        )
    pending_folder(final)


def _write_tensors(pending: Path, tensors: Mapping[str, Tensor], whole: Catalogue) -> None:
    import torch.distributed.checkpoint as dcp  # slow to import, and not every process saves

    ready = {name: t if _packed(t) else t.contiguous() for name, t in tensors.items()}
    files = _split(whole, _FILE_BYTES)
    writer = dcp.HuggingFaceStorageWriter(str(pending), files, save_distributed=True)
    with _quiet():
        dcp.save(ready, storage_writer=writer, no_dist=not is_distributed())


def _packed(t: Tensor) -> bool:
    """Return whether the local shard is contiguous, as safetensors requires."""
    return (t.to_local() if is_dtensor(t) else t).is_contiguous()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence DCP's warning about a missing process group (no thread known)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _split(whole: Catalogue, most_bytes: int) -> dict[str, int]:
    """Return the number (from 1) of the file for each tensor, in order.

    Every rank writes its share of a tensor to a file of that number, about `most_bytes` each.
    """
    number, used, numbers = 1, 0.0, {}
    for name, entry in whole.entries.items():
        size = entry.num_bytes / whole.count[name]
        if used and used + size > most_bytes:
            number, used = number + 1, 0.0
        numbers[name] = number
        used += size
    return numbers


def _own_files(pending: Path) -> list[Path]:
    """Return the files that this rank wrote: DCP counts ranks from 1."""
    return sorted(pending.glob(f"shard-{this_rank()[0] + 1:05d}-*.safetensors"))


def _finish(
    pending: Path,
    step: int,
    whole: Catalogue,
    hashes: dict[str, FileEntry],
    state: dict[str, Any],
) -> None:
    """Write extra.json and manifest.json beside the tensors."""
    unseen = [name for name in hashes if not (pending / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"{pending}: rank 0 doesn't see {unseen[0]} of another rank. "
            "Fix: choose a --run.dir on a file system that all nodes share."
        )
    write_text(pending / EXTRA, json.dumps(state))
    files = {**hashes, EXTRA: hash_file(pending / EXTRA)}
    world_size = this_rank()[1]
    write_manifest(pending, Manifest("checkpoint", step, world_size, whole.entries, files))


def _publish(pending: Path, final: Path, step: int, keep: int) -> None:
    """Publish the folder, update `latest`, and only then delete older checkpoints."""
    publish_folder(pending, final)
    write_text(final.parent / LATEST, f"{final.name}\n")
    if aside_of(final).exists():
        remove_folder(aside_of(final))
    # After resuming from an older checkpoint, checkpoints of later steps are deleted first.
    others = [path for path in _published(final.parent) if path != final]
    others.sort(key=lambda path: (_step(path) <= step, _step(path)), reverse=True)
    for path in others[max(0, keep - 1) :] if keep else []:
        remove_folder(path)


def _published(folder: Path) -> list[Path]:
    """Return finished checkpoints, latest step first; other files in the folder are ignored."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / NAME).is_file()]
    return sorted(found, key=lambda path: (_step(path), not path.suffix), reverse=True)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


# ---- loading ------------------------------------------------------------------------------------


def _match(path: Path, manifest: Manifest, whole: Catalogue, prefix: str) -> None:
    """Check names, dtypes and global shapes against the saved ones (DCP would cast silently)."""
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


def _advice(path: Path) -> str:
    """Return the fix for an unloadable checkpoint: the next newest one, or a fresh start."""
    others = [p for p in _published(path.parent) if p.name != path.name]
    if others:
        return f"use another checkpoint: --checkpoint.resume {others[0]}"
    return "start anew: --checkpoint.resume never"
