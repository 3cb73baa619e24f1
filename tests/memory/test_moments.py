"""Each part's fullest moment in a step, as an estimate has it and as a whole trace shows it.

A peak hides the moments below it, which another model or mesh makes the fullest.
"""

from __future__ import annotations

import pytest

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.budget import as_run
from megacpp.memory.estimate import estimate
from megacpp.memory.stream import Stream
from megacpp.model.pattern import layer_kinds

STEP = "--train.tokens_per_step 0 --train.grad_accum 2 --data.seq_len 256"
SMALL = f"tiny --model.depth 4 --model.dim 256 --train.device_batch_size 2 {STEP}"
MLA = "--model.attention.kind mla --model.attention.no-qk-norm --model.attention.q_lora_rank 96"
LATENTS = f"--model.pattern AFAF {MLA} --recompute.mla_q_upproj --recompute.mla_kv"
SHARED = "--model.moe.num_shared 1 --model.moe.shared_hidden_dim 512 --model.mlp.hidden_dim 1024"
PIPE = "--mesh.pp 2 --train.grad_accum 6"
EXTRA = "--model.mtp.depths 1"
APART = f"{EXTRA} --model.mtp.detach_trunk"
INDEXED = "--model.attention.sparse.layers all --model.attention.sparse.top_k 8"
CASES = {  # ranks, the rank and flags
    "weights of recomputed feed-forwards": (1, 0, f"--model.pattern EFEF {SHARED} --recompute.mlp"),
    "weights of recomputed latents": (1, 0, LATENTS),
    "one rank a stage": (2, 1, "--model.pattern AFAF --mesh.pp 2 --train.grad_accum 4"),
    "masks of mtp alone": (1, 0, "--model.pattern RFRF --train.device cpu --model.mtp.depths 1"),
    "the first of two, with weights that stay": (
        2,
        1,
        "--model.pattern AAEE --train.gradient_sync resident --mesh.reshard never",
    ),
    "what a stage returns": (4, 0, f"--model.pattern AFFAAFFA --model.depth 8 {PIPE}"),
    "lookups of mtp in a last stage": (2, 1, f"--model.pattern AFAF {PIPE} {EXTRA}"),
    "lookups of mtp in a tied head": (
        2,
        1,
        f"--model.pattern AFAF {PIPE} {EXTRA} --model.tie_embeddings",
    ),
    "mtp apart from the trunk": (4, 3, f"--model.pattern AFAF {PIPE} {APART}"),
    "the first stage's embedding, in the last": (
        2,
        0,
        f"--model.pattern AFAF {PIPE} --mesh.pp_schedule zbv --model.tie_embeddings",
    ),
    "gradients in fp32 are added at once": (
        2,
        1,
        "--model.pattern EEEE --precision.dtype fp32",
    ),
    "a table of its own unit": (
        2,
        0,
        "--model.pattern FFFF --model.vocab_size 257 --model.ngram.heads 2 "
        "--model.ngram.table_size 50000 --model.ngram.dim 16",
    ),
    "the last norm's result": (
        2,
        0,
        "--model.pattern FFFF --model.mlp.hidden_dim 1024 --model.vocab_size 257",
    ),
    "angles of an indexer": (1, 0, f"--model.pattern AFFF {INDEXED}"),
}
ENDS = "backward of embed", "end of backward"  # of an estimate; of a trace, the first
REDUCED = {
    "one rank divides by one": f"{PIPE} --mesh.pp_schedule interleaved --precision.dtype fp32",
    "the head first": f"{PIPE} --model.tie_embeddings",
}


def config_of(size: int, flags: str) -> Config:
    """Small configuration, as a run on its device resolves it."""
    config = parse_run(f"{SMALL} {flags}".split(), size).config
    return config if config.train.device == "cpu" else as_run(config, "cuda", narrow=True)


def fullest(stream: Stream, config: Config) -> dict[str, int]:
    """Return the most bytes of each forward and backward of a trace, by the estimate's names."""
    kinds = layer_kinds(config.model)
    found: dict[str, int] = {}
    for event, size in enumerate(stream.timeline()):
        phase, _, part = stream.where(event).partition(" ")
        if part.startswith("blocks."):
            number = int(part.removeprefix("blocks."))
            part = f"layer {number} ({kinds[number]})"
        if phase in ("forward", "backward"):
            name = f"{phase} of {part}"
            found[name] = max(found.get(name, 0), size)
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_part_has_its_fullest_moment(case: str) -> None:
    size, rank, flags = CASES[case]
    config = config_of(size, flags)
    traced = fullest(trace_step(config, size, rank, full=True), config)
    found = estimate(config, size, rank, detail=False).moments
    if config.mesh.pp == 1:
        found[ENDS[0]] = max(found.get(name, 0) for name in ENDS)
    else:
        traced.pop(ENDS[0], 0)  # which reduces, too
    misses = {name: round(found[name] / size - 1, 4) for name, size in traced.items()}
    assert all(-0.001 <= miss <= 0.015 for miss in misses.values()), misses


def test_mtp_that_the_trunk_learns_nothing_from_is_reduced_at_the_end() -> None:
    """Its weights stay gathered, and its gradients narrow, in the backward of the layers."""
    config = config_of(2, f"--model.pattern AFAF {APART} --model.mtp.hidden_dim 2048")
    traced = fullest(trace_step(config, 2, full=True), config)
    found = estimate(config, 2, detail=False).moments
    for name in ("backward of norm", "backward of layer 3 (F)"):
        assert found[name] == pytest.approx(traced[name], rel=0.002)


@pytest.mark.parametrize("case", REDUCED)
def test_reductions_of_a_pipeline(case: str) -> None:
    """Take many words, so that the peak is there: a head's unit is reduced before the blocks'."""
    flags = f"--model.pattern FFFF --model.mlp.hidden_dim 512 --data.seq_len 64 {REDUCED[case]}"
    config = config_of(2, f"{flags} --model.vocab_size 16384 --optim.name adamw")
    rank = 0 if "interleaved" in flags else 1
    found = estimate(config, 2, rank, detail=False)
    assert found.tensors == pytest.approx(trace_step(config, 2, rank).peak()[1], rel=0.005)
