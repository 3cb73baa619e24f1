"""Stand-ins for library kernels: gradients have the shapes and dtypes of what they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megacpp.config.arguments import parse_run
from megacpp.kernels.backend import PLAIN_KERNELS
from parallel.simulate import gpu_stand_ins
from parallel.simulate.gpu_stand_ins import traced_kernels
from parallel.simulate.library_stand_ins import mimo

B, T, R, H, N, P, A = 1, 16, 2, 4, 8, 8, 4


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("groups", [1, H])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_of_their_inputs(groups: int, fused: bool, packed: bool) -> None:
    """With one group of B and C the kernel sums over heads; one per head is left as it is."""
    heads: Callable[..., Tensor] = partial(leaf, B, H, T, dtype=torch.float32)
    inputs = {
        **{name: leaf(B, T, R, groups, N) for name in ("Q", "K")},
        "V": leaf(B, T, H, P),
        **{name: heads() for name in ("ADT", "DT", "Trap")},
        **{name: leaf(H, R, N) for name in ("Q_bias", "K_bias")},
        **{name: leaf(H, R, P) for name in ("MIMO_V", "MIMO_Z", "MIMO_Out")},
        "Angles": leaf(B, T, H, A),
        "D": leaf(H, dtype=torch.float32),
        "Z": leaf(B, T, H, P),
    }
    given: dict[str, Tensor | None] = dict(inputs)
    if not fused:
        given["MIMO_Out"] = given["Z"] = None
    ends = torch.tensor([0, 8, 16], dtype=torch.int32) if packed else None
    y = mimo(**given, chunk_size=8, dtype=torch.bfloat16, cu_seqlens=ends)  # type: ignore[arg-type]
    assert y.shape == ((B, T, H, P) if fused else (B, T, R, H, P))
    y.sum().backward()
    for name, x in inputs.items():
        unused = not fused and name in ("MIMO_Out", "Z", "MIMO_Z")
        assert (x.grad is None) == unused, name
        assert unused or (x.grad is not None and x.grad.shape == x.shape), name


@pytest.mark.parametrize("installed", [True, False])
def test_what_is_counted_without_triton(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what needs Triton itself falls back to torch; on a CPU everything does."""
    found = object() if installed else None
    monkeypatch.setattr(gpu_stand_ins.importlib.util, "find_spec", lambda name: found)
    flags = ["tiny", "--kernels.attention", "varlen", "--kernels.experts", "triton"]
    config = parse_run([*flags, "--train.device", "cuda"], 1).config
    kernels = traced_kernels(config)
    assert kernels.attention == "varlen"
    assert (kernels.experts == "triton") == installed
    on_cpu = replace(config, train=replace(config.train, device="cpu"))
    assert traced_kernels(on_cpu) == PLAIN_KERNELS
