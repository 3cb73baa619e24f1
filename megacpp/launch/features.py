"""Header lines about the model's features beyond plain blocks; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.attention.sparse_checks import sparse_lines
from megacpp.blocks.engram.sizes import engram_parameters
from megacpp.blocks.experts.choices import columns, null_copies
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.hyper_connections.groups import stream_groups
from megacpp.blocks.mtp.plan import depth_weights
from megacpp.config.schema import Config
from megacpp.model.pattern import layer_kinds
from megacpp.model.sizes import ngram_primes, ngram_rows


def feature_lines(config: Config) -> list[str]:
    """Return a line for each enabled feature; none for a plain model."""
    return [*sparse_lines(config), *_beside_the_head(config), *_memories(config), *_rest(config)]


def _beside_the_head(config: Config) -> Iterator[str]:
    mtp, top = config.model.mtp, config.model.top
    if mtp.depths:
        weights = ", ".join(f"{weight:.3g}" for weight in depth_weights(mtp))
        block = "one block" if mtp.shared else "a block each"
        later = f", {mtp.loss_final:g} later" if mtp.switch < 1 else ""
        yield (
            f"further tokens: {mtp.depths} by {block}, {mtp.loss:g} of the loss{later}, "
            f"weights {weights}"
        )
    if top.loss:
        yield f"token order: {top.loss:g} of the loss, {top.window} tokens ahead"


def _memories(config: Config) -> Iterator[str]:
    ngram, engram = config.model.ngram, config.model.engram
    if ngram.heads:
        yield (
            f"n-grams of 2 to {ngram.max_order} tokens: {len(ngram_primes(ngram))} tables, "
            f"{ngram_rows(ngram):,} rows of {ngram.dim}, zero at the start"
        )
    layers = [i for i, kind in enumerate(layer_kinds(config.model)) if "+engram" in kind]
    if layers:
        yield (
            f"n-gram memories in front of layers {', '.join(map(str, layers))}: 2 to "
            f"{engram.max_order} tokens, {engram_parameters(config.model):,} parameters each, "
            "zero at the start"
        )


def _rest(config: Config) -> Iterator[str]:
    mhc, moe = config.model.mhc, config.model.moe
    if mhc.streams > 1:
        groups = stream_groups(config)
        again = (
            f"mixed again in {len(groups)} groups of layers" if groups else "kept by every layer"
        )
        yield f"{mhc.streams} residual streams ({mhc.ordering}, {mhc.iterations} rounds), {again}"
    if "E" in layer_kinds(config.model):
        yield from _routing(moe)
        if moe.capacity_factor is not None:
            whose = "each rank's tokens"
            if config.mesh.ep > 1 and config.mesh.ep_dispatch == "padded":
                whose = f"the tokens of {config.mesh.ep} ranks"
            yield (
                f"experts take up to {moe.capacity_factor:g} times an even share of {whose} and "
                "drop the rest: the loss depends on the mesh"
            )


def _routing(moe: MoEConfig) -> Iterator[str]:
    if null_copies(moe):
        yield (
            f"null experts: a token chooses {columns(moe)} of {moe.num_experts} experts and "
            f"{null_copies(moe)} nulls, {moe.top_k} experts on average"
        )
    if moe.num_groups > 1:
        yield f"experts in {moe.num_groups} groups, of which a token visits {moe.top_k_groups}"
