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

STEP = "--train.tokens_per_step 0 --train.grad_accum 2 --data.seq_len 256"
SMALL = f"tiny --model.depth 4 --model.dim 256 --train.device_batch_size 2 {STEP}"
MLA = "--model.attention.kind mla --model.attention.no-qk-norm --model.attention.q_lora_rank 96"
LATENTS = f"--model.pattern AFAF {MLA} --recompute.mla_q_upproj --recompute.mla_kv"
SHARED = "--model.moe.num_shared 1 --model.moe.shared_hidden_dim 512 --model.mlp.hidden_dim 1024"
CASES = {  # ranks and flags
    "weights of recomputed feed-forwards": (1, f"--model.pattern EFEF {SHARED} --recompute.mlp"),
    "weights of recomputed latents": (1, LATENTS),
    "one rank a stage": (2, "--model.pattern AFAF --mesh.pp 2 --train.grad_accum 4"),
    "masks of mtp alone": (1, "--model.pattern RFRF --train.device cpu --model.mtp.depths 1"),
}


def fullest(stream: Stream, config: Config) -> dict[str, int]:
    """Return the most bytes of each forward and backward of a trace, by the estimate's names."""
    kinds = dict(enumerate(config.model.pattern))
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
    size, flags = CASES[case]
    config = parse_run(f"{SMALL} {flags}".split(), size).config
    if config.train.device != "cpu":
        config = as_run(config, "cuda", narrow=True)
    traced = fullest(trace_step(config, size, size - 1, full=True), config)
    found = estimate(config, size, size - 1, detail=False).moments
    misses = {name: round(found[name] / size - 1, 4) for name, size in traced.items()}
    assert all(-0.001 <= miss <= 0.015 for miss in misses.values()), misses
