"""Tensors of a model that are saved, by name."""

from __future__ import annotations

from torch import Tensor, nn

from megacpp.torch_extras import is_dtensor


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, in their own memory, tied ones once.

    Latents of compressed layers (checkpointing/compress.py) are zero between steps and left out.
    """
    parameters = {n: plain(p) for n, p in model.named_parameters() if not n.endswith(".latent")}
    return parameters | {
        name: buffer for name, buffer in model.named_buffers() if is_persistent(model, name)
    }


def plain(t: Tensor) -> Tensor:
    """Return the memory of a weight without torchao's wrapper for FP8 gathering by FSDP2.

    A file needs a storage address, which a wrapper lacks.

    Args:
        t: any shape.
    """
    local = t._local_tensor if is_dtensor(t) else t
    inner = getattr(local, "_tensor", None)
    if inner is None:
        return t
    if not is_dtensor(t):
        return inner
    return type(t).from_local(
        inner, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )


def is_persistent(model: nn.Module, name: str) -> bool:
    """Return whether a buffer is saved state (router bias), not a table that is recomputed."""
    owner, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(owner)._non_persistent_buffers_set
