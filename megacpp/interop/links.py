"""Tensors of a Hugging Face folder as rows of ours.

Every tensor there is some of our rows, stacked, in another order, perhaps among zeros, scaled or
shifted. The same link reads it back: a row of ours is one row there. A row is a tensor's last dim;
the numbers of a 1-d tensor are rows of one number.

Legend: R rows there, S rows of ours stacked, W numbers of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.blocks.descriptor import ForeignTensor
from megacpp.blocks.kinds import KINDS
from megacpp.config.model import ModelConfig
from megacpp.interop.hf_class import Change, HFClass
from megacpp.interop.keys import padded_units
from megacpp.interop.orders import ORDERS, grouped
from megacpp.interop.rewrites import IN_HALVES
from megacpp.model.count import meta_model
from megacpp.model.fp32 import contract_parameters
from megacpp.model.pattern import layer_kinds
from megacpp.state.tensors import model_tensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowSpan:
    """Rows of a tensor of ours: `count` from row `first` on."""

    name: str
    first: int
    count: int


@dataclass(frozen=True)
class Link:
    """Tensor of a folder, made of parts of ours.

    Attributes:
        name: in the folder.
        shape: there.
        parts: rows of ours, stacked from top to bottom.
        order: index `[R]` of each row there in the stack, -1: zeros; None: the stack as it is.
        scale, shift: theirs = ours * scale + shift.
        width: numbers of a row of ours; those behind them are zeros. 0: as many as there.
        wide: stays in fp32 whatever the folder's dtype.
    """

    name: str
    shape: Shape
    parts: tuple[RowSpan, ...]
    order: Tensor | None = None
    scale: float = 1.0
    shift: float = 0.0
    width: int = 0
    wide: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def make(self, stacked_SW: Tensor) -> Tensor:
        """Return the tensor there of our stacked rows."""
        rows = stacked_SW
        if self.scale != 1.0 or self.shift:
            rows = rows.float() * self.scale + self.shift
        width = self.shape[-1] if len(self.shape) > 1 else 1
        if rows.shape[1] < width:
            rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
        if self.order is not None:
            padded = torch.cat((rows, rows.new_zeros(1, width)))
            rows = padded[self.order]  # -1: the row of zeros behind them
        return rows.reshape(self.shape)

    def ours(self, rows_RW: Tensor) -> Tensor:
        """Return rows of ours of the rows there that hold them."""
        if self.scale != 1.0 or self.shift:
            return (rows_RW.float() - self.shift) / self.scale
        return rows_RW

    def rows_of_ours(self) -> Tensor | None:
        """Return the row there of each stacked row, `[S]`; None: the same."""
        if self.order is None:
            return None
        index_R = torch.arange(len(self.order))
        held = self.order >= 0
        found = torch.full((sum(part.count for part in self.parts),), -1)
        found[self.order[held]] = index_R[held]
        return found


def our_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of our tensors that a class may have, by name."""
    found: dict[str, Shape] = {"embed.weight": (model.vocab_size, model.dim)}
    for layer, kind in enumerate(layer_kinds(model)):
        found[f"blocks.{layer}.norm.weight"] = (model.dim,)
        for name, shape, _ in KINDS[kind[0]].shapes(model, kind):
            found[f"blocks.{layer}.mixer.{name}"] = shape
        if kind[0] == "E":
            router = f"blocks.{layer}.mixer.router"
            found[f"{router}.expert_bias"] = found[f"{router}.weight"][:1]
    found["norm.weight"] = (model.dim,)
    if not model.tie_embeddings:
        found["head.weight"] = (model.vocab_size, model.dim)
    return found


