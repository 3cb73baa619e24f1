"""FP8 of experts on hardware: what its product is given, with stand-ins; the real ones on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointing.fp8 import to_fp8
from megacpp.config.schema import MeshConfig, TrainConfig
from megacpp.kernels.experts.fp8 import (
    E4M3,
    LARGEST,
    Fp8Products,
    outer_sums,
    rounded,
    rows_times,
    scales,
)
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from tests.checkpointing.fp8_cases import changed
from tests.checkpointing.test_fp8_experts import expert_model, noise
from tests.parallel.parity import Run, batches_of, config_of
from tests.ranks import run_ranks

HARDWARE, EMULATED = Fp8Products(False, False), Fp8Products(True, False)
BF16 = torch.bfloat16


def in_fp8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    scale = scales(x, dim)
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def columns_together(x_EDF: Tensor) -> Tensor:
    return x_EDF.mT.contiguous().mT


def by_group(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of each group: numbers, and scales one group after another."""
    parts = []
    for a, b in pairwise([0, *ends.tolist()]):
        parts.append(in_fp8(x[a:b], 0) if b > a else (x[a:b].to(E4M3), torch.ones(x.shape[1])))
    data = torch.cat([p for p, _ in parts]).t().contiguous().t()
    return data, torch.cat([s.flatten() for _, s in parts])


