"""The host waits for nothing between the ids of a batch and the gradients of its loss.

On the meta device, which takes every path of a GPU that depends on the device and has no values:
reading one fails, and so does a copy from the host that would wait. On a GPU torch itself says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp import torch_extras
from megacpp.config.arguments import parse_run
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.kernels.mamba3.library import PackedLayout
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.apply import parallelize_blocks
from parallel.context.layout import ContextLayout
from parallel.context.segments import segment_documents
from parallel.simulate.fake import fake_world
from tests.model.attention_cases import packed
from tests.model.small import small, variants

# Operators whose results' sizes, or values, the host has to have.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor")
LOSSES = {"balance_loss": 0.01, "sequence_loss": 0.01, "z_loss": 0.01}


class Waits(TorchDispatchMode):
    """Operators for which the host would wait, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        indices = args[1] if name.startswith("aten::index") and len(args) > 1 else ()
        by_mask = isinstance(indices, (list, tuple)) and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
        )
        moved = isinstance(out, Tensor) and any(
            isinstance(x, Tensor) and x.device != out.device and x.dim() for x in args
        )
        if by_mask or moved or any(wait in name for wait in WAITS):
            self.found.append(name)
        return out


@pytest.fixture
def meta_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Autocast knows no meta device; numbers that go there by a copy that waits are listed."""
    copies: list[str] = []
    make, like = torch.tensor, Tensor.new_tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            copies.append(f"torch.tensor({data})")
        return make(data, *args, **kwargs)

    def new_tensor(self: Tensor, data: Any, **kwargs: Any) -> Tensor:
        if self.device.type != "cpu":
            copies.append(f"new_tensor({data})")
        return like(self, data, **kwargs)

    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *args: False)
    # What nobody waits for (`torch_extras.to_device`) is no copy here.
    there = "to_device", lambda x, device: torch.empty(x.shape, dtype=x.dtype, device=device)
    monkeypatch.setattr(torch_extras, *there)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(Tensor, "new_tensor", new_tensor)
    yield copies


def step(config: ModelConfig, device: str, kernels: Kernels | None = None) -> list[str]:
    """One forward and backward of a whole model; what the host waited for."""
    with torch.device("meta"):
        model = HybridLM(config)
    if device != "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.fill_(0.01) if x.is_floating_point() else x.zero_()
    set_kernels(model, kernels or Kernels())
    docs = packed().to(device)
    ids = torch.zeros(2, 23, dtype=torch.int64, device=device)
    docs = docs.with_tokens(ids, ids)
    with Waits() as waits:
        model(ids, ids, docs).loss_sum.backward()
    return waits.found


@pytest.mark.parametrize("capacity", [None, 1.25], ids=["dropless", "capacity"])
@pytest.mark.parametrize("name", variants())
def test_no_model_waits(name: str, capacity: float | None, meta_as_gpu: list[str]) -> None:
    config = variants()[name]
    moe = replace(config.moe, capacity_factor=capacity, **LOSSES)  # type: ignore[arg-type]
    assert step(replace(config, moe=moe), "meta") == []
    assert meta_as_gpu == []


def expert_parallel(dispatch: str) -> list[str]:
    """Return what the host waited for in a model with experts spread over two fake ranks."""
    flags = f"tiny --model.pattern AEE --model.depth 3 --mesh.ep 2 --mesh.ep-dispatch {dispatch}"
    config = parse_run(flags.split(), 2).config
    with fake_world(config, 2, 0) as world:
        with torch.device("meta"):
            model = HybridLM(config.model).to(torch.bfloat16)
        parallelize_blocks(model, config, world)
        set_kernels(model, Kernels())
        docs = packed().to("meta")
        ids = torch.zeros(2, 23, dtype=torch.int64, device="meta")
        with Waits() as waits:
            model(ids, ids, docs.with_tokens(ids, ids)).loss_sum.backward()
    return waits.found


def test_experts_without_a_wait_and_without_a_drop(meta_as_gpu: list[str]) -> None:
    """Rows padded to the most that there can be; rows as they were chosen are counted first."""
    assert expert_parallel("padded") == []
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        expert_parallel("per_rank")
    assert meta_as_gpu == []


def test_flash_kernels_do_not_wait_for_the_documents(meta_as_gpu: list[str]) -> None:
    """Their boundaries came along; without that, finding them would wait."""
    assert step(small("AEA"), "meta", Kernels(attention="varlen_padded")) == []
    host = packed()
    device = Documents(host.ids_BT.to("meta"), host.positions_BT.to("meta"))
    with pytest.raises(NotImplementedError, match="nonzero"):
        _ = device.cu_seqlens


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_library_scans_do_not_wait_for_the_documents(
    rank: int | None, meta_as_gpu: list[str]
) -> None:
    """Of whole rows, and of a context rank's chunks: those of rank 1 follow one another."""
    host, layout = (
        packed(((7, 1, 12, 4), (1, 1, 22))),
        ContextLayout.for_rank("head_tail", rank or 0, 2),
    )
    if rank is not None:
        host = host.take(layout.index(24), layout.per_rank)
    docs = host.to("meta")
    if rank is None:
        ids = torch.zeros(2, 24, dtype=torch.int64, device="meta")
        docs = docs.with_tokens(ids, ids)
    with Waits() as waits:
        packed_layout = PackedLayout.for_documents(
            docs if rank is None else segment_documents(docs, layout)
        )
    assert packed_layout.cu_seqlens is not None and packed_layout.cu_seqlens.device.type == "meta"
    assert waits.found == meta_as_gpu == []


