"""Stand-ins for kernels: shapes, dtypes and memory are those of what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.tracing.meter import Meter
from megacpp.config.arguments import parse_run
from megacpp.kernels.backend import PLAIN_KERNELS
from parallel.simulate import gpu_stand_ins
from parallel.simulate.cpu_attention import cpu_attention
from parallel.simulate.library_stand_ins import mimo
from parallel.simulate.stand_ins import GivenRouting, GivenRows
from parallel.simulate.traced_kernels import traced_kernels

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


def allocated(given: Mapping[str, Tensor | None], **options: Any) -> list[int]:
    """Return bytes of the storages that attention makes, forward and backward."""
    masked = {name: t.detach().requires_grad_() for name, t in given.items() if t is not None}
    if "attn_mask" in masked:
        masked["attn_mask"].requires_grad_(False)
    with Meter(nn.Module(), flops=False) as meter:
        F.scaled_dot_product_attention(**masked, **options).sum().backward()  # type: ignore[arg-type]
    return [alloc.bytes for alloc in meter.allocations]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("values", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_without_values(masked: bool, heads: int, values: int, dtype: Any) -> None:
    """The meta device allocates what a CPU does: fused, and unfused for values of other dims."""
    new = partial(torch.zeros, dtype=dtype)
    given = {
        "query": new(2, T, 4, 8).transpose(1, 2),
        "key": new(2, T, heads, 8).transpose(1, 2),
        "value": new(2, T, heads, values).transpose(1, 2),
        "attn_mask": new(1, 1, T, T) if masked else None,
    }
    options = {"is_causal": not masked, "enable_gqa": heads < 4, "scale": 0.5}
    here = allocated(given, **options)
    with cpu_attention():
        given = {name: None if t is None else t.to("meta") for name, t in given.items()}
        there = allocated(given, **options)
    assert here == there


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_given_rows_are_exchanged_with_every_rank(ranks: int) -> None:
    """All of them with one rank, and nothing with the others."""
    routing = GivenRouting(8, 2, given=GivenRows(5, 6, 7, 8))
    for sizes in (routing.copies, routing.rows):
        for one in sizes(16, ranks, 0):
            assert len(one) == ranks and not any(map(sum, one[1:])) and sum(one[0])
