"""A run with audits is the run without, bit for bit; one wrong gradient ends it or rewinds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parallel.audit import AuditedBoundary
from tests.launch import forked
from tests.test_run import ADAMW, SMALL, records


def test_an_audit_changes_no_weight_and_ends_a_wrong_run_or_rewinds_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SMALL, *ADAMW, "--data.path", str(corpus), "--checkpoint.every", "2"]
    flags += "--model.depth 2 --model.pattern ME --run.steps 6 --run.sample-tokens 0".split()
    flags += "--train.device-batch-size 1 --train.grad-accum 2".split()
    folders = [tmp_path / name for name in ("plain", "audited", "rewound", "ends")]
    plain, audited, rewound, ends = folders

    def start(folder: Path, *more: str) -> Any:
        return forked("tiny", *flags, "--run.dir", str(folder), *more, ranks=2)

    assert start(plain).returncode == 0
    done = start(audited, "--run.audit-every", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradients computed again in") == 2

    digests = AuditedBoundary._digests

    def hit(self: AuditedBoundary, batches: Any, step: int, state: Any) -> Tensor:
        found, mark = digests(self, batches, step, state), tmp_path / "hit"
        if step == 4 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            found[0] += 1
        return found

    monkeypatch.setattr(AuditedBoundary, "_digests", hit)
    done = start(ends, "--run.audit-every", "1")
    assert done.returncode == 5 and done.stderr.count("\n") == 1, done.stderr
    assert "after step 5 the gradient of " in done.stderr
    assert " on rank 1 differs when it is computed again: a device" in done.stderr
    assert sorted(path.name for path in (ends / "checkpoints").glob("step-*"))[-1] == "step-000004"
    (tmp_path / "hit").unlink()
    done = start(rewound, "--run.audit-every", "1", "--train.rewinds", "1")
    assert done.returncode == 0 and "no row is skipped" in done.stdout, done.stdout + done.stderr
    weights = [(folder / "final/model.safetensors").read_bytes() for folder in folders[:3]]
    assert weights[0] == weights[1] == weights[2]
    for key in ("loss", "grad_norm"):
        values = [[row[key] for row in records(folder)] for folder in folders[:3]]
        assert values[0] == values[1] == values[2], key
    assert ["audit_s" in row for row in records(audited)] == [False, False, True] * 2
