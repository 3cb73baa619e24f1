"""The fullest moment of the optimizer's step in an estimate, against a trace of the step.

Small batches: temporaries of Muon are the largest tensors.
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
]


@pytest.mark.parametrize(
    ("size", "device", "flags"), CASES, ids=[" ".join(map(str, c)) for c in CASES]
)
def test_temporaries_of_the_optimizer(size: int, device: str, flags: str) -> None:
    config = as_planned(parse_run(f"{SMALL} {device} {flags}".split(), size).config)
    stream = trace_step(config, size, full=True)
    line = stream.timeline()
    peak = max(now for at, now in enumerate(line) if stream.where(at) == "optimizer")
    found = estimate(config, size, detail=False).moments["optimizer step"]
    assert (1 - UNDER) * peak <= found <= (1 + UNDER) * peak
