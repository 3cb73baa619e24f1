"""No allocator reserves more than an estimate's upper bound, of small launches.

Three steps each, from the weights on, with the kernels of a GPU; the caching allocator's model
(megacpp/memory/caching.py) with segments that grow and with segments that don't.
"""

from __future__ import annotations

import dataclasses

import pytest

from megacpp.cli.trace import trace_run, trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.allocator import replay
from megacpp.memory.budget import as_run
from megacpp.memory.device import runtime_bytes
from megacpp.memory.estimate import estimate
from tests.memory.allocator_peak import allocator_peak
from tests.ranks import on_worlds

# Few layers, large rows: holes weigh most.
LARGE = (
    "--optim.qk_clip 0 --train.grad_accum 2 --train.tokens_per_step 0 --data.seq_len 1024"
    " --model.vocab_size 1024 --train.device_batch_size"
)
SHORT = "--train.grad_accum 2 --train.tokens_per_step 0 --data.seq_len 1024"
DENSE = f"dense_110m --model.depth 2 {SHORT}"
CASES = [
    (1, "tiny --model.depth 4 --train.grad_accum 2 --train.tokens_per_step 0"),
    (1, DENSE),
    (1, f"{DENSE} --optim.name adamw --model.vocab_size 1024 --train.device_batch_size 1"),
    (1, f"moe_small --model.depth 2 {SHORT} --train.device_batch_size 4"),
    (1, f"hybrid_400m --model.depth 4 {SHORT} --train.device_batch_size 1"),
    (1, f"dense_110m --model.pattern F --model.depth 1 {LARGE} 128"),
    (1, f"moe_small --model.pattern AE --model.depth 2 {LARGE} 64 --recompute.eblock none"),
    (8, f"moe_small --model.pattern AE --model.depth 2 {LARGE} 64 --mesh.ep 8"),
    (4, f"{DENSE} --mesh.reshard always"),
    (4, f"moe_small --model.depth 2 {SHORT} --mesh.ep 4 --train.gradient_sync each"),
]

WIDE = "tiny --train.device cpu --model.pattern FF --model.depth 4 --model.dim 128 --mesh.pp 2"
FEW = "--model.vocab_size 256 --model.mlp.hidden_dim 128 --optim.name adamw --data.seq_len 128"
MANY = "--train.device_batch_size 8 --train.tokens_per_step 0 --train.grad_accum 8"
RECOMPUTED = "--recompute.fblock full --recompute.norms"


@pytest.mark.parametrize(("size", "flags"), CASES, ids=[flags for _, flags in CASES])
def test_no_allocator_reserves_more(size: int, flags: str) -> None:
    config = as_run(parse_run(flags.split(), size).config, "cuda", narrow=True)
    stream = trace_run(config, size, steps=3)
    for expandable in (False, True):
        memory = dataclasses.replace(config.memory, expandable_segments=expandable)
        found = estimate(dataclasses.replace(config, memory=memory), size, detail=False)
        bound = found.upper - runtime_bytes(config, size)
        reserved = replay(stream, expandable).reserved_bytes
        assert stream.peak()[1] <= reserved <= bound, (expandable, reserved / bound)


def test_no_rank_of_a_pipeline_takes_more() -> None:
    """Tensors that gloo holds while they are sent are in a trace without peers, too."""
    schedules = ("interleaved", "interleaved_zb", "zbv", "dualpipe")
    flags = f"{WIDE} {FEW} {MANY} {RECOMPUTED} --mesh.pp_schedule"
    configs = {s: parse_run(f"{flags} {s}".split(), 2).config for s in schedules}

    def play(rank: int, number: int) -> int:
        return allocator_peak(configs[schedules[number // 2]], 2, rank, number % 2)

    taken = on_worlds(play, dict.fromkeys(range(2 * len(schedules)), 2))
    for number, of_ranks in taken.items():
        rank = number % 2
        config = configs[schedules[number // 2]]
        found = estimate(config, 2, rank, detail=False)
        assert of_ranks[rank] <= found.upper <= 1.2 * of_ranks[rank], (
            number,
            of_ranks,
            found.upper,
        )
        assert trace_step(config, 2, rank).peak()[1] == pytest.approx(of_ranks[rank], rel=1e-3)
