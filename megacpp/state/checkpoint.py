"""Training checkpoints: tensors in safetensors files, everything else in JSON, all of it hashed.

    checkpoints/latest                  the name of the newest checkpoint (published.py)
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
import shutil
import statistics
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megacpp.errors import CheckpointError
from megacpp.state.agreement import agreed, gather, is_distributed, share, this_rank
from megacpp.state.catalogue import Catalogue, catalogue, check_parts, check_saved
from megacpp.state.files import (
    PENDING,
    aside_of,
    publish_folder,
    remove_folder,
    sort_metadata,
    tensor_bytes,
    write_text,
)
from megacpp.state.manifest import (
    DamagedError,
    FileEntry,
    Manifest,
    Seen,
    file_problems,
    hash_file,
    read_manifest,
    stray_problems,
    write_manifest,
)
from megacpp.state.published import (
    EXTRA,
    LATEST,
    advice,
    candidates,
    checked_extra,
    in_streak,
    latest_text,
    path_of,
    published,
    read_extra,
    step_of,
)
from megacpp.state.rng import rng_state
from megacpp.torch_extras import is_dtensor

# DCP holds two copies of a file's content in host memory while it writes that file.
_FILE_BYTES = 1 << 28
# Of a rank's part of a save, and of the median of the others: its disk is slow.
SLOW_S, SLOW_TIMES = 5.0, 3.0


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    extra: dict[str, Any],
    keep: int,
    keep_every: int = 0,
    rng: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    spare: Collection[Path] = (),
    seen: Seen | None = None,
) -> Path:
    """Save a checkpoint as `folder/step-<step>`; every rank calls it and waits for the last one.

    Args:
        folder: folder of checkpoints.
        step: optimizer steps made.
        tensors: this rank's tensors by name: plain tensors (equal on every rank that has them) or
            DTensors. Other ranks may hold others; each tensor is saved once.
        extra: JSON of rank 0; the generator states of every rank are added.
        keep: number of newest sound checkpoints to keep (0: all). Older ones are deleted after this
            one is published; one `in_streak` isn't counted. Where the disk is too full for this
            one, those behind the newest `keep` earlier ones are deleted before it.
        keep_every: checkpoints of steps that it divides are never deleted (0: none).
        rng: generator states of this rank (None: those of now).
        group: all ranks in a process group of their own; None: the default one.
        spare: checkpoints that are not deleted now: something reads them.
        seen: files that this rank verified in earlier saves (None: none).

    Raises:
        CheckpointError: the disk is full or not writable; raised on every rank, older checkpoints
            are unchanged.
    """
    assert "rng" not in extra
    final = path_of(folder, step)
    # Of this save alone: another start in the same folder can't write into it.
    pending = final.with_name(share(f"{final.name}.{uuid.uuid4().hex[:8]}{PENDING}", 0, group))
    what, fix = f"{pending}: cannot be saved", "free disk space or choose another --run.dir"
    rank, _ = this_rank()
    others: list[Path] = []
    short, seen = False, {} if seen is None else seen
    whole = catalogue(tensors, group)
    try:
        with agreed(what, fix, group):
            check_parts(tensors)
            if rank == 0:
                short = bool(_prepare(pending, whole))
                others = _others(final, step) if short else []
        if share(short, 0, group):
            old = _outlived(share(others, 0, group), 0, keep, seen, group)
            with agreed(what, fix, group):
                if rank == 0:
                    for path in _deletable(old, spare, keep_every):
                        remove_folder(path)
                    if lack := _prepare(pending, whole):
                        more = _deletable(_others(final, step)[1:], spare, keep_every)
                        lower = ", lower --checkpoint.keep or" if more and keep != 1 else " or"
                        raise CheckpointError(f"{final}: {lack}. Fix: {fix.replace(' or', lower)}.")
        with agreed(what, fix, group):
            seconds = _write_tensors(pending, tensors, whole, group)
        with agreed(what, fix, group):
            began = time.monotonic()
            own = _own_files(pending)
            for path in own:
                sort_metadata(path)
            files = {p.name: hash_file(p) for p in own}
            written = sum(map(tensor_bytes, own))
            seconds += time.monotonic() - began
        everyone = gather((files, written, seconds, rng or rng_state()), group)
        with agreed(what, fix, group):
            if rank == 0:
                _name_slow_disks(step, [seconds for *_, seconds, _ in everyone])
                stored = sum(written for _, written, *_ in everyone)
                assert stored == whole.num_bytes, f"{stored} bytes of {whole.num_bytes} written"
                hashes = {name: entry for files, *_ in everyone for name, entry in files.items()}
                state = {"extra": extra, "rng": [rng for *_, rng in everyone]}
                _finish(pending, step, whole, hashes, state)
                _publish(pending, final)
                others = _others(final, step)
        sound = int(not in_streak(extra))  # its files were hashed as they were written
        given = share((others, sound), 0, group)
        old = _outlived(*given, keep, seen, group)
        with agreed(what, fix, group):
            for path in _deletable(old, spare, keep_every) if rank == 0 else []:
                remove_folder(path)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(pending, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], prefix: str = "", verified: bool = False
) -> dict[str, Any]:
    """Load a checkpoint into `tensors` in place, on any mesh; every rank calls it.

    Nothing is modified before every file is verified and every name, shape and dtype matches. A
    rank gets the tensors that it asks for, whichever rank saved them; together the ranks must ask
    for all.

    Args:
        path: folder of the checkpoint.
        tensors: targets by name.
        prefix: restrict to tensors whose name starts with it (`model.`: weights alone).
        verified: `damage` has found none just now.

    Returns:
        The saved `extra`; its `rng` is this rank's (for `set_rng_state`), or None if the number of
        ranks has changed.

    Raises:
        CheckpointError: missing, unfinished or damaged checkpoint, or other tensors than expected;
            one line, the same on every rank.
    """
    what, fix = f"{path}: cannot be loaded", advice(path)
    rank, world_size = this_rank()
    wanted = catalogue(tensors)
    if not verified and (problem := damage(path)):
        raise CheckpointError(f"{problem}. Fix: {fix}.")
    with agreed(what, fix):
        check_parts(tensors)
        manifest = read_manifest(path, "checkpoint")
        check_saved(path, manifest, wanted, prefix)
    with agreed(what, fix):
        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(path))
        with _quiet():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not is_distributed())
        state = checked_extra(path, manifest)
    same_ranks = manifest.world_size == world_size
    return {**state["extra"], "rng": state["rng"][rank] if same_ranks else None}


def damage(path: Path) -> str:
    """Return the first problem of a checkpoint's files, or nothing; every rank calls it.

    Each rank hashes its share of the files; all return the same line.
    """
    return next((found[0] for found in gather(_problems(path, *this_rank())) if found), "")


def is_sound(
    path: Path,
    group: dist.ProcessGroup | None = None,
    seen: Seen | None = None,
    spikes: bool = False,
) -> bool:
    """Return whether every file has its hash and no streak led here; every rank calls it.

    Args:
        path: folder of the checkpoint.
        group: all ranks in a process group of their own; None: the default one.
        seen: files that this rank verified before and that are read again only once they have
            changed; None: all are read.
        spikes: they may have led here, only bad steps may not.
    """
    try:
        extra = read_extra(path)
        streak = extra.get("bad_steps") if spikes else in_streak(extra)
        bad = streak or _problems(path, *this_rank(), seen)
    except (CheckpointError, OSError):
        bad = True
    return not any(gather(bool(bad), group))


def newest_sound(folder: Path, usable: Callable[[int], bool] = lambda step: True) -> Path | None:
    """Return the newest sound checkpoint whose step is usable, or None; every rank calls it.

    One that spikes led to is taken where there is no other: they may have passed.
    """
    found = [path for path in share(candidates(folder), 0) if usable(step_of(path))]
    either = ((path, spikes) for spikes in (False, True) for path in found)
    return next((path for path, spikes in either if is_sound(path, spikes=spikes)), None)


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and return its problems, one line each."""
    return _problems(path, rank=0, world_size=1)


