"""Which tensors of a model are worth saving, by name."""

from __future__ import annotations

from torch import Tensor, nn


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, themselves (no copies), tied ones once.

    Latents of compressed layers (checkpointing/compress.py) are zero between steps and left out.
    """
    parameters = {n: p for n, p in model.named_parameters() if not n.endswith(".latent")}
    return parameters | {
        name: buffer for name, buffer in model.named_buffers() if is_persistent(model, name)
    }


def is_persistent(model: nn.Module, name: str) -> bool:
    """Whether a buffer is state (router bias) rather than a table that is made anew."""
    owner, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(owner)._non_persistent_buffers_set
