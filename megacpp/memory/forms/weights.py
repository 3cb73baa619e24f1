"""Parameters of every kind of block with their dims, cuts and optimizers; no torch import.

Mixers come from the descriptors of megacpp/blocks, the rest of the model is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megacpp.blocks.descriptor import Parameter
from megacpp.blocks.features import FEATURES, ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.model.sizes import projected_width

Shape = tuple[int, ...]
COPY = "copy"  # of the embedding, in a last stage that looks tokens up
LEFT_ALONE = "+whole"  # ends the kind of the last layer where others keep projections


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameter of a model.

    Attributes:
        name: below the mixer of a block; of other parts, the whole name.
        shape: dims before any cut.
        tp: the dim that is cut over `tp`; None: whole on each of its ranks.
        muon: it is a hidden matrix, updated by Muon if Muon is used.
        wide: it stays in fp32 and belongs to the root unit.
        experts: it belongs to routed experts, whose dim is the first.
        heights: rows of the matrices that it holds; empty: one matrix, or one for each expert.
        latent: it is updated in place of another weight (`recompute.compress`).
        folded: it is that other weight.
    """

    name: str
    shape: Shape
    tp: int | None = None
    muon: bool = False
    wide: bool = False
    experts: bool = False
    heights: tuple[int, ...] = ()
    latent: bool = False
    folded: bool = False


@lru_cache(maxsize=256)
def weights(model: ModelConfig, kind: str, compress: float = 0.0) -> tuple[Weight, ...]:
    """Return the parameters of one layer of a kind, or of `embed`, `norm` or `head`."""
    compress *= not kind.endswith(LEFT_ALONE)
    if kind in ("embed", "head", COPY):
        return (Weight(f"{kind}.weight", (model.vocab_size, model.dim), 0),)
    if kind == "top":
        return tuple(_of_feature(kind, model, "top."))
    if kind == "ngram":  # whose tables get their gradient last
        return tuple(_of_feature(kind, model, "ngram."))[::-1]
    norm = Weight("norm.weight", (model.dim,), wide=True)
    if kind in ("spread", "collapse"):
        return ()
    if kind == "norm":
        return (norm,)
    for blocks in ahead_blocks(model):
        if kind == blocks.name:
            mixers = [w for letter in blocks.letters for w, _ in _mixer(blocks.model, letter)]
            return (*_of_feature(kind, model), *mixers) * blocks.number
    found = [norm, *_of_feature("engram", model, "engram.", kind)]
    for w, compressible in _mixer(model, kind):
        if compress and compressible:
            width = projected_width(model.dim, compress)
            found += [
                Weight(w.name, w.shape, w.tp, folded=True),
                Weight(f"{w.name}.latent", (w.shape[0], width), w.tp, latent=True),
            ]
        else:
            found.append(w)
    return (*found, *_of_feature("mhc", model, "connection.", kind))


def _mixer(model: ModelConfig, kind: str) -> Iterator[tuple[Weight, bool]]:
    """Yield parameters of a mixer, and whether `recompute.compress` applies to their layer."""
    for name, shape, row in KINDS[kind[0]].shapes(model, kind):
        short = name.removesuffix(".weight").removeprefix("experts.")
        yield _weight(short, shape, row, model), row.compress


def _of_feature(name: str, model: ModelConfig, below: str = "", kind: str = "") -> Iterator[Weight]:
    """Yield parameters of a feature, of one layer where it stands in layers; none if absent.

    Args:
        name: of `FEATURES`.
        model: settings.
        below: beginning of their names.
        kind: of the layer.
    """
    for short, shape, row in FEATURES[name].shapes(model, kind):
        yield _weight(below + short, shape, row, model)


def _weight(name: str, shape: Shape, row: Parameter, model: ModelConfig) -> Weight:
    """Return a parameter as its row of a descriptor says.

    Args:
        name: of the parameter.
        shape: of it.
        row: with its layout and group.
        model: settings.
    """
    return Weight(
        name,
        shape,
        row.dim_on("tp"),
        muon=row.group == "muon",
        wide=row.fp32,
        experts=row.dim_on("ep") is not None,
        heights=row.rows(model) if row.rows else (),
    )
