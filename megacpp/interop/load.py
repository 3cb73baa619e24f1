"""Weights of any known folder straight onto a mesh: each rank reads the rows that it stores.

Legend: S rows of a box of ours, W numbers of a row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp.config.model import ModelConfig
from megacpp.errors import CheckpointError, shortened
from megacpp.interop.hf_config import HFConfig, read_hf_config
from megacpp.interop.links import Link, links, our_shapes, own_links, rows_in
from megacpp.interop.places import WeightsFolder
from megacpp.interop.rewrites import STACKED_EXPERTS
from megacpp.interop.stored import StoredTensors
from megacpp.interop.vocabulary import add_rows, with_rows_of
from megacpp.model.count import meta_model
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice, whole
from megacpp.state.agreement import agreed, this_rank
from megacpp.state.export import INDEX
from megacpp.state.manifest import (
    UNREADABLE,
    DamagedError,
    file_problems,
    read_manifest,
    stray_problems,
)
from megacpp.state.tensors import model_tensors
from megacpp.terminal.progress import counted

# Tensors of published folders that no function of theirs reads, by their ends and their starts.
TABLES, AHEAD = (".rotary_emb.inv_freq",), "mtp."
FLOATS = ("F64", "F32", "F16", "BF16")
AT_ONCE = 1 << 20  # numbers that are read at once


@dataclass(frozen=True)
class WeightsSource:
    """Open folder of weights.

    Attributes:
        place: the folder.
        stored: its tensors.
        links: tensors of the folder as rows of ours.
        unused: tensors of the folder that aren't read.
        zeros: biases of routers that the class lacks because its scores need none.
        grown: tables of a larger vocabulary than the folder's.
    """

    place: WeightsFolder
    stored: StoredTensors
    links: Sequence[Link]
    unused: tuple[str, ...] = ()
    zeros: frozenset[str] = frozenset()
    grown: frozenset[str] = frozenset()


def open_source(place: WeightsFolder, model: ModelConfig) -> WeightsSource:
    """Open a folder and compare its tensors with a model's, by name and shape; no number is read.

    Args:
        place: the folder.
        model: settings of the model to fill.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape.
        ConfigError: a key of config.json that our settings don't express, or fewer ids.
    """
    there, grown = with_rows_of(place, model), frozenset[str]()
    wanted = _shapes(there)
    if there != model:
        sizes = _shapes(model)
        model, grown = there, frozenset(n for n in wanted if wanted[n] != sizes[n])
    if place.kind == "hf":
        source = _open_hf(place, read_hf_config(place.folder), model)
        for name in source.stored.shapes:
            if (dtype := source.stored.dtype(name)) not in FLOATS and name not in source.unused:
                raise CheckpointError(
                    f"{place.folder}: {name} has numbers of type {dtype}. "
                    "Fix: dequantise the weights first."
                )
    else:
        source = _open_own(place)
    found = [
        f"has no tensor {link.name}"
        for link in source.links
        if link.name not in source.stored.shapes
    ]
    read = {link.name for link in source.links}
    left = [name for name in source.stored.shapes if name not in read and name not in source.unused]
    found += [f"has a tensor {name} that the model has no place for" for name in left]
    found += [
        f"{link.name} is {list(have)}, the model needs {list(link.shape)}"
        for link in source.links
        if (have := source.stored.shapes.get(link.name, link.shape)) != link.shape
    ]
    ours = {part.name for link in source.links for part in link.parts} | source.zeros
    found += [f"has nothing for {name}" for name in wanted if name not in ours]
    found += [f"has {name}, which the model lacks" for name in sorted(ours - wanted.keys())]
    if place.kind != "hf":  # links of a Hugging Face folder are of these shapes
        found += [
            f"{name} is {list(source.stored.shapes[name])}, the model needs {list(shape)}"
            for name, shape in wanted.items()
            if source.stored.shapes.get(name, shape) != shape
        ]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise CheckpointError(
            f"{place.folder}: {found[0]}{more}. "
            "Fix: leave out the --model settings that differ from the folder's, or fetch it again."
        )
    return replace(source, grown=grown)


@torch.no_grad()
def load_weights(
    model: HybridLM,
    source: WeightsSource,
    part: Callable[[Tensor], Slice] = whole,
    seed: int = 0,
) -> None:
    """Fill a model's parameters and persistent buffers; every rank calls it.

    Files of ours are hashed first, a share on each rank.

    Args:
        model: model on any mesh.
        source: open folder; it is closed.
        part: what this process stores of a tensor.
        seed: of rows that the folder lacks.

    Raises:
        CheckpointError: the folder is damaged, or has numbers that the model can't hold; raised on
            every rank.
    """
    rank, world = this_rank()
    folder = source.place.folder
    with agreed(f"{folder}: cannot be loaded", "give another --checkpoint.init"):
        _verify(source, rank, world)
        for link in source.links[rank::world]:
            _check_zeros(source, link)
        if rank == 0:
            _check_tied(source)
    with agreed(f"{folder}: cannot be loaded", "give another --checkpoint.init"):
        where = _by_tensor(source.links)
        tensors = model_tensors(model).items()
        for name, t in counted(tensors, "read weights", len(tensors)) if rank == 0 else tensors:
            if name in source.zeros:
                part(t).local.zero_()
            else:
                _fill(part(t), where[name], source.stored)
            if name in source.grown:
                (rows,) = where[name]
                rule = model.init_rules()[name]
                add_rows(part(t), name, rule, seed, rows.link, source.stored)
    source.stored.close()


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model_tensors(meta_model(model)).items()}


# ---- folders ------------------------------------------------------------------------------------


def _open_own(place: WeightsFolder) -> WeightsSource:
    kind = "export" if place.kind == "final" else "checkpoint"
    try:
        manifest = read_manifest(place.folder, kind)
    except DamagedError as damage:
        raise CheckpointError(f"{damage}. Fix: give another folder.") from None
    files = [name for name in manifest.files if name.endswith(".safetensors")]
    stored = StoredTensors(place.folder, files, "" if place.kind == "final" else "model.")
    return WeightsSource(place, stored, own_links(stored.shapes))


def _open_hf(place: WeightsFolder, config: HFConfig, model: ModelConfig) -> WeightsSource:
    stored = StoredTensors(place.folder, _hf_files(place.folder))
    stacked = any(name.endswith(".experts.gate_up_proj") for name in stored.shapes)
    more = {"E": STACKED_EXPERTS} if stacked else None
    made = list(links(config.one, model, more, config.values))
    ahead = re.compile(r"model\.layers\.(\d+)\.")  # layers behind the last predict further tokens
    layers = config.values["num_hidden_layers"]
    if "num_nextn_predict_layers" not in config.one.fixed:
        layers = math.inf
    unused = tuple(
        name
        for name in stored.shapes
        if name.endswith(TABLES)
        or name.startswith(AHEAD)
        or ((number := ahead.match(name)) is not None and int(number[1]) >= layers)
        or (model.tie_embeddings and name == "lm_head.weight")
    )
    covered = {part.name for link in made for part in link.parts}
    zeros = {n for n in our_shapes(model).keys() - covered if n.endswith("router.expert_bias")}
    return WeightsSource(place, stored, made, unused, frozenset(zeros))


def _hf_files(folder: Path) -> list[str]:
    """Return the names of the weights files of a Hugging Face folder."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            inside = [n for n in names if Path(n).name == n and n.endswith(".safetensors")]
            if wrong := names.difference(inside):
                raise ValueError(f"{shortened(min(wrong))} is no safetensors file of the folder")
            return sorted(names)
        except UNREADABLE as error:
            raise CheckpointError(
                f"{index}: can't be read ({shortened(error)}). Fix: fetch the file again."
            ) from None
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise CheckpointError(
        f"{folder}: has no model.safetensors and no {INDEX}. "
        "Fix: fetch the safetensors files; .bin files are pickles and aren't read."
    )


