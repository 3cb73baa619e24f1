"""Additional bytes of FP8 layers, an upper bound: copies while they multiply.

They save inputs and weights as wide layers do, except for the product of hidden units: a linear
layer in FP8 saves it, a fused wide one recomputes it. Operands are rounded just before a product:
in fp32 and scaled, then one byte each; without hardware for FP8 they are widened once more. Layers
at both ends that stay wide are counted as if they were FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megacpp.blocks.experts.rows import expert_rows
from megacpp.config.checks.fp8 import fp8_layers
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment

ROUNDING = 4 + 4 + 1  # bytes of a number in fp32, scaled, and in FP8


def kept_product(own: Share, letter: str, pieces: Pieces) -> int:
    """Return bytes of act(gate) up, which a layer in FP8 keeps and a wide one makes again."""
    if letter not in own.fp8 or "block" in pieces:
        return 0
    model = own.config.model
    hidden = {"F": model.mlp.hidden_dim, "E": model.moe.num_shared * model.moe.shared_hidden_dim}
    return own.tokens * hidden.get(letter, 0) // own.tp * own.compute


def with_copies(
    own: Share, letter: str, pieces: Pieces, moments: Iterable[Moment]
) -> Iterator[Moment]:
    """Yield moments of a block, with the copies and the saved product of its FP8 layers.

    Args:
        own: sizes of the rank.
        letter: of the block.
        pieces: regions that the block recomputes.
        moments: of the block without FP8.
    """
    more = copies(own, letter) + kept_product(own, letter, pieces)
    for moment in moments:
        yield moment.more(more)


def copies(own: Share, letter: str) -> int:
    """Bytes at most of the rounded operands and the wide result of any product of a block."""
    if letter not in own.fp8:
        return 0
    model, n = own.config.model, own.tokens
    sizes = [n * (rows + cols) + rows * cols for rows, cols in fp8_layers(model)[letter].values()]
    if letter == "E":
        moe, D = model.moe, model.dim
        each = moe.num_experts // own.config.mesh.ep
        matrices = each * moe.hidden_dim * D * (2 if moe.activation == "swiglu" else 1)
        sizes.append(expert_rows(own).slots * (D + moe.hidden_dim) + matrices)
    return ROUNDING * max(sizes, default=0)
