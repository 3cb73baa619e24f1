"""Which tensors of a model are worth saving, by name."""

from __future__ import annotations

from torch import Tensor, nn

from megacpp.dtensor import is_dtensor


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, in their own memory, tied ones once.

    Latents of compressed layers (checkpointing/compress.py) are zero between steps and left out.
    """
    parameters = {n: plain(p) for n, p in model.named_parameters() if not n.endswith(".latent")}
    return parameters | {
        name: buffer for name, buffer in model.named_buffers() if is_persistent(model, name)
    }


def plain(t: Tensor) -> Tensor:
    """The same memory without the wrapper of a weight that FSDP2 gathers in FP8 (torchao's).

    A file wants an address, which a wrapper doesn't have.
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
    """Whether a buffer is state (router bias) rather than a table that is made anew."""
    owner, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(owner)._non_persistent_buffers_set