def _verify(source: WeightsSource, rank: int, world: int) -> None:
    if source.place.kind == "hf":
        return  # no hashes there; opening compared the header with the length of the file
    folder = source.place.folder
    manifest = read_manifest(folder, "export" if source.place.kind == "final" else "checkpoint")
    names = sorted(manifest.files)[rank::world]
    problems = stray_problems(folder, manifest) + file_problems(folder, manifest, names)
    if problems:
        raise CheckpointError(f"{problems[0]}. Fix: give another --checkpoint.init.")


def _check_zeros(source: WeightsSource, link: Link) -> None:
    """Raise CheckpointError if numbers of the folder that no tensor of ours holds aren't zero."""
    rows_R, columns = _unheld(link)
    width = max(1, link.shape[-1]) if len(link.shape) > 1 else 1
    for some_R in rows_R.split(max(1, AT_ONCE // width)):
        if len(some_R) and bool(_read(source.stored, link.name, some_R, columns).any()):
            raise CheckpointError(
                f"{source.place.folder}: {link.name} has numbers that aren't zero where no tensor "
                "of ours has any (a gate, a bias or a wider shared expert). "
                "Fix: take another model."
            )


def _check_tied(source: WeightsSource) -> None:
    """Raise CheckpointError if the head of a model with tied weights isn't the embedding."""
    head, embed, stored = "lm_head.weight", "model.embed_tokens.weight", source.stored
    if head not in source.unused or embed not in stored.shapes:
        return
    same = stored.shapes[head] == (shape := stored.shapes[embed])
    for some_R in torch.arange(shape[0]).split(max(1, AT_ONCE // shape[1])) if same else ():
        every = slice(None)
        same &= torch.equal(*(_read(stored, name, some_R, every) for name in (head, embed)))
    if not same:
        raise CheckpointError(
            f"{source.place.folder}: config.json says tie_word_embeddings, and {head} isn't the "
            "embedding. Fix: set it to false there, or remove the tensor."
        )


def _unheld(link: Link) -> tuple[Tensor, slice]:
    """Return rows `[R]` of a tensor of the folder, and their columns, that none of ours holds."""
    rows_R = torch.arange(rows_in(link.shape))
    if link.parts and link.width == 0:
        return rows_R[:0] if link.order is None else rows_R[link.order < 0], slice(None)
    return rows_R, slice(link.width, None)


# ---- tensors ------------------------------------------------------------------------------------


class RowsOfLink(NamedTuple):
    """Rows of a tensor of ours in a link: `count` from `first` on, in its stack from `start`."""

    link: Link
    first: int
    count: int
    start: int


Where = list[RowsOfLink]


def _by_tensor(made: Sequence[Link]) -> Mapping[str, Where]:
    """Return the links that hold rows of each tensor of ours."""
    found: dict[str, Where] = {}
    for link in made:
        start = 0
        for part in link.parts:
            found.setdefault(part.name, []).append(RowsOfLink(link, part.first, part.count, start))
            start += part.count
    return found


def _fill(target: Slice, where: Where, stored: StoredTensors) -> None:
    """Copy this rank's box of a tensor from the files, some rows at a time."""
    local = target.local
    if local.numel() == 0:
        return
    rows_S, columns = _box_rows(target)
    width = local.numel() // len(rows_S)
    into_SW = local.view(-1, width) if local.is_contiguous() else local.reshape(-1, width)
    step = max(1, AT_ONCE // width)
    for some_S, into in zip(rows_S.split(step), into_SW.split(step), strict=True):
        for held in where:
            _copy_rows(into, some_S, held, columns, stored)
    if not local.is_contiguous():
        local.copy_(into_SW.view(local.shape))


def _copy_rows(
    into_SW: Tensor, rows_S: Tensor, held: RowsOfLink, columns: slice, stored: StoredTensors
) -> None:
    """Copy those of some rows of ours that a link holds."""
    mine_S = (rows_S >= held.first) & (rows_S < held.first + held.count)
    if not bool(mine_S.any()):
        return
    there = rows_S[mine_S] - held.first + held.start
    if (inverse := held.link.rows_of_ours()) is not None:
        there = inverse[there]
    values = held.link.ours(_read(stored, held.link.name, there, columns)).to(into_SW.dtype)
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"{stored.folder}: {held.link.name} has numbers that aren't finite in "
            f"{values.dtype}. Fix: take another model."
        )
    values = values.to(into_SW.device)
    if bool(mine_S.all()):
        into_SW.copy_(values)
    else:
        into_SW[mine_S.to(into_SW.device)] = values


def _read(stored: StoredTensors, name: str, rows_R: Tensor, columns: slice) -> Tensor:
    """Return rows `[R, W]` of a tensor of the folder; none between them is read."""
    sorted_R, places_R = rows_R.unique(return_inverse=True)
    runs = sorted_R.tensor_split((sorted_R.diff() > 1).nonzero().flatten() + 1)
    read = [stored.rows(name, int(run_R[0]), len(run_R), columns) for run_R in runs]
    found = read.pop() if len(read) == 1 else torch.cat(read)
    return found if torch.equal(sorted_R, rows_R) else found[places_R]


def _box_rows(target: Slice) -> tuple[Tensor, slice]:
    """Return the rows `[S]` of a box in the whole tensor, and its columns."""
    sizes, offset, shape = tuple(target.local.shape), target.offset, target.shape
    columns = slice(None)
    if len(shape) > 1:
        columns = slice(offset[-1], offset[-1] + sizes[-1])
        sizes, offset, shape = sizes[:-1], offset[:-1], shape[:-1]
    rows = torch.zeros(1, dtype=torch.int64)
    for size, at, whole_size in zip(sizes, offset, shape, strict=True):
        rows = (rows[:, None] * whole_size + at + torch.arange(size)).flatten()
    return rows, columns
