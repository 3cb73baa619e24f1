"""Multi-token prediction as data: blocks behind the last layer, in training alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megacpp.blocks.descriptor import ModelFeature, Parameter
from megacpp.blocks.mtp.checks import mtp_rules
from megacpp.blocks.mtp.plan import depth_weights, hidden_width
from megacpp.config.schema import Config, ModelConfig


def _tensor_dims(model: ModelConfig) -> Mapping[str, int]:
    return {"model.mtp.hidden_dim": hidden_width(model)}


def _lines(config: Config) -> Iterator[str]:
    mtp = config.model.mtp
    weights = ", ".join(f"{weight:.3g}" for weight in depth_weights(mtp))
    block = "one block" if mtp.shared else "a block each"
    later = f", {mtp.loss_final:g} later" if mtp.switch < 1 else ""
    yield (
        f"further tokens: {mtp.depths} by {block}, {mtp.loss:g} of the loss{later}, "
        f"weights {weights}"
    )


MTP = ModelFeature(
    name="mtp",
    title="multi-token prediction",
    present=lambda model: model.mtp.depths > 0,
    below="mtp.blocks.*.",
    # Those of one block; its A and F mixers are of their kinds (`block_model`).
    parameters=(
        Parameter(
            (
                "embed_norm.weight",
                "hidden_norm.weight",
                "attention.norm.weight",
                "feed_forward.norm.weight",
                "norm.weight",
            ),
            "[D]",
            "vector",
            fp32=True,
        ),
        Parameter(("projection.weight",), "[D, U]", "muon"),
    ),
    dims=lambda model: {"U": 2 * model.dim},  # a hidden state beside an embedding
    lines=_lines,
    exported=(),
    checks=mtp_rules,
    tensor_dims=_tensor_dims,
    mixers="A",  # its F mixers have a width of their own
)