def product(
    a: Tensor, b: Tensor, by_a: Tensor, by_b: Tensor, ends: Tensor, **options: Any
) -> Tensor:
    """Compute torch._scaled_grouped_mm, and check its requirements."""
    assert a.dtype == b.dtype == E4M3 and by_a.dtype == by_b.dtype == torch.float32
    assert ends.dtype == torch.int32 and not (ends % 16).any()
    assert a.is_contiguous() and b.mT.is_contiguous() and options["out_dtype"] == BF16
    found = []
    for e, (i, j) in enumerate(pairwise([0, *ends.tolist()])):
        if b.dim() == 3:
            assert by_a.shape == (len(a),) and by_b.shape == (len(b), b.shape[2])
            assert by_b.is_contiguous()
            found.append((a[i:j].float() * by_a[i:j, None]) @ (b[e].float() * by_b[e]))
        else:
            left, right = by_a.view(-1, len(a))[e], by_b.view(-1, b.shape[1])[e]
            found.append((a[:, i:j].float() @ b[i:j].float()) * left[:, None] * right)
    return (torch.cat(found) if b.dim() == 3 else torch.stack(found)).to(BF16)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's kernels and torch's product, in plain torch."""
    from torchao.prototype.moe_training import kernels

    def rows(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous()
        return in_fp8(x, 1)

    def columns(w: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        assert w.mT.is_contiguous()
        data, scale = in_fp8(w, 1)
        return columns_together(data), scale

    def transposed(w: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        assert w.mT.is_contiguous()
        data, scale = in_fp8(w.mT, 1)
        return columns_together(data), scale.squeeze(1)

    def dual(a: Tensor, b: Tensor, ends: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return *by_group(a, ends), *by_group(b, ends)

    monkeypatch.setattr(kernels, "triton_fp8_rowwise_2d_scale_and_cast", rows)
    monkeypatch.setattr(kernels, "triton_fp8_colwise_3d_scale_and_cast", columns)
    monkeypatch.setattr(kernels, "triton_fp8_rowwise_3d_transpose_rhs", transposed)
    monkeypatch.setattr(kernels, "triton_fp8_per_group_colwise_scales_dual", dual)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)


def compare(hardware: Tensor, emulated: Tensor, bound: float = 2.0**-7) -> None:
    """Two roundings to bf16 of the same sum in another order, 2^-8 each, of a whole tensor."""
    assert hardware.dtype == emulated.dtype and hardware.shape == emulated.shape
    difference = (hardware.float() - emulated.float()).norm()
    assert difference <= bound * emulated.float().norm()


def products_agree(device: str) -> None:
    x, w, dy = (noise(*s, seed=i, dtype=BF16).to(device) for i, s in enumerate(SHAPES))
    x[3], x[4] = 0, x[4] * 1e4
    even = torch.tensor([16, 32, 0, 48], device=device)
    for counts in (even, None):
        many = (x, dy) if counts is not None else (x[:88], dy[:88])  # 22 of each: padded to 32
        for rows, matrices in ((many[0], w.mT), (many[1], w)):
            found, expected = (
                rows_times(rows, [matrices, matrices], counts, how) for how in (HARDWARE, EMULATED)
            )
            for a, b in zip(found, expected, strict=True):
                compare(a, b)
        found, expected = (outer_sums(many[1], many[0], counts, 4, h) for h in (HARDWARE, EMULATED))
        compare(found, expected)
    assert rows_times(x[:0], [w.mT], even * 0, HARDWARE)[0].shape == (0, 48)


SHAPES = ((96, 64), (4, 48, 64), (96, 48))


def test_products_are_given_what_they_demand(stand_ins: None) -> None:
    products_agree("cpu")


GATHERING = Run("A", MeshConfig(dp_shard=2), accum=1, dtype="fp32")


def gathering(run: Run) -> Any:
    precision = {"dtype": "bf16", "fp8": "torchao", "fp8_ends": 0, "fp8_recipe": "tensorwise"}
    base = dataclasses.replace(
        config_of(run), model=expert_model("AEF"), train=TrainConfig(device="cuda")
    )
    return changed(base, precision=precision | {"fp8_all_gather": True})


# ---- on a GPU -----------------------------------------------------------------------------------


def capable(capability: tuple[int, int]) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= capability


@pytest.mark.gpu
@pytest.mark.skipif(not capable((9, 0)), reason="needs a GPU of compute capability 9.0")
def test_products_on_a_gpu() -> None:
    pytest.importorskip("torchao.prototype.moe_training.kernels")
    products_agree("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not capable((9, 0)), reason="needs a GPU of compute capability 9.0")
def test_products_are_torchaos() -> None:
    """Compare bits: the kernels are the same."""
    moe = pytest.importorskip("torchao.prototype.moe_training.fp8_grouped_mm")
    x, w, _ = (noise(*s, seed=i, dtype=BF16).cuda() for i, s in enumerate(SHAPES))
    ends = torch.tensor([16, 48, 48, 96], dtype=torch.int32, device="cuda")
    theirs = moe._to_fp8_rowwise_then_scaled_grouped_mm(
        x, w.mT, ends, pad_token_groups_for_grouped_mm=False
    )
    own = rows_times(x, [w.mT], torch.tensor([16, 32, 0, 48], device="cuda"), HARDWARE)[0]
    assert torch.equal(own, theirs)
    data, scale = moe.triton_fp8_rowwise_2d_scale_and_cast(x, round_scales_to_power_of_2=True)
    assert torch.equal((data.float() / scale).to(BF16), rounded(x, 1))


@pytest.mark.gpu
@pytest.mark.skipif(
    not capable((9, 0)) or torch.cuda.device_count() < 2, reason="needs two GPUs of capability 9.0"
)
def test_gathering_in_fp8_is_scaling_behind_a_gathering_in_bf16() -> None:
    """Tensorwise scales are of the whole weight in either case; bf16 rounds it once more before."""

    def body(rank: int, world_size: int, run: Run, gather: bool) -> list[float]:
        from parallel.start import join

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        config = changed(gathering(run), precision={"fp8_all_gather": gather})
        world = join(run.mesh, device)
        model = build_model(config, world, lambda m: to_fp8(m, config, device))
        boundary = AccumulationBoundary(model, world, config)
        return [float(boundary.accumulate(batches_of(0, world, run)).loss_sum)]

    found = [
        run_ranks(functools.partial(body, run=GATHERING, gather=gather), 2, backend="nccl")[0]
        for gather in (False, True)
    ]
    assert abs(found[0][0] - found[1][0]) <= 2.0**-7 * abs(found[0][0])
