"""The closed form of offloading against what an Offloader does with CPU tensors."""

from __future__ import annotations

import pytest
import torch

from checkpointing.host_memory import PlainCopies
from checkpointing.offload import Offloader
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.memory.forms.offload import OffloadBytes, offload_bytes, transfer_s

SIZES = [4096, 100, 8192, 4096, 300, 12_288, 4096]
GIB = 1 << 30


@pytest.mark.parametrize("forwards", [1, 3])
@pytest.mark.parametrize("window_bytes", [0, 4096, 20_000, GIB])
@pytest.mark.parametrize("host_bytes", [0, 10_000, 30_000, GIB])
@pytest.mark.parametrize("min_bytes", [0, 101, 4097, GIB])
def test_as_it_happens(min_bytes: int, host_bytes: int, window_bytes: int, forwards: int) -> None:
    form = offload_bytes(SIZES, min_bytes, host_bytes, window_bytes, forwards, pinned=False)
    copies = PlainCopies()
    moved = Offloader(min_bytes, host_bytes, torch.device("cpu"), window_bytes, 2, copies)
    kept = []
    with LiveBytes() as live:
        for _ in range(forwards):
            moved.begin()
            for size in SIZES:
                t = torch.zeros(size, dtype=torch.uint8)
                kept.append(moved.put(t) or t)
                del t
        device = live.alive() - moved.memory.held_bytes
        assert device == form.stays + form.window
        assert moved.traffic.out_bytes == form.out
        assert moved.memory.held_bytes == moved.memory.peak_bytes == form.host <= host_bytes
        most = device
        while kept:
            last = kept.pop()
            last = last if isinstance(last, torch.Tensor) else last.get()
            most = max(most, live.alive() - moved.memory.held_bytes - last.numel())
            del last
    assert moved.traffic.back_bytes == form.back and most <= form.peak
    assert sum(moved.traffic.stayed_bytes.values()) == form.stays


def test_by_hand() -> None:
    """Five blocks of 48 MiB, 128 MiB in flight each way, buffers of 64 MiB."""
    mib = 1 << 20
    found = offload_bytes([48 * mib] * 5 + [mib // 2], mib, 64 * GIB, 128 * mib)
    assert found == OffloadBytes(
        out=240 * mib,
        back=144 * mib,
        host=320 * mib,
        stays=mib // 2,
        window=96 * mib,
        peak=mib // 2 + 96 * mib + 128 * mib,
    )
    assert transfer_s(2 * 10**9) == pytest.approx(0.03125, rel=1e-12)