def test_experts_by_triton_do_not_wait(
    meta_as_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that aren't launched."""
    pytest.importorskip("triton")
    launches = importlib.import_module("triton.runtime.jit").KernelInterface
    monkeypatch.setattr(launches, "__getitem__", lambda *_: lambda *_, **__: None)
    importlib.import_module("megacpp.kernels.experts.triton_units")
    for capacity in (None, 1.25):
        config = small("EE")
        config = replace(config, moe=replace(config.moe, capacity_factor=capacity, **LOSSES))  # type: ignore[arg-type]
        assert step(config, "meta", Kernels(experts="triton")) == []


def test_waiting_is_noticed(meta_as_gpu: list[str]) -> None:
    """The test itself: a mask as an index, a list sent as it is."""
    with Waits() as waits:
        torch.ones(3)[torch.tensor([True, False, True])]
    assert waits.found
    torch.tensor([1], device="meta")
    assert meta_as_gpu


def test_listed_numbers_are_those() -> None:
    found = torch_extras.listed((3, 5), torch.device("cpu"), torch.int32)
    assert found.dtype == torch.int32 and found.tolist() == [3, 5]
    assert torch_extras.listed((3, 5), torch.device("meta")).shape == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("capacity", [None, 1.25], ids=["dropless", "capacity"])
@pytest.mark.parametrize("pattern", ["AE", "EM", "AR", "AF"])
def test_a_gpu_is_not_waited_for(pattern: str, capacity: float | None) -> None:
    """In bf16 and sizes of 8, with the kernels of `auto`; the second step, after all is built."""
    config = small(pattern, dim=32, attention=replace(small().attention, head_dim=16))
    moe = replace(config.moe, capacity_factor=capacity, hidden_dim=16)
    config = replace(config, moe=moe)
    with torch.device("meta"):
        model = HybridLM(config)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(0.01) if x.is_floating_point() else x.zero_()
    set_kernels(model, Kernels(attention="varlen", experts="triton"))
    ids = torch.zeros(2, 23, dtype=torch.int64, device="cuda")
    for mode in ("default", "error"):
        docs = packed().to("cuda").with_tokens(ids, ids)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, ids, docs).loss_sum
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
