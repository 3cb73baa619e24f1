"""Bytes that random projections of linear layers' inputs save and add, in closed form.

Shapes in, bytes out (checkpointing/compress.py does it). Layers that read one tensor of D dims and
have O output dims together share a projection of it to Z dims.

                      whole                          compressed
    activations       N D                            N Z
    gradient          O D                            O Z
    moments           O D (Muon), 2 O D (AdamW)      2 O Z
    latent            -                              O Z
    passing           -                              D Z, while x P and S P^T are made
"""

from __future__ import annotations

from dataclasses import dataclass


def projected_width(width: int, ratio: float) -> int:
    """Return Z, the dims that are kept of an input of `width` dims."""
    return max(1, round(width * ratio))


@dataclass(frozen=True)
class CompressedInput:
    """Input tensor and the layers that read it.

    Attributes:
        width: D.
        outputs: O of each layer, as this rank has it.
        ratio: Z / D.
    """

    width: int
    outputs: tuple[int, ...]
    ratio: float

    @property
    def projected(self) -> int:
        """Dims Z of the projection."""
        return projected_width(self.width, self.ratio)

    def kept_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Return bytes saved from forward to backward, in the dtype of compute."""
        return tokens * self.projected * itemsize

    def saved_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Return bytes of activations that the forward no longer keeps."""
        return tokens * (self.width - self.projected) * itemsize

    def state_bytes(self, parameter_itemsize: int = 4) -> int:
        """Return bytes of latents, their gradients and AdamW's two moments of them."""
        return sum(self.outputs) * self.projected * 4 * parameter_itemsize

    def state_saved_bytes(self, moment_bytes: int = 2, parameter_itemsize: int = 4) -> int:
        """Return bytes of replaced weights' gradients and moments, less `state_bytes`.

        The result may be negative.

        Args:
            moment_bytes: per weight; Muon's momentum in bf16 takes 2, AdamW's moments 8.
            parameter_itemsize: bytes of an element of parameters and gradients.
        """
        whole = sum(self.outputs) * self.width * (parameter_itemsize + moment_bytes)
        return whole - self.state_bytes(parameter_itemsize)

    def passing_bytes(self, itemsize: int = 4) -> int:
        """Return bytes of P: in a forward, and in fp32 when latents are added to weights."""
        return self.width * self.projected * itemsize

    def flops_added(self, tokens: int) -> int:
        """Return FLOPs of x P in the forward, less those that the smaller backward saves."""
        smaller = 2 * tokens * sum(self.outputs) * (self.width - self.projected)
        return 2 * tokens * self.width * self.projected - smaller
