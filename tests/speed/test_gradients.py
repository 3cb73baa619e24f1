"""Gradients of microbatches that are added up, and of logits, as parts of a predicted step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Passes, memory_seconds
from megacpp.speed.ours import step_work
from megacpp.speed.step import predict
from megacpp.speed.travel import added_seconds
from tests.speed.test_ours import config_of


@pytest.mark.parametrize(
    ("words", "size", "bytes_"),
    [
        ((), 1, 3 * 12),  # .grad and what is added, in fp32, are read, and the sum is written
        ((), 8, 2 + 4 + 3 * (2 + 4 + 4)),  # FSDP2 casts the first, and adds others to it
        (("--mesh.pp", "2"), 8, 2 + 4 + 3 * (2 + 4 + 4)),
        (("--train.gradient-sync", "each"), 8, 0),
    ],
)
def test_microbatches_add_up_gradients(words: tuple[str, ...], size: int, bytes_: int) -> None:
    flags = ("--train.grad-accum", "4", "--train.tokens-per-step", "0")
    step = step_work(config_of("dense_110m", *flags, *words, size=size), size, "H100")
    machine = gpu("H100")
    parts = predict(step, machine, Rates()).parts
    without = predict(replace(step, reduce_each=True), machine, Rates()).parts
    own = step.stages[1] if step.stages else range(len(step.blocks))  # the head's rank has most
    wanted = memory_seconds(sum(step.blocks[n].dense for n in own) * bytes_, machine, Rates())
    assert step.microbatches == 4
    assert added_seconds(step, own, machine, Rates()) == pytest.approx(wanted)
    if step.data != "fsdp" or step.stages:  # else gradients are copied as often as reduced
        assert parts["copied data"] - without.get("copied data", 0.0) == pytest.approx(wanted)
    assert parts.get("copied data", 0.0) >= wanted


@pytest.mark.parametrize(
    ("words", "bytes_"),
    [
        ((), 2 * 2),  # bf16 logits are read, and the second time come from the cache; written
        (("--mesh.tp", "2"), 3 * 2),  # words of two ranks: read again behind the exchange
        (("--kernels.cross-entropy", "torch"), 4 * 4),  # fp32
    ],
)
def test_a_head_goes_over_its_logits(words: tuple[str, ...], bytes_: int) -> None:
    config = config_of("dense_110m", "--kernels.cross-entropy", "triton", *words, size=2)
    (head,) = (block for block in step_work(config, 2, "H100").blocks if block.kind == "head")
    moved = sum(op.bytes for op in (*head.forward, *head.backward) if isinstance(op, Passes))
    tokens = config.train.device_batch_size * config.data.seq_len
    assert moved == tokens * config.model.vocab_size / config.mesh.tp * bytes_
