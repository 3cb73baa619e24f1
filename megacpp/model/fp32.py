"""Contract of parameters that no mixed-precision wrapper may store or gather below fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class Fp32Contract(nn.Module):
    """Module whose directly owned parameters and floating buffers stay at least fp32.

    `.to(torch.bfloat16)`, `.bfloat16()` and `.half()` move children as usual and leave the own
    tensors alone: no round trip through a narrow type, no copy per step. `.double()` widens.
    `contract_parameters` lists them, so that FSDP2 can gather them in fp32 (parallel/fsdp.py).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp32Contract:
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(_at_least_fp32(fn), recurse=False)
        return self


def contract_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of `model` under the fp32 contract."""
    for prefix, module in model.named_modules():
        if isinstance(module, Fp32Contract):
            yield from module.named_parameters(prefix, recurse=False)


def _at_least_fp32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(t: Tensor) -> Tensor:
        out = fn(t)
        narrowed = t.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
        return t.to(out.device) if narrowed else out

    return keep
