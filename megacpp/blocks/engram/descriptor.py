"""N-gram memories (Engram) as data: tables in front of some A blocks, read into the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megacpp.blocks.descriptor import ActivationLayout, ModelFeature, Parameter
from megacpp.blocks.engram.checks import engram_rules
from megacpp.blocks.engram.sizes import (
    ROWS_MULTIPLE,
    memory_width,
    multiply_adds,
    sends,
    shared_bytes,
    table_rows,
)
from megacpp.config.schema import Config, ModelConfig
from megacpp.model.pattern import layer_kinds

MEMORY = "+engram"  # in the kind of a layer that has one


def _dims(model: ModelConfig) -> Mapping[str, int]:
    e = model.engram
    return {
        "Y": table_rows(model),
        "N": e.dim // e.heads,
        "M": memory_width(model),
        "C": model.stream_width,
        "J": e.conv_kernel,
    }


def _each_stream(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of the key projection's matrices, one for each residual stream."""
    streams = model.stream_width // model.dim
    return (model.dim,) * streams if streams > 1 else ()


def _tensor_dims(model: ModelConfig) -> Mapping[str, int]:
    return {
        "model.dim, channels of model.engram": model.dim,
        "rows of the tables of model.engram": ROWS_MULTIPLE,
    }


def _lines(config: Config) -> Iterator[str]:
    model, e = config.model, config.model.engram
    layers = [i for i, kind in enumerate(layer_kinds(model)) if MEMORY in kind]
    if layers:
        yield (
            f"n-gram memories in front of layers {', '.join(map(str, layers))}: 2 to "
            f"{e.max_order} tokens, {ENGRAM.numel(model, MEMORY):,} parameters each, "
            "zero at the start"
        )


ENGRAM = ModelFeature(
    name="engram",
    title="n-gram memories",
    present=lambda model: bool(model.engram.layers.strip()),
    below="blocks.*.engram.",
    parameters=(
        Parameter(
            ("tables.weight",),
            "[Y_tp, N]",
            "adamw",
            decay=False,
            rate="embed_lr",
            factor=lambda model: model.engram.lr_factor,
            within=MEMORY,
        ),
        Parameter(("wk.weight",), "[C, M]", "muon", rows=_each_stream, within=MEMORY),
        Parameter(("wk.bias",), "[C]", "vector", within=MEMORY),
        Parameter(("wv.weight",), "[D, M]", "muon", within=MEMORY),
        Parameter(("wv.bias",), "[D]", "vector", within=MEMORY),
        Parameter(
            ("key_norm.weight", "x_norm.weight", "value_norm.weight"),
            "[C]",
            "vector",
            fp32=True,
            within=MEMORY,
        ),
        Parameter(("conv.weight",), "[C_tp, O, J]", "adamw", decay=False, within=MEMORY),
    ),
    dims=_dims,
    lines=_lines,
    exported=("model.engram.layers", "no class has n-gram memories", "use model.engram.layers=''"),
    # All ranks look a memory up, each in its rows; its convolution needs all tokens.
    layouts=(
        ActivationLayout("tables", None, "e[B, T, H, N]{tp} -> e[B, T_tp, H, N]"),
        ActivationLayout(
            "conv", "v[B, T_tp, C] -> v[B, T, C_tp]", "v[B, T, C_tp] -> v[B, T_tp, C]"
        ),
    ),
    checks=engram_rules,
    tensor_dims=_tensor_dims,
    hashes=True,
    shared_bytes=shared_bytes,
    sends=sends,
    multiply_adds=multiply_adds,
    taps=lambda model: (model.engram.conv_kernel - 1) * model.engram.max_order + 1,
)
