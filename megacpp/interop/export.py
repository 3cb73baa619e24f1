"""Weights of a run as a Hugging Face folder: one tensor at a time, one file at a time.

config.json                 the class's keys, and our settings under `megacpp`
model.safetensors           or model-00001-of-0000N.safetensors and an index
tokenizer.json, tokenizer_config.json, generation_config.json, README.md
modeling_megacpp.py         and configuration_megacpp.py, where transformers has no class
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import megacpp
from megacpp.config.model import ModelConfig
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import CheckpointError, ConfigError, config_error
from megacpp.interop.card import model_card
from megacpp.interop.classes import to_config
from megacpp.interop.code.write import code_files
from megacpp.interop.hf_class import HFClass
from megacpp.interop.hf_config import OURS
from megacpp.interop.links import Link, links, rows_in
from megacpp.interop.places import WeightsFolder, check_target, saved_step
from megacpp.interop.stored import StoredTensors
from megacpp.interop.tokenizer import end_ids, special_ids_of, write_tokenizer
from megacpp.state.export import INDEX, weights_files
from megacpp.state.files import pending_folder, publish_folder, sync, write_text
from megacpp.state.manifest import DamagedError, file_problems, read_manifest, stray_problems
from megacpp.terminal.progress import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class HFTarget:
    """Folder to write.

    Attributes:
        folder: the folder; it must not exist, or be empty.
        one: class.
        dtype: of floating tensors.
        file_bytes: most bytes of a weights file.
        left_out: what the weights have and the folder lacks, for the model card.
    """

    folder: Path
    one: HFClass
    dtype: torch.dtype
    file_bytes: int = 4_000_000_000
    left_out: tuple[str, ...] = ()


def write_hf_folder(
    place: WeightsFolder, model: ModelConfig, tokenizer: CorpusTokenizer, target: HFTarget
) -> dict[str, int]:
    """Write weights as a Hugging Face folder; return the bytes of each weights file.

    Memory peaks at two weights files: the tensors of one, and their bytes while it is written.

    Args:
        place: verified folder of the weights.
        model: their settings, without what the folder lacks (`as_exported`).
        tokenizer: tokenizer that belongs to them.
        target: what to write.

    Raises:
        ConfigError: the target folder is in use, or can't be written.
        CheckpointError: the weights are damaged, or of another model.
    """
    folder = target.folder
    check_target(folder)
    stored = StoredTensors(
        place.folder, _files(place), "model." if place.kind == "checkpoint" else ""
    )
    made = list(links(target.one, model))
    _check_names(place, stored, made)
    try:
        pending = pending_folder(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        sizes = _write_tensors(pending, stored, made, target)
        step, marks = saved_step(place), special_ids_of(tokenizer)
        config = {
            **to_config(target.one, model),
            **marks,
            "dtype": str(target.dtype).removeprefix("torch."),
            OURS: {
                "version": megacpp.__version__,
                "step": step,
                "model": dataclasses.asdict(model),
            },
        }
        _write_json(pending / "config.json", config)
        ends = {"eos_token_id": end_ids(tokenizer), "do_sample": False}
        _write_json(pending / "generation_config.json", marks | ends)
        write_tokenizer(tokenizer, pending, model.attention.max_seq_len)
        code = code_files(model) if target.one.own else {}
        card = model_card(
            place, model, target.one, step, config["dtype"], tokenizer, target.left_out
        )
        for name, text in {**code, "README.md": card}.items():
            write_text(pending / name, text)
        if folder.exists():
            folder.rmdir()
        publish_folder(pending, folder)
    except BaseException as error:
        shutil.rmtree(pending, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritable(folder, error) from None
        raise
    finally:
        stored.close()
    return sizes


def _unwritable(folder: Path, error: OSError | SafetensorError) -> ConfigError:
    """Return the error for a folder that can't be written: a full disk, or a limit on files."""
    words = error.strerror if isinstance(error, OSError) else None
    why = words or str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
    fix = "free disk space, or give --out another folder"
    return config_error("out", folder, f"can't be written ({why.lower()})", fix)


def verify_place(place: WeightsFolder) -> None:
    """Hash every file of a folder of ours.

    Raises:
        CheckpointError: a file is missing, damaged or not in the manifest.
    """
    try:
        manifest = read_manifest(place.folder, "export" if place.kind == "final" else "checkpoint")
        problems = stray_problems(place.folder, manifest)
        names = list(manifest.files)
        for name in counted(names, "verify", len(names)):
            problems += file_problems(place.folder, manifest, [name])
    except DamagedError as damage:
        problems = [str(damage)]
    if problems:
        raise CheckpointError(f"{problems[0]}. Fix: export another checkpoint (--checkpoint).")


def _files(place: WeightsFolder) -> list[str]:
    kind = "export" if place.kind == "final" else "checkpoint"
    manifest = read_manifest(place.folder, kind)
    return [name for name in manifest.files if name.endswith(".safetensors")]


def _check_names(place: WeightsFolder, stored: StoredTensors, made: Sequence[Link]) -> None:
    """Raise CheckpointError unless every row that is read is stored."""
    for part in (part for link in made for part in link.parts):
        rows = rows_in(stored.shapes.get(part.name, (0,)))
        if part.first + part.count > rows:
            raise CheckpointError(
                f"{place.folder}: {part.name} has {rows} rows of {part.first + part.count}. "
                "Fix: give the folder whose settings belong to the weights."
            )


def _write_tensors(
    pending: Path, stored: StoredTensors, made: Sequence[Link], target: HFTarget
) -> dict[str, int]:
    """Write the weights files and their index; return the bytes of each."""
    wide, narrow = torch.float32.itemsize, target.dtype.itemsize
    numbers = {link.name: link.numel * (wide if link.wide else narrow) for link in made}
    groups = weights_files(numbers, target.file_bytes)
    where = {name: file for file, names in groups.items() for name in names}
    sizes: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for link in counted(made, "export", len(made)):
        tensors[link.name] = _made(link, stored, target.dtype)
        if bad := int((~tensors[link.name].isfinite()).sum()):
            raise CheckpointError(
                f"{stored.folder}: {link.name} has {bad:,} values that are not finite in "
                f"{target.dtype}. Fix: export a checkpoint from before they appeared "
                "(--checkpoint STEP)."
            )
        file = where[link.name]
        if link.name == groups[file][-1]:
            save_file(tensors, pending / file, metadata={"format": "pt"})
            sync(pending / file)
            sizes[file] = sum(t.nbytes for t in tensors.values())
            tensors.clear()
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(pending / INDEX, index)
    return sizes


def _made(link: Link, stored: StoredTensors, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the folder."""
    wanted = torch.float32 if link.wide else dtype
    if not link.parts:
        return torch.zeros(link.shape, dtype=wanted)
    parts = [stored.rows(part.name, part.first, part.count) for part in link.parts]
    stacked_SW = parts[0] if len(parts) == 1 else torch.cat(parts)
    return link.make(stacked_SW).to(wanted).contiguous()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def lines_of(sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each weights file."""
    for name, size in sizes.items():
        yield f"  {name}: {size / 1e6:,.1f} MB"
