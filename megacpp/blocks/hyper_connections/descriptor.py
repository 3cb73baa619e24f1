"""Hyper-connections as data: coefficients around each layer, which mix the residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megacpp.blocks.descriptor import ModelFeature, Parameter
from megacpp.config.schema import Config, ModelConfig

GATES = 3  # numbers that scale what is read, written and mixed


def _dims(model: ModelConfig) -> Mapping[str, int]:
    n = model.mhc.streams
    return {"K": n * n + 2 * n, "C": model.stream_width, "G": GATES}


def _lines(config: Config) -> Iterator[str]:
    from megacpp.blocks.hyper_connections.groups import stream_groups

    mhc, groups = config.model.mhc, stream_groups(config)
    again = f"mixed again in {len(groups)} groups of layers" if groups else "kept by every layer"
    yield f"{mhc.streams} residual streams ({mhc.ordering}, {mhc.iterations} rounds), {again}"


HYPER_CONNECTIONS = ModelFeature(
    name="mhc",
    title="residual streams",
    present=lambda model: model.mhc.streams > 1,
    below="blocks.*.connection.",
    # Whole on each rank, which mixes the streams of its own tokens.
    parameters=(
        Parameter(("phi",), "[K, C]", "adamw", fp32=True),  # to a few numbers of a token
        Parameter(("scale",), "[G]", "vector", fp32=True),
        Parameter(("bias",), "[K]", "vector", fp32=True),
    ),
    around=("spread", "collapse"),
    dims=_dims,
    lines=_lines,
    exported=(
        "model.mhc.streams",
        "no class has several residual streams",
        "use model.mhc.streams=1",
    ),
)
