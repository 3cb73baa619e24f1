"""Row of the table of Hugging Face's classes, as data; no torch import here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp.blocks.descriptor import ForeignTensor
from megacpp.config.model import ModelConfig
from megacpp.interop.keys import KeyRule

Factor = float | Callable[[ModelConfig], float]


@dataclass(frozen=True)
class Change:
    """Rewrite of a tensor for a class; exact.

    Attributes:
        order: order of rows in place of the descriptor's.
        scale, shift: theirs = ours * scale + shift.
        pad: grows to the width of `n_shared_experts` experts by zeros: "rows" or "columns".
    """

    order: str = ""
    scale: Factor = 1.0
    shift: float = 0.0
    pad: str = ""


@dataclass(frozen=True)
class Zeros:
    """Tensor of theirs that ours lack, all zeros: name below a layer with the letter, and shape."""

    letter: str
    name: str
    shape: Callable[[ModelConfig], tuple[int, ...]]
    when: Callable[[ModelConfig], bool]


@dataclass(frozen=True, eq=False)
class HFClass:
    """Class of transformers.

    Attributes:
        name: in config.json's `architectures`.
        model_type: in config.json.
        fits: feature (features.py) -> values that the class expresses; empty: import only.
        rules: keys of config.json and settings.
        fixed: keys with one legal value.
        defaults: values of keys that a config.json may lack.
        implied: settings that the class alone decides, dotted below `model`.
        rename: replacements in names, in order.
        changes: rewrites by the name below a layer, before `rename`.
        zeros: tensors of zeros.
        tensors: letter -> tensors in place of those of the block kind.
        own: the folder has our tensors under our names, and our code that computes with them.
    """

    name: str
    model_type: str
    fits: Mapping[str, tuple[str, ...]]
    rules: tuple[KeyRule, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    rename: tuple[tuple[str, str], ...] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    zeros: tuple[Zeros, ...] = ()
    tensors: Mapping[str, tuple[ForeignTensor, ...]] = field(default_factory=dict)
    own: bool = False

    def misfits(self, found: Mapping[str, str]) -> list[str]:
        """Return features of a model that the class doesn't express."""
        return [name for name, value in found.items() if value not in self.fits.get(name, ())]
