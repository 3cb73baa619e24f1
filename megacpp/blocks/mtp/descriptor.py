"""Multi-token prediction as data: blocks behind the last layer, in training alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import LOSS_BUFFERS, AheadBlocks, ModelFeature, Parameter
from megacpp.blocks.kinds import KINDS
from megacpp.blocks.mtp.checks import mtp_rules
from megacpp.blocks.mtp.plan import LETTERS, block_model, depth_weights, hidden_width, num_blocks
from megacpp.config.schema import Config, ModelConfig

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def _tensor_dims(model: ModelConfig) -> Mapping[str, int]:
    return {"model.mtp.hidden_dim": hidden_width(model)}


def _ahead(model: ModelConfig) -> AheadBlocks:
    mtp = model.mtp
    return AheadBlocks(
        "mtp",
        block_model(model),
        letters=LETTERS,
        alike="A",  # F mixers have a width of their own
        number=num_blocks(mtp),
        passes=mtp.depths,
        multiply_adds=2 * model.dim**2,  # projection of both halves
        trains_embedding=not mtp.detach_trunk,
    )


def _sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield the blocks' borders and the head's for each depth, and the keys of their attention."""
    config, mtp = own.config, own.config.model.mtp
    if not any(kind == "mtp" for kind, _ in parts):
        return
    again = (mtp.depths - 1) * config.recompute.mtp  # depths that a backward runs twice
    if own.tp > 1:  # the embedding's, the borders of an A and an F block, and the head's
        borders = mtp.depths * (11 + (not mtp.detach_trunk)) + 4 * again
        yield "tp", "activations", borders * own.tokens * config.model.dim * own.compute
        yield "tp", "loss", mtp.depths * own.tokens * own.tp * 3 * own.wide
    for exchange in (KINDS[letter].context for letter in LETTERS) if own.cp > 1 else ():
        for what, count in exchange.traffic(own) if exchange else ():
            yield "cp", what, count * (2 * mtp.depths + again) // 2


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
    # Those of one block; its mixers are of their kinds (`ahead`).
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
    around=("mtp",),
    dims=lambda model: {"U": 2 * model.dim},  # a hidden state beside an embedding
    lines=_lines,
    exported=(),
    checks=mtp_rules,
    tensor_dims=_tensor_dims,
    sends=_sends,
    buffer_numbers=lambda model, part: (
        LOSS_BUFFERS + model.mtp.depths,
        0,
    ),  # and a weight per depth
    ahead=_ahead,
)
