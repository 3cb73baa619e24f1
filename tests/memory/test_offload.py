"""Offloading: rules by hand, saved activations and whole steps of an estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpointing.host_memory import PlainCopies
from checkpointing.offload import Offloader
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.cli.measure import measure
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import MeshConfig
from megacpp.memory.forms import simulation
from megacpp.memory.forms.activations import activation_bytes
from megacpp.memory.forms.step import step_bytes
from parallel.simulate.fake import as_trained
from tests.memory.offload_rules import OffloadBytes, offload_bytes
from tests.memory.test_activations import SELECTIVE, config_of, same
from tests.memory.test_estimate import OVER, UNDER
from tests.memory.working_cases import WIDE

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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload", ["block_inputs", "saved_tensors"])
def test_what_stays_on_the_device(offload: str, size: int) -> None:
    """To the byte, part by part; the last layer keeps all."""
    policy = replace(SELECTIVE, offload=offload, offload_min_mib=0.001)  # type: ignore[arg-type]
    mesh = MeshConfig(dp_shard=1, tp=size)
    heads = {"attention": {"num_heads": 4, "num_kv_heads": 2}, "m2rnn": {"num_heads": 2}}
    config = config_of("AEMRGFA", "bf16", policy, mesh, **heads)
    same(activation_bytes(config, size), measure(config, size, 0))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload", ["block_inputs", "saved_tensors"])
def test_the_peak_of_a_step(offload: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace moves at once, so without a window; with one, that much more is on its way."""
    flags = WIDE.replace("--model.depth 2", "--model.depth 6 --model.pattern FAFAFF")
    words = f"{flags} --recompute.fblock full --recompute.norms true --recompute.offload {offload}"
    config = as_trained(parse_run(words.split(), size).config)
    peak = trace_step(config, size, full=True).peak()[1]
    plain = replace(config, recompute=replace(config.recompute, offload="none"))
    with_window, kept = (step_bytes(c, size, 0).most for c in (config, plain))
    monkeypatch.setattr(simulation, "WINDOW_BYTES", 0)
    found = step_bytes(config, size, 0).most
    assert (1 - UNDER) * peak <= found <= 1.01 * peak
    # All of it is on its way; masks are counted twice. One process has most in the optimizer step.
    assert found < with_window + (size == 1) and with_window <= 1.01 * kept


def test_each_microbatch_of_a_pipeline_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace counts none of what waits on the host, of whichever microbatch."""
    flags = WIDE.replace("--model.depth 2", "--model.depth 6 --model.pattern FAFAFF")
    words = f"{flags} --recompute.fblock full --recompute.offload saved_tensors --mesh.pp 2"
    config = as_trained(parse_run([*words.split(), "--train.grad-accum", "4"], 4).config)
    monkeypatch.setattr(simulation, "WINDOW_BYTES", 0)
    peak = trace_step(config, 4, 3, full=True).peak()[1]
    assert (1 - UNDER) * peak <= step_bytes(config, 4, 3).most <= (1 + OVER) * peak
