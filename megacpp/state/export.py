"""Export of final weights as a self-contained folder: safetensors, config.json and a manifest.

    final/model.safetensors     every parameter and persistent buffer once, whole
    final/config.json           {"model": ModelConfig, ...}
    final/manifest.json         sizes and SHA-256 (manifest.py)

Weights beyond the limit of one file are split like Hugging Face's: `model-00001-of-00002...` and
`model.safetensors.index.json`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megacpp.config.saved import read_model_config as read_model_config
from megacpp.config.schema import Config, ModelConfig
from megacpp.config.settings import flatten, settings_of
from megacpp.errors import CheckpointError, shortened
from megacpp.model.count import count_parameters, meta_model
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, initialise, whole
from megacpp.state.agreement import agreed, this_rank
from megacpp.state.catalogue import Catalogue, catalogue, check_parts, whole_on_main
from megacpp.state.checkpoint import load_checkpoint
from megacpp.state.files import (
    PENDING,
    aside_of,
    pending_folder,
    publish_folder,
    remove_folder,
    sync,
    write_text,
)
from megacpp.state.manifest import (
    DamagedError,
    Manifest,
    TensorEntry,
    describe,
    file_problems,
    hash_file,
    read_json,
    read_manifest,
    write_manifest,
)
from megacpp.state.tensors import is_persistent, model_tensors
from megacpp.terminal.progress import counted

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def whole_copy(
    model: nn.Module, config: ModelConfig, device: torch.device | str
) -> HybridLM | None:
    """Return a whole fp32 copy in eval mode on rank 0, None on other ranks; every rank calls it.

    Args:
        model: model on any mesh.
        config: settings of the model.
        device: device of the copy.
    """
    whole = catalogue(model_tensors(model))
    tensors = _whole_tensors(model, whole, _ordered(model, whole))
    if this_rank()[0]:
        for _ in tensors:  # helps to gather them
            raise AssertionError("only rank 0 gets tensors")
        return None
    copy = empty_model(config, device, torch.float32)
    with torch.no_grad():
        _fill(copy, Path("the model in training"), tensors)
    return copy


def export_weights(
    model: nn.Module,
    folder: Path,
    config: ModelConfig,
    extra: Mapping[str, Any] | None = None,
    beside: Sequence[Path] = (),
    file_bytes: int = 4_000_000_000,
    step: int = 0,
) -> None:
    """Write `folder` atomically; every rank calls it. Rank 0 holds one file's tensors at a time.

    Args:
        model: model on any mesh.
        folder: target folder.
        config: settings of the model, for config.json.
        extra: further keys of config.json.
        beside: files that belong to the weights, copied under their names (tokenizer.json).
        file_bytes: most bytes of one weights file.
        step: number of training steps, for the manifest.

    Raises:
        CheckpointError: the disk is full or not writable; raised on every rank, nothing is
            published.
    """
    what, fix = f"{folder}: cannot be exported", "free disk space or choose another --run.dir"
    pending, rank = folder.with_name(folder.name + PENDING), this_rank()[0]
    whole = catalogue(model_tensors(model))
    sizes = {name: whole.entries[name].num_bytes for name in _ordered(model, whole)}
    groups = weights_files(sizes, file_bytes)
    content = {"model": config, **(extra or {})}
    try:
        with agreed(what, fix):
            check_parts(model_tensors(model))
            if rank == 0:
                pending_folder(folder)
        saved: dict[str, Tensor] = {}
        for name, members in groups.items():
            tensors = _whole_tensors(model, whole, members)
            if rank == 0:
                tensors = counted(tensors, f"export {name}", len(members))
            some = dict(tensors)
            with agreed(what, fix):
                if rank == 0:
                    save_file(some, pending / name, metadata={"format": "pt"})
                    sync(pending / name)
                    saved |= {key: t.to("meta") for key, t in some.items()}
        with agreed(what, fix):
            if rank == 0:
                _finish(pending, folder, groups, saved, content, beside, step)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(pending, ignore_errors=True)
        raise


def load_exported(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> HybridLM:
    """Return an exported model in eval mode, after every file is verified.

    Args:
        folder: exported folder.
        device: device of the model.
        dtype: dtype of the matrices; parameters under the fp32 contract stay at least fp32.

    Raises:
        CheckpointError: missing or damaged folder, or other tensors than config.json describes.
    """
    fix = "start the run again, it writes them at its end, or take a checkpoint"
    try:
        manifest = read_manifest(folder, "export")
        problems = file_problems(folder, manifest, manifest.files)
        content = {} if problems else read_json(folder, CONFIG, manifest)
    except DamagedError as damage:
        problems, content = [str(damage)], {}
    if problems:
        raise CheckpointError(f"{problems[0]}. Fix: {fix}.")
    if not isinstance(content, dict) or "model" not in content:
        raise CheckpointError(f"{folder / CONFIG}: has no settings of a model. Fix: {fix}.")
    config = read_model_config(content["model"])
    check_tensors(folder / CONFIG, config, manifest.tensors)
    with _settings_of(folder / CONFIG):
        model = empty_model(config, device, dtype)
    files = [name for name in manifest.files if name.endswith(".safetensors")]
    _fill(model, folder, _read_files(folder, files))
    return model


def load_trained(
    path: Path,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HybridLM:
    """Return the model of a training checkpoint in eval mode; see `load_exported`.

    Args:
        path: folder of the checkpoint.
        config: settings of the model.
        device: device of the model.
        dtype: dtype of the matrices.

    Raises:
        CheckpointError: missing or damaged checkpoint, or other tensors than `config` describes.
    """
    prefix = "model."
    try:
        manifest = read_manifest(path, "checkpoint")
    except DamagedError as damage:
        raise CheckpointError(f"{damage}. Fix: choose another checkpoint.") from None
    saved = {
        name.removeprefix(prefix): entry
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }
    check_tensors(path, config, saved)
    stored = {
        f"{prefix}{name}": torch.empty(entry.shape, dtype=entry.torch_dtype)
        for name, entry in saved.items()
    }
    load_checkpoint(path, stored, prefix)
    with _settings_of(path):
        model = empty_model(config, device, dtype)
    _fill(model, path, ((name.removeprefix(prefix), t) for name, t in stored.items()))
    return model


# ---- writing ------------------------------------------------------------------------------------


def _ordered(model: nn.Module, whole: Catalogue) -> list[str]:
    """Return the names of all ranks' tensors in the order of the unsharded model."""
    if whole.everywhere:
        return list(whole.entries)
    assert isinstance(model, HybridLM)  # no other model has pipeline stages
    names = list(model_tensors(meta_model(model.config)))
    differ = sorted(whole.entries.keys() ^ set(names))
    assert not differ, f"{differ[0]} is held by no rank, or by one that shouldn't"
    return names