def _problems(path: Path, rank: int, world_size: int, seen: Seen | None = None) -> list[str]:
    """Return problems of a rank's share of the files, or else of the counters, one line each."""
    try:
        manifest = read_manifest(path, "checkpoint")
        names = sorted(manifest.files)[rank::world_size]
        # DCP would load stray tensor files.
        problems = stray_problems(path, manifest) + file_problems(path, manifest, names, seen)
        if not problems:
            checked_extra(path, manifest)
    except (DamagedError, OSError) as error:
        return [str(error)]
    return problems


# ---- saving -------------------------------------------------------------------------------------


def _prepare(pending: Path, whole: Catalogue) -> str:
    """Delete leftovers of a crash and create the pending folder; return what the disk lacks."""
    folder = pending.parent
    folder.mkdir(exist_ok=True)  # no parents: a run folder that is gone isn't made anew elsewhere
    for leftover in folder.glob(f"step-*{PENDING}"):
        shutil.rmtree(leftover)
    # A tenth more: headers, the manifest, and what others write meanwhile.
    needed, free = whole.num_bytes * 11 // 10, shutil.disk_usage(folder).free
    if free < needed:
        return f"needs {needed:,} bytes, the disk has {free:,} free"
    pending.mkdir()
    return ""


def _write_tensors(
    pending: Path, tensors: Mapping[str, Tensor], whole: Catalogue, group: dist.ProcessGroup | None
) -> float:
    """Write this rank's part; return the seconds that its own files took."""
    import torch.distributed.checkpoint as dcp  # slow to import, and not every process saves

    ready = {name: t if _packed(t) else t.contiguous() for name, t in tensors.items()}
    files = _split(whole, _FILE_BYTES)
    writer = dcp.HuggingFaceStorageWriter(str(pending), files, save_distributed=True)
    write, spent = writer.write_data, [0.0]

    def timed(plan: Any, planner: Any) -> Any:
        began = time.monotonic()
        try:
            return write(plan, planner)
        finally:
            spent.append(time.monotonic() - began)

    writer.write_data = timed
    with _quiet():
        alone = not is_distributed()
        dcp.save(ready, storage_writer=writer, process_group=group, no_dist=alone)
    return sum(spent)


