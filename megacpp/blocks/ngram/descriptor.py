"""Hashed n-grams as data: tables and a projection beside the token embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import ActivationLayout, ModelFeature, Parameter
from megacpp.blocks.ngram.sizes import ngram_primes, ngram_rows, ngram_width
from megacpp.config.schema import Config, ModelConfig

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def _dims(model: ModelConfig) -> Mapping[str, int]:
    ngram = model.ngram
    return {"Y": ngram_rows(ngram), "N": ngram.dim, "U": ngram_width(ngram)}


def _tensor_dims(model: ModelConfig) -> Mapping[str, int]:
    return {"the rows of all n-gram tables": ngram_rows(model.ngram)}


def _sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield looked-up rows, summed over `tp`."""
    here = own.tp > 1 and any(kind == "ngram" for kind, _ in parts)
    yield (
        "tp",
        "activations",
        2 * own.tokens * ngram_width(own.config.model.ngram) * own.compute * here,
    )


def _lines(config: Config) -> Iterator[str]:
    ngram = config.model.ngram
    yield (
        f"n-grams of 2 to {ngram.max_order} tokens: {len(ngram_primes(ngram))} tables, "
        f"{ngram_rows(ngram):,} rows of {ngram.dim}, zero at the start"
    )


NGRAM = ModelFeature(
    name="ngram",
    title="tables of hashed n-grams",
    present=lambda model: model.ngram.heads > 0,
    below="ngram.",
    parameters=(
        # Most rows of a table are rarely read: large steps, and no decay between two of them.
        Parameter(
            ("tables.weight",),
            "[Y_tp, N]",
            "adamw",
            decay=False,
            rate="embed_lr",
            factor=lambda model: model.ngram.lr_factor,
        ),
        Parameter(("proj.weight",), "[D, U]", "muon"),
    ),
    around=("ngram",),
    dims=_dims,
    lines=_lines,
    exported=(
        "model.ngram.heads",
        "no class has tables of hashed n-grams",
        "use model.ngram.heads=0",
    ),
    # Looked-up rows are narrower than the model, and projected after the exchange.
    layouts=(ActivationLayout("tables", None, "e[B, T, H, N]{tp} -> e[B, T_tp, H, N]"),),
    tensor_dims=_tensor_dims,
    hashes=True,
    sends=_sends,
    multiply_adds=lambda model, kind: model.dim * ngram_width(model.ngram) * (not kind),
)