def links(
    one: HFClass,
    model: ModelConfig,
    more: Mapping[str, Sequence[ForeignTensor]] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Iterator[Link]:
    """Yield every tensor of a folder, in the order of the model.

    Args:
        one: class of the folder.
        model: settings.
        more: letter -> tensors in place of those of the class, as a folder has them.
        values: keys of the folder's config.json, which may change the order of rows.
    """
    if one.own:
        yield from _code_links(model)
        return
    shapes = our_shapes(model)
    changes = dict(one.changes)
    key = "rope_interleave"  # which other classes don't read
    if key in one.fixed and not (values or {}).get(key, True):
        changes |= IN_HALVES
    linker = _Linker(one, model, shapes, changes)
    yield linker.link("model.embed_tokens.weight", ForeignTensor("", ("embed.weight",)), "")
    for layer, kind in enumerate(layer_kinds(model)):
        there, ours = f"model.layers.{layer // 2}.", f"blocks.{layer}."
        norms = ("input", "post_attention", "post_feedforward")
        norm = f"{norms[layer % 2 + model.post_norm]}_layernorm"
        yield linker.link(there, ForeignTensor(f"{norm}.weight", ("norm.weight",)), ours)
        letter = kind[0]
        tensors = (more or {}).get(letter) or one.tensors.get(letter) or KINDS[letter].hf
        for tensor in tensors:
            mixer = f"{ours}mixer."
            if tensor.when(model) and all(f"{mixer}{name}" in shapes for name in tensor.ours):
                yield from linker.links(there, tensor, mixer)
        for zeros in one.zeros:
            if zeros.letter == letter and zeros.when(model):
                yield Link(linker.renamed(there + zeros.name), zeros.shape(model), ())
    yield linker.link("", ForeignTensor("model.norm.weight", ("norm.weight",)), "")
    if not model.tie_embeddings:
        yield linker.link("lm_head.weight", ForeignTensor("", ("head.weight",)), "")


def _code_links(model: ModelConfig) -> Iterator[Link]:
    """Yield the tensors of a folder with code of ours: each is itself, below `model.`."""
    built = meta_model(model)
    wide = {name for name, _ in (*contract_parameters(built), *built.named_buffers())}
    for name, t in model_tensors(built).items():
        part = RowSpan(name, 0, rows_in(t.shape))
        yield Link(f"model.{name}", tuple(t.shape), (part,), wide=name in wide)


def own_links(shapes: Mapping[str, Shape]) -> list[Link]:
    """Return links of a folder of ours: every tensor is itself."""
    return [
        Link(name, shape, (RowSpan(name, 0, rows_in(shape)),)) for name, shape in shapes.items()
    ]


def rows_in(shape: Sequence[int]) -> int:
    """Return the number of rows of a tensor."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


@dataclass(frozen=True)
class _Linker:
    """Makes links of a class."""

    one: HFClass
    model: ModelConfig
    shapes: Mapping[str, Shape]
    changes: Mapping[str, Change]

    def renamed(self, name: str) -> str:
        for before, after in self.one.rename:
            name = name.replace(before, after)
        return name

    def links(self, there: str, tensor: ForeignTensor, mixer: str) -> Iterator[Link]:
        """Yield a tensor's link, or one for each expert."""
        if "{e}" not in tensor.name:
            yield self.link(there, tensor, mixer)
            return
        (name,) = tensor.ours
        number, *shape = self.shapes[mixer + name]
        change = self.changes.get(tensor.name, Change())
        for e in range(number):
            part = RowSpan(mixer + name, e * shape[0], shape[0])
            title = self.renamed(there + tensor.name.format(e=e))
            yield Link(title, tuple(shape), (part,), scale=self._factor(change))

    def link(self, there: str, tensor: ForeignTensor, ours: str) -> Link:
        """Return the link of one tensor."""
        shapes = [self.shapes[ours + name] for name in tensor.ours]
        rows = [rows_in(shape) for shape in shapes]
        parts = tuple(RowSpan(ours + n, 0, r) for n, r in zip(tensor.ours, rows, strict=True))
        change = self.changes.get(tensor.name, Change())
        name = change.order or tensor.order
        order = ORDERS[name](self.model, rows) if name else None
        if (groups := tensor.groups(self.model)) > 1:
            order = grouped(rows, groups)
        shape, width = _joined(shapes, sum(rows) if order is None else len(order)), 0
        if change.pad == "columns":
            shape, width = (*shape[:-1], padded_units(self.model)), shape[-1]
        elif change.pad and shape[0] < (padded := padded_units(self.model)):
            order = torch.arange(padded)
            order[shape[0] :] = -1
            shape = (padded, *shape[1:])
        wide = tensor.name.endswith("e_score_correction_bias")
        scaled = self._factor(change), change.shift
        return Link(self.renamed(there + tensor.name), shape, parts, order, *scaled, width, wide)

    def _factor(self, change: Change) -> float:
        return change.scale(self.model) if callable(change.scale) else change.scale


def _joined(shapes: Sequence[Shape], rows: int) -> Shape:
    """Return the shape of stacked tensors: `rows` in all, the dim that grows is the first that may.

    Experts stay apart: `[E, I, D]` twice is `[E, 2I, D]`. Filters `[C, 1, J]` become more channels.
    """
    first = shapes[0]
    if len(first) < 3 or first[1] == 1:
        return (rows, *first[1:])
    return (first[0], rows // first[0], first[2])
