"""Which linear layers may compute in FP8, and what FP8 can't be combined with; no torch here.

FP8 multiplies numbers of 8 bits, each tensor or row scaled to their range first. Where the scale is
taken from what is multiplied (torchao, `dynamic`) a recomputation finds the same one. Where it is
taken from a history of largest values (Transformer Engine, `delayed`) the forward changes that
history, so running it again finds another scale, and gradients that fit no forward, unless the
recomputation is Transformer Engine's own, which puts the history aside.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from megacpp.config import Config, ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import block_letters
from megacpp.model.pieces import layer_pieces

MULTIPLE = 16  # of both dims of a weight, and of the tokens where they are summed over in FP8
PACKAGES = {"torchao": "torchao", "te": "transformer_engine"}


def fp8_layers(model: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """Letter to layer to (rows, columns) of its weight: what FP8 is for.

    Projections of attention and feed-forwards; never routers, norms, latents, recurrent mixers or
    experts.
    """
    a, D = model.attention, model.dim
    if a.kind == "mla":
        queries, values = a.qk_nope_head_dim + a.qk_rope_head_dim, a.num_heads * a.v_head_dim
        attention = {"wo": (D, values)}
        if not a.q_lora_rank:
            attention["wq"] = (a.num_heads * queries, D)
    else:
        heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        attention = {"wq": (heads, D), "wk": (kv, D), "wv": (kv, D), "wo": (D, heads)}
    F = model.mlp.hidden_dim
    feed_forward = {"w1": (F, D), "w2": (D, F)}
    if model.mlp.activation == "swiglu":
        feed_forward["w3"] = (F, D)
    return {"A": attention, "F": feed_forward}


def divides(rows: int, columns: int) -> bool:
    """The hardware multiplies FP8 numbers 16 at a time."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def fp8_letters(model: ModelConfig) -> set[str]:
    """Kinds of block of a model in which something computes in FP8."""
    kinds = {k for k, layers in fp8_layers(model).items() if any(map(_divides, layers.values()))}
    return kinds & set(block_letters(model.pattern, model.depth))


def fp8_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `precision.fp8`."""
    fp8 = config.precision.fp8
    if fp8 == "off":
        return
    if not fp8_letters(config.model):
        yield config_error(
            "precision.fp8",
            fp8,
            f"no projection of an A or F block has dims that are multiples of {MULTIPLE}",
            "use precision.fp8=off, or such dims",
        )
    if importlib.util.find_spec(PACKAGES[fp8]) is None:
        package = PACKAGES[fp8].replace("_", "-")
        yield config_error(
            "precision.fp8",
            fp8,
            f"needs {package}, which isn't installed",
            f"pip install {package}, or use precision.fp8=off",
        )
    yield from _numbers(config)
    yield from _mesh(config)
    yield from _recompute(config)


def _numbers(config: Config) -> Iterator[ConfigError]:
    """Dtypes and sizes."""
    precision, train, fp8 = config.precision, config.train, config.precision.fp8
    if fp8 == "te" and train.device == "cpu":
        yield config_error(
            "precision.fp8", fp8, "runs on a GPU alone", "use precision.fp8=torchao, or off"
        )
    emulated = fp8 == "torchao" and train.device == "cpu"
    if precision.dtype in ("fp16", "fp64") or (precision.dtype == "fp32" and not emulated):
        yield config_error(
            "precision.fp8",
            fp8,
            f"multiplies what is in bf16 otherwise (precision.dtype={precision.dtype})",
            "use precision.dtype=bf16, or precision.fp8=off",
        )
    tokens = train.device_batch_size * config.data.seq_len
    if fp8 == "te" and tokens % MULTIPLE:
        yield config_error(
            "precision.fp8",
            fp8,
            f"tokens of a microbatch must be a multiple of {MULTIPLE} (device_batch_size * seq_len "
            f"= {tokens})",
            "use such a data.seq_len, or precision.fp8=torchao",
        )
    if config.recompute.compress:
        yield config_error(
            "recompute.compress",
            config.recompute.compress,
            f"replaces the same linear layers as precision.fp8={fp8}",
            "use recompute.compress=0, or precision.fp8=off",
        )


def _mesh(config: Config) -> Iterator[ConfigError]:
    """A scale must not depend on how a tensor is cut."""
    fp8, mesh = config.precision.fp8, config.mesh
    if mesh.tp > 1:
        yield config_error(
            "mesh.tp",
            mesh.tp,
            f"each rank would scale its part of a row by itself (precision.fp8={fp8}), so the loss "
            "would depend on the mesh",
            "use mesh.tp=1, or precision.fp8=off",
        )
    if fp8 != "te":
        return
    for axis in ("pp", "cp", "ep"):
        if getattr(mesh, axis) > 1:
            yield config_error(
                f"mesh.{axis}",
                getattr(mesh, axis),
                "Transformer Engine agrees on scales over all ranks after a forward, which here "
                "run other layers or other tokens of a row",
                f"use mesh.{axis}=1, or precision.fp8=torchao",
            )


def _recompute(config: Config) -> Iterator[ConfigError]:
    """An FP8 layer runs again only under the recomputation that finds the same scales."""
    fp8, policy, kinds = config.precision.fp8, config.recompute, fp8_letters(config.model)
    if config.train.compile != "off":  # the policy is not used then
        if fp8 == "te":
            yield config_error(
                "train.compile",
                config.train.compile,
                "the compiler would run Transformer Engine's FP8 layers again without their "
                "history of scales",
                "use train.compile=off, or precision.fp8=torchao",
            )
        return
    letters = block_letters(config.model.pattern, config.model.depth)
    layers = zip(letters, layer_pieces(policy, config.model), strict=True)
    found = {(letter, piece) for letter, pieces in layers if letter in kinds for piece in pieces}
    whole = sorted({letter for letter, piece in found if piece == "block"})
    key = f"recompute.{whole[0].lower()}block" if whole else ""
    if fp8 == "te" and whole and policy.fp8_wrapper != "te_checkpoint":
        yield config_error(
            "recompute.fp8_wrapper",
            policy.fp8_wrapper,
            f"{key}=full runs FP8 blocks again, and any recomputation but Transformer Engine's own "
            "loses their history of largest values: other scales, wrong gradients",
            "use recompute.fp8_wrapper=te_checkpoint",
        )
    if fp8 == "te" and ("F", "mlp") in found:
        yield config_error(
            "recompute.mlp",
            True,
            "runs w1 and w3 of F blocks again without Transformer Engine's history of scales",
            "use recompute.fblock=full with recompute.fp8_wrapper=te_checkpoint",
        )
    again = whole or ("F", "mlp") in found
    if fp8 == "torchao" and again and policy.fp8_wrapper != "torchao":
        yield config_error(
            "recompute.fp8_wrapper",
            policy.fp8_wrapper,
            f"{key or 'recompute.mlp'} runs layers of torchao again, which Transformer Engine's "
            "recomputation doesn't know; their scales need none of it",
            "use recompute.fp8_wrapper=torchao",
        )


def _divides(shape: tuple[int, int]) -> bool:
    return divides(*shape)