@torch.no_grad()
def _whole_tensors(
    model: nn.Module, whole: Catalogue, names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole CPU copies, one at a time, on rank 0; other ranks only help to gather them."""
    tensors = model_tensors(model)
    device = next(iter(tensors.values())).device
    for name in names:  # no variable holds a whole tensor while the next one is gathered
        entry, first = whole.entries[name], whole.first[name]
        full = whole_on_main(tensors.get(name), entry, first, device)
        cpu = full.detach().to("cpu", copy=True).contiguous()
        del full
        if this_rank()[0] == 0:
            yield name, cpu


def weights_files(sizes: Mapping[str, int], most_bytes: int) -> dict[str, list[str]]:
    """Return file name -> tensor names, in order, at most `most_bytes` a file (or one tensor).

    Args:
        sizes: bytes of each tensor.
        most_bytes: of a file.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def _finish(
    pending: Path,
    folder: Path,
    groups: Mapping[str, Sequence[str]],
    saved: Mapping[str, Tensor],
    config: Mapping[str, Any],
    beside: Sequence[Path],
    step: int,
) -> None:
    """Write the JSON files beside the weights and publish the folder."""
    if len(groups) > 1:
        total = sum(t.numel() * t.element_size() for t in saved.values())
        where = {name: file for file, names in groups.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_text(pending / INDEX, json.dumps(index, indent=2) + "\n")
    text = json.dumps(config, indent=2, default=dataclasses.asdict)
    write_text(pending / CONFIG, text + "\n")
    for path in beside:
        shutil.copyfile(path, pending / path.name)
        sync(pending / path.name)
    files = {path.name: hash_file(path) for path in sorted(pending.iterdir())}
    write_manifest(pending, Manifest("export", step, this_rank()[1], describe(saved), files))
    publish_folder(pending, folder)
    if aside_of(folder).exists():
        remove_folder(aside_of(folder))


# ---- reading ------------------------------------------------------------------------------------


def empty_model(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> HybridLM:
    """Return a materialised model in which only tables (non-persistent buffers) are initialised."""
    model = meta_model(config).to(dtype)
    model.to_empty(device=device)
    tables = {id(b) for name, b in model.named_buffers() if not is_persistent(model, name)}

    def part(t: Tensor) -> Slice:
        if id(t) in tables or t.dim() == 0:
            return whole(t)
        return Slice(t[:0], tuple(t.shape), (0,) * t.dim())  # saved in the files: not computed here

    initialise(model, model.init_rules(), seed=0, part=part)
    return model.eval()


def _read_files(folder: Path, files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - no mapping
                    yield name, reader.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{folder / file}: {shortened(error)}. Fix: use the files that the run wrote."
            ) from None


def check_tensors(origin: Path, config: ModelConfig, saved: Mapping[str, TensorEntry]) -> None:
    """Compare saved tensors with a model's, before anything of the model's size is made.

    Args:
        origin: folder of the tensors, for the message.
        config: settings of the model.
        saved: dtype and shape of the saved tensors by name.

    Raises:
        CheckpointError: names, shapes or kinds of number differ, or the settings make no model.
    """
    with _settings_of(origin):
        problem = _too_many(config, saved)
        if not problem:
            wanted = model_tensors(meta_model(config))
            problem += [f"has no tensor {n}" for n in sorted(wanted.keys() - saved.keys())]
            problem += [
                f"has a tensor {n} that the model lacks"
                for n in sorted(saved.keys() - wanted.keys())
            ]
            for name in sorted(wanted.keys() & saved.keys()):
                have, need = saved[name], wanted[name]
                if have.shape != list(need.shape):
                    problem.append(f"{name} is {have.shape}, not {list(need.shape)}")
                elif have.torch_dtype.is_floating_point != need.is_floating_point():
                    problem.append(f"{name} is {have.dtype}, not {need.dtype}")
    if problem:
        more = f" (and {len(problem) - 1} more)" if len(problem) > 1 else ""
        raise CheckpointError(
            f"{origin}: {problem[0]}{more}. Fix: use the config.json that belongs to the weights."
        )


@contextmanager
def _settings_of(origin: Path) -> Iterator[None]:
    """Turn any error of a block that only computes with saved settings into one of the folder."""
    try:
        yield
    except Exception as error:  # settings that no run can have been started with
        raise CheckpointError(
            f"{origin}: its settings make no model ({type(error).__name__}: {shortened(error)}). "
            "Fix: use the config.json that belongs to the weights."
        ) from error


def _too_many(config: ModelConfig, saved: Mapping[str, TensorEntry]) -> list[str]:
    """Return a line if a setting is out of range or makes more than was saved.

    All follow from the settings alone, without a module per layer.
    """
    settings = settings_of(Config)
    for key, value in flatten(config).items():
        if (name := f"model.{key}") in settings and (error := settings[name].broken(value)):
            return [str(error).partition(". Fix:")[0]]
    layers, numbers = config.depth + config.mtp.depths, sum(t.numel for t in saved.values())
    if layers > len(saved):
        return [f"has {len(saved):,} tensors, too few for {layers:,} layers"]
    total = count_parameters(config).total
    return [f"has {numbers:,} numbers, the model {total:,}"] if total > 2 * numbers else []


@torch.no_grad()
def _fill(model: nn.Module, origin: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy tensors into a model; raise CheckpointError where a file isn't as its manifest says."""
    targets = model_tensors(model)
    for name, t in tensors:
        if name not in targets or t.shape != targets[name].shape:
            raise CheckpointError(
                f"{origin}: {shortened(name)} of {list(t.shape)} isn't in its manifest. "
                "Fix: use the files that the run wrote."
            )
        targets.pop(name).copy_(t)
    if targets:
        raise CheckpointError(
            f"{origin}: its files have no tensor {min(targets)}. Fix: use the files of the run."
        )