def _name_slow_disks(step: int, seconds: Sequence[float]) -> None:
    """Print a line for each rank whose part of a save took far longer than that of the others."""
    for rank, mine in enumerate(seconds):
        usual = statistics.median([*seconds[:rank], *seconds[rank + 1 :]] or [mine])
        if mine > SLOW_S and mine > SLOW_TIMES * usual:
            print(
                f"step {step}: warning: the disk of rank {rank} is slow: its part of the "
                f"checkpoint took {mine:.3g} s, that of the others {usual:.3g} s",
                flush=True,
            )


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
    pending: Path, step: int, whole: Catalogue, hashes: dict[str, FileEntry], state: dict[str, Any]
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


def _publish(pending: Path, final: Path) -> None:
    """Publish the folder and update `latest`; only then may older checkpoints be deleted."""
    publish_folder(pending, final)
    write_text(final.parent / LATEST, latest_text(final.name))
    if aside_of(final).exists():
        remove_folder(aside_of(final))


def _others(final: Path, step: int) -> list[Path]:
    """Return the other checkpoints, in the order in which they are kept.

    After resuming from an older checkpoint, checkpoints of later steps are deleted first.
    """
    others = [path for path in published(final.parent) if path != final]
    return sorted(others, key=lambda one: (step_of(one) <= step, step_of(one)), reverse=True)


def _deletable(old: Sequence[Path], spare: Collection[Path], keep_every: int) -> list[Path]:
    """Return the checkpoints that nothing reads and that aren't kept for good."""
    return [
        path for path in old if path not in spare and (not keep_every or step_of(path) % keep_every)
    ]


def _outlived(
    others: Sequence[Path], sound: int, keep: int, seen: Seen, group: dist.ProcessGroup | None
) -> list[Path]:
    """Return the checkpoints behind the newest `keep` sound ones; every rank calls it.

    A checkpoint counts once its files were read and have their hashes. That happens in the first
    save after its own, shared by the ranks, and not again unless a file changes. Where the new one
    isn't sound, the older ones are all that is left, so each one that counts is read anew.

    Args:
        others: checkpoints beside the new one, in the order in which they are kept.
        sound: 1 if the new one is sound, else 0.
        keep: number of sound checkpoints to keep (0: all).
        seen: files that this rank verified before.
        group: all ranks in a process group of their own; None: the default one.
    """
    if not sound:
        seen.clear()
    for number, path in enumerate(others if keep else []):
        if sound >= keep:
            return [*others[number:]]
        sound += is_sound(path, group, seen)
    return []
