"""Rules of sparse attention; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.attention.checks import odd_rotation
from megacpp.config.schema import Config, ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import block_letters, layer_kinds, named_ranks

KEY = "model.attention.sparse"


def sparse_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `model.attention.sparse`; none where no layer is named."""
    a, sparse = config.model.attention, config.model.attention.sparse
    try:
        layer_kinds(config.model)
    except ConfigError:
        return  # reported by the rules of the model
    if not sparse.layers.strip():
        yield from _nothing_sparse(config)
        return
    least = a.qk_rope_head_dim if a.kind == "mla" else 2
    if sparse.head_dim < least or sparse.head_dim % 2:
        wide = max(least, sparse.head_dim)
        rotated = f"the {least} rotary dims of MLA" if a.kind == "mla" else "a rotary pair"
        yield config_error(
            f"{KEY}.head_dim",
            sparse.head_dim,
            f"holds {rotated}, and must be even",
            f"use {wide + wide % 2}",
        )
    elif a.kind == "gqa" and odd_rotation(sparse.head_dim, a.rope_fraction):
        wider = range(sparse.head_dim + 2, sparse.head_dim + 2048, 2)
        fits = [dim for dim in wider if not odd_rotation(dim, a.rope_fraction)]
        yield config_error(
            f"{KEY}.head_dim",
            sparse.head_dim,
            f"rotary pairs need an even number of dims, model.attention.rope_fraction="
            f"{a.rope_fraction:g} takes {int(sparse.head_dim * a.rope_fraction)} of it",
            f"use {fits[0]}" if fits else "use model.attention.rope_fraction=1",
        )
    strange = set(_ranks(config.model, "own")) - set(_ranks(config.model, "layers"))
    if strange:
        yield config_error(
            f"{KEY}.own",
            sparse.own,
            f"ranks that choose for themselves are sparse ones ({KEY}.layers={sparse.layers})",
            f"leave {min(strange)} out, or name it there",
        )
    yield from _neighbours(config)
    if sparse.stage == "dense":
        yield from _warm_up(config)


def sparse_lines(config: Config) -> Iterator[str]:
    """Yield a line that names the layers that choose keys and those that share, for the header."""
    kinds, sparse = layer_kinds(config.model), config.model.attention.sparse
    chooses = [i for i, kind in enumerate(kinds) if "A.index" in kind]
    shares = [i for i, kind in enumerate(kinds) if "A.share" in kind]
    if chooses and sparse.stage == "dense":
        yield (
            f"sparse attention, warm-up: all keys are attended to, only the indexers of layers "
            f"{_listed(chooses)} are trained"
        )
    elif chooses:
        taken = f", taken over by {_listed(shares)}" if shares else ""
        yield f"sparse attention: {sparse.top_k} keys chosen in layers {_listed(chooses)}{taken}"


def _nothing_sparse(config: Config) -> Iterator[ConfigError]:
    """Yield settings that have no effect without sparse layers."""
    sparse = config.model.attention.sparse
    for name, default in (("own", ""), ("stage", "sparse")):
        if getattr(sparse, name) != default:
            yield config_error(
                f"{KEY}.{name}",
                getattr(sparse, name),
                "no layer is sparse",
                f"name some in {KEY}.layers",
            )


def _neighbours(config: Config) -> Iterator[ConfigError]:
    """Yield settings of other features under which keys would be chosen twice."""
    policy = config.recompute
    if config.precision.fp8 == "te" and policy.ablock == "full":
        yield config_error(
            "recompute.ablock",
            policy.ablock,
            "Transformer Engine's recomputation would choose keys again (precision.fp8=te)",
            "use recompute.ablock=none, or precision.fp8=torchao",
        )


def _warm_up(config: Config) -> Iterator[ConfigError]:
    """Yield settings that a warm-up, in which only indexers are trained, excludes."""
    for name, value, off, why in (
        ("optim.qk_clip", config.optim.qk_clip, 0, "it would scale weights that are to stay"),
        ("recompute.compress", config.recompute.compress, 0, "it compresses what isn't trained"),
    ):
        if value > off:
            yield config_error(
                name, value, f"{why} ({KEY}.stage=dense)", f"use {name}={off} for the warm-up"
            )


def _ranks(model: ModelConfig, name: str) -> list[int]:
    count = block_letters(model.pattern, model.depth).count("A")
    return named_ranks(f"{KEY}.{name}", getattr(model.attention.sparse, name), count)


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
