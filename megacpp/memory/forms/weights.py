"""Parameters of every kind of block with their dims, cuts and optimizers; no torch import.

Mixers come from the descriptors of megacpp/blocks, the rest of the model is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megacpp.blocks.engram.sizes import engram_shapes
from megacpp.blocks.kinds import KINDS
from megacpp.blocks.mtp.plan import block_model, num_blocks
from megacpp.config.schema import ModelConfig
from megacpp.model.sizes import ngram_rows, ngram_width, projected_width

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
        return (Weight("top.unembed.weight", (model.vocab_size, model.dim), 0),)
    if kind == "ngram":
        width = ngram_width(model.ngram)
        return (
            Weight("ngram.tables.weight", (ngram_rows(model.ngram), model.ngram.dim), 0),
            Weight("ngram.proj.weight", (model.dim, width), muon=True),
        )
    norm = Weight("norm.weight", (model.dim,), wide=True)
    if kind in ("spread", "collapse"):
        return ()
    if kind == "norm":
        return (norm,)
    if kind == "mtp":
        return tuple(_depths(model))
    memory = engram_shapes(model) if "+engram" in kind else ()
    found = [norm, *(Weight(*shape) for shape in memory)]
    for w, compressible in _mixer(model, kind):
        if compress and compressible:
            width = projected_width(model.dim, compress)
            found += [
                Weight(w.name, w.shape, w.tp, folded=True),
                Weight(f"{w.name}.latent", (w.shape[0], width), w.tp, latent=True),
            ]
        else:
            found.append(w)
    return (*found, *_connection(model))


def _depths(model: ModelConfig) -> Iterator[Weight]:
    """Yield parameters of all blocks of multi-token prediction."""
    plain, d = block_model(model), model.dim
    (norm,) = weights(model, "norm")
    for _ in range(num_blocks(model.mtp)):
        yield replace(norm, name="embed_norm")
        yield replace(norm, name="hidden_norm")
        yield replace(norm, name="projection", shape=(d, 2 * d), wide=False, muon=True)
        yield from (*weights(plain, "A"), *weights(plain, "F"), norm)


def _mixer(model: ModelConfig, kind: str) -> Iterator[tuple[Weight, bool]]:
    """Yield parameters of a mixer, and whether `recompute.compress` applies to their layer."""
    for name, shape, row in KINDS[kind[0]].shapes(model, kind):
        weight = Weight(
            name.removesuffix(".weight").removeprefix("experts."),
            shape,
            row.dim_on("tp"),
            muon=row.group == "muon",
            wide=row.fp32,
            experts=row.dim_on("ep") is not None,
            heights=row.rows(model) if row.rows else (),
        )
        yield weight, row.compress


def _connection(model: ModelConfig) -> Iterator[Weight]:
    """Yield parameters of hyper-connections, which every layer has."""
    n = model.mhc.streams
    if n > 1:
        coefficients = n * n + 2 * n
        yield Weight("connection.phi", (coefficients, n * model.dim), wide=True)
        yield Weight("connection.scale", (3,), wide=True)
        yield Weight("connection.bias", (coefficients,), wide=True)
