"""Settings of Gated DeltaNet, `config.model.gated_deltanet`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.settings import setting

MANY = 1 << 16  # heads, and dims of one


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """G blocks: Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next."""

    num_key_heads: int = setting(
        2, "Query and key heads; divides num_value_heads.", "heads", at_least=1, at_most=MANY
    )
    num_value_heads: int = setting(
        4, "Heads of values and states.", "heads", at_least=1, at_most=MANY
    )
    key_dim: int = setting(
        64, "Width of a key, the rows of a state.", "dims", at_least=1, at_most=MANY
    )
    value_dim: int = setting(
        64, "Width of a value, the columns of a state.", "dims", at_least=1, at_most=MANY
    )
    conv_kernel: int = setting(4, "Taps of the short convolution.", "taps", at_least=1, at_most=256)
    allow_neg_eigval: bool = setting(
        False, "Let the write strength reach 2, and eigenvalues of a transition -1."
    )
    gate: bool = setting(True, "Put a SiLU gate on the normed output.")
    chunk_size: int = setting(
        64, "Tokens of a chunk of the scan.", "tokens", at_least=1, at_most=1 << 20
    )
