"""The fullest moment of the optimizer's step in an estimate, against a trace of the step.

Small batches: temporaries of Muon and of AdamW's variants are the largest tensors.
"""

from __future__ import annotations

import pytest

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.budget import as_planned
from megacpp.memory.estimate import estimate
from tests.memory.test_estimate import UNDER

SMALL = "tiny --train.device_batch_size 1 --data.seq_len 64 --train.device"
CASES = [  # ranks, device, and what else is set
    (1, "cpu", ""),
    (1, "cuda", ""),
    (1, "cuda", "--optim.muon_dtype fp32"),
    (1, "cuda", "--optim.muon_bucket_mib 1"),  # no batch is larger
    (2, "cuda", ""),  # experts lie whole on a rank
    (2, "cuda", "--mesh.ep 2"),
    (1, "cpu", "--optim.adamw_state 8bit"),
    (2, "cuda", "--optim.name adamw --optim.adamw_state 4bit"),
    (1, "cuda", "--optim.adamw_state 8bit --model.vocab_size 50257"),  # no whole number of blocks
    (1, "cpu", "--optim.name adamw --optim.cautious_weight_decay true"),
    (1, "cuda", "--optim.cautious_weight_decay true --model.vocab_size 50257"),
    (1, "cuda", "--optim.cautious_weight_decay true --optim.adamw_state 8bit"),
]


@pytest.mark.parametrize(
    ("size", "device", "flags"), CASES, ids=[" ".join(map(str, c)) for c in CASES]
)
def test_temporaries_of_the_optimizer(size: int, device: str, flags: str) -> None:
    if "bit" in flags:
        pytest.importorskip("torchao.optim", reason="torchao isn't installed (the lowp extra)")
    config = as_planned(parse_run(f"{SMALL} {device} {flags}".split(), size).config)
    stream = trace_step(config, size, full=True)
    line = stream.timeline()
    peak = max(now for at, now in enumerate(line) if stream.where(at) == "optimizer")
    found = estimate(config, size, detail=False).moments["optimizer step"]
    assert (1 - UNDER) * peak <= found <= (1 + UNDER) * peak
