"""Steps of whole small models on a device: narrow against wide, without waiting, resumed, saved.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.presets import PRESETS
from megacpp.config.schema import KEEP, MeshConfig
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from parallel.mesh import World
from parallel.start import join
from tests.gpu.devices import on_any_device
from tests.gpu.trainer import ACCUM, Settings, T, Trainer
from tests.model.small import shrunk

ROUNDINGS = 8  # of a layer, one after another: norm, in, mixed, out, and as many on the way back
BF16 = 2.0**-8  # of one rounding to eight bits, at most half of it
KINDS = [name for name in PRESETS if name not in ("tiny_full", "nam56r", "nam52_deep")]


@on_any_device
@pytest.mark.parametrize("preset", KINDS)
def test_bf16_beside_fp32(preset: str, device: torch.device) -> None:
    """Loss and gradients of every kind of preset, small.

    Each rounding moves a number by 2^-9 of itself at most. Through L layers of eight roundings one
    after another, all to the same side, gradients are off by 8 L 2^-9 of their norm. The loss is
    the mean of many tokens' and has only the logits' own rounding times their size, which is small
    at the start. Experts whose scores are closer than that change places: models that have some
    may be off by as much again for each of top_k choices.
    """
    config = shrunk(preset)
    losses, grads = zip(
        *(loss_and_gradients(preset, device, narrow) for narrow in (False, True)), strict=True
    )
    assert abs(losses[1] - losses[0]) <= BF16 * losses[0]
    apart = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(*grads, strict=True)))
    whole = math.sqrt(sum(a.square().sum().item() for a in grads[0]))
    bound = ROUNDINGS * config.depth * BF16 / 2
    bound *= 1 + config.moe.top_k * ("E" in config.pattern)
    assert apart <= bound * whole, (apart / whole, bound)


def loss_and_gradients(
    preset: str, device: torch.device, narrow: bool
) -> tuple[float, list[Tensor]]:
    """Return loss and gradients of packed rows, under autocast or in fp32."""
    model = HybridLM(shrunk(preset))
    initialise(model, model.init_rules(), 0)
    model.to(device).train()
    g = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(50, (2, 16), generator=g).to(device)
    docs = Documents.from_ids((torch.arange(32).view(2, 16) // 5).to(device))
    if model.config.needs_full_row:
        docs = docs.with_tokens(ids_BT, ids_BT)
    with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
        loss = model(ids_BT, ids_BT, docs).loss_sum / ids_BT.numel()
    loss.backward()
    grads = [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]
    return loss.item(), grads


@contextmanager
def nobody_waits(device: torch.device) -> Iterator[None]:
    """Raise an error where the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


POLICIES = {
    "keep all": KEEP,
    "blocks": replace(
        KEEP,
        ablock="full",
        eblock="expert_gemm_only",
        mblock="conv_bc_only",
        rblock="full_plus_norms",
    ),
}


@on_any_device
@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_waits_for_one_number_a_step(policy: str, device: torch.device) -> None:
    """Forwards, backwards, clipping and optimizer are sent ahead; `check_step` is the one wait."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(dtype=dtype, recompute=POLICIES[policy])  # type: ignore[arg-type]
    trainer = Trainer(settings.config, World(0, 1, device))
    trainer.step()  # libraries start, state appears
    batches = list(trainer.loader.take(ACCUM))
    with nobody_waits(device):
        sums, norm = trainer.forward_backward(batches, 1)
    status = trainer.boundary.check_step(sums, norm)
    with nobody_waits(device):
        trainer.update()
        trainer.boundary.finish_step(status)
    assert status.healthy and math.isfinite(status.loss)


@contextmanager
def deterministic() -> Iterator[None]:
    """Sums in one order: kernels that add by atomics are left out where torch has others."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@on_any_device
@pytest.mark.parametrize("optimizer", ["adamw", "muon_adamw"])
def test_resumed_to_the_last_bit(device: torch.device, optimizer: str, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more; and the last two again by another trainer."""
    settings = Settings(dtype="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    world = World(0, 1, device)
    with deterministic():
        first = Trainer(settings.config, world, tmp_path)
        for _ in range(2):
            first.step()
        first.state.save(1)
        losses = [first.step() for _ in range(2)]
        second = Trainer(settings.config, world, tmp_path)
        second.state.resume("auto")
        assert second.state.step == 2
        assert [second.step() for _ in range(2)] == losses
    mine, theirs = first.weights(), second.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@contextmanager
def alone(device: torch.device, folder: Path, mesh: MeshConfig) -> Iterator[World]:
    """Return a mesh of one rank with its own process group: NCCL on a GPU, gloo on a CPU."""
    cuda = device.type == "cuda"
    store = dist.FileStore(str(folder / "store"), 1)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=0,
        world_size=1,
        device_id=device if cuda else None,
    )
    try:
        yield join(mesh, device)
    finally:
        dist.destroy_process_group()


@on_any_device
def test_fsdp_on_one_rank(device: torch.device, tmp_path: Path) -> None:
    """Sharded over one rank: trains as one process does, saves, resumes.

    In fp32 both do the same products; sums of a gradient may be made in another order: 1e-5.
    """
    settings = Settings(dtype="fp32", optimizer="adamw")
    plain = Trainer(settings.config, World(0, 1, device))
    expected = [plain.step() for _ in range(3)]
    with alone(device, tmp_path, settings.config.mesh) as world:
        sharded = Trainer(settings.config, world, tmp_path / "checkpoints")
        found = [sharded.step() for _ in range(2)]
        sharded.state.save(1)
        found.append(sharded.step())
        again = Trainer(settings.config, world, tmp_path / "checkpoints")
        again.state.resume("auto")
        assert again.state.step == 2
        resumed = again.step()
    assert found == pytest.approx(expected, rel=1e-5)
    assert resumed == pytest.approx(found[-1], rel=1e-5)


@on_any_device
@pytest.mark.parametrize("pattern", ["AF", "AE", "AMERF"])
def test_a_captured_step(device: torch.device, pattern: str) -> None:
    """Forward and backward as one CUDA graph (on a CPU the same body): the loss goes down."""
    from bench.gpu.steps import CapturedSteps, graph_unsupported_reason

    dtype = "bf16" if device.type == "cuda" else "fp32"
    config = Settings(pattern=pattern, dtype=dtype).config  # type: ignore[arg-type]
    config = replace(config, train=replace(config.train, tokens_per_step=2 * T * ACCUM))
    assert graph_unsupported_reason(config, device) is None
    steps = CapturedSteps(config, device)
    with steps.on_stream():
        before = [p.detach().clone() for p in steps.model.parameters()]
        for _ in range(2):
            steps.step()
        moved = sum(
            not torch.equal(a, b) for a, b in zip(before, steps.model.parameters(), strict=True)
        )
    assert moved > len(before) // 2
    assert all(p.isfinite().all() for p in steps.model.parameters())


@on_any_device
def test_rows_travel(device: torch.device) -> None:
    """Positions of whole rows are one row seen several times, which pinned memory can't be."""
    here = Documents.rows(3, 5)
    there = here.to(device)
    assert there.whole and there.ids_BT.device == there.positions_BT.device == device
    assert torch.equal(there.positions_BT.cpu(), here.positions_BT)
