"""Every pair of mesh axes, and four at once: the same run as one process, for every kind of block.

Forked gloo ranks and tests/parallel/parity.py. Each model has blocks of all five letters, so that
a pair that is proven is proven for each of them: `plain` is GQA, SISO Mamba-3 and sigmoid routing;
`options` MLA with low-rank queries and YaRN, MIMO Mamba-3 with groups, convolution and output norm,
M2RNN with heads of their own, softmax routing with a gated shared expert; `tied` shares the
embedding. docs/18-compositions.md prints the table that follows from RUNS.
"""

from __future__ import annotations

import dataclasses
import functools
from itertools import combinations

import pytest
import torch

from megacpp.config import MeshConfig
from tests.parallel.parity import Run, Trace, check, traces_of

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


RUNS = [
    # each axis alone (dp: test_fsdp.py; tp: test_tensor.py)
    Run("plain", mesh(cp=2)),
    Run("options", mesh(cp=2)),
    Run("plain", mesh(cp=2, cp_attention="ring", cp_mamba3="heads", cp_m2rnn="serial")),
    Run("mla", mesh(cp=2, cp_attention="heads", cp_order="contiguous")),
    Run("plain", mesh(cp=4, cp_order="contiguous")),
    Run("plain", mesh(cp=2), dtype="fp32"),
    Run("plain", mesh(dp_shard=2, ep=2)),
    Run("plain", mesh(dp_shard=4, ep=4, ep_dispatch="per_expert")),
    Run("options", mesh(dp_shard=2, ep=2), dtype="fp32"),
    Run("plain", mesh(pp=2), accum=4, evaluate=True),
    Run("options", mesh(pp=4), accum=4),
    Run("plain", mesh(pp=2), accum=4, dtype="fp32"),
    Run("plain", mesh(pp=2, pp_schedule="interleaved"), accum=4),
    Run("plain", mesh(pp=2, pp_schedule="zbv"), accum=4),
    Run("options", mesh(pp=2, pp_schedule="dualpipev"), accum=4),
    Run("plain", mesh(pp=2, pp_schedule="gpipe"), accum=2),
    # pairs
    Run("plain", mesh(dp_replicate=2, dp_shard=2)),
    Run("options", mesh(dp_shard=2, tp=2)),
    Run("tied", mesh(dp_shard=2, tp=2), accum=2),
    Run("options", mesh(dp_replicate=2, tp=2)),
    Run("options", mesh(dp_shard=2, cp=2), evaluate=True),
    Run("plain", mesh(dp_replicate=2, cp=2)),
    Run("options", mesh(cp=2, tp=2)),
    Run("tied", mesh(cp=2, tp=2)),
    Run("plain", mesh(dp_shard=4, ep=2)),
    Run("plain", mesh(dp_replicate=2, dp_shard=2, ep=2)),
    Run("options", mesh(dp_shard=2, tp=2, ep=4)),
    Run("plain", mesh(dp_shard=2, tp=2, ep=2), accum=2),
    Run("plain", mesh(tp=4, ep=4)),
    Run("plain", mesh(cp=2, tp=2, ep=4)),
    Run("options", mesh(cp=2, dp_shard=2, ep=2)),
    Run("plain", mesh(pp=2, dp_shard=2), accum=4),
    Run("plain", mesh(pp=2, dp_replicate=2), accum=2),
    Run("options", mesh(pp=2, tp=2), accum=2, evaluate=True),
    Run("tied", mesh(pp=2, tp=2), accum=2),
    Run("options", mesh(pp=2, cp=2), accum=2),
    Run("plain", mesh(pp=2, dp_shard=2, ep=2), accum=2),
    Run("plain", mesh(pp=2, dp_shard=2, pp_schedule="dualpipev"), accum=4),
    Run("options", mesh(pp=2, dp_replicate=2), accum=2),
    Run("options", mesh(pp=2, dp_shard=2, ep=2), accum=2),
    Run("options", mesh(dp_replicate=2, dp_shard=2, ep=2)),
    Run("options", mesh(dp_replicate=2, cp=2)),
    # a balance loss over the whole microbatch, and Muon on whole matrices that no rank has
    Run("balance", mesh(dp_shard=2, tp=2), accum=2),
    Run("balance", mesh(cp=2, dp_shard=2, ep=4)),
    Run("balance", mesh(pp=2, tp=2), accum=2),
    Run("options", mesh(dp_shard=2, tp=2, ep=4), optimizer="muon_adamw"),
    Run("plain", mesh(dp_replicate=2, cp=2), optimizer="muon_adamw"),
    Run("tied", mesh(pp=2, tp=2), accum=2, optimizer="muon_adamw"),
    # null experts and groups of experts, on every axis; an expert of few tokens has gradients so
    # small that AdamW makes 1e-12 of their last bit, Muon doesn't
    Run("nulls", mesh(tp=2)),
    Run("nulls", mesh(cp=2), optimizer="muon_adamw"),
    Run("nulls", mesh(dp_shard=2, ep=2, ep_dispatch="per_expert"), optimizer="muon_adamw"),
    Run("nulls", mesh(pp=2), accum=2),
    Run("nulls", mesh(dp_replicate=2, dp_shard=2, ep=2)),
    Run("nulls", mesh(cp=2, tp=2, ep=4), optimizer="muon_adamw"),
    Run("nulls", mesh(pp=2, dp_shard=2, ep=2), accum=2),
    # more at once, on 8 ranks
    Run("options", mesh(pp=2, dp_shard=2, tp=2), accum=2),
    Run("plain", mesh(dp_replicate=2, dp_shard=2, tp=2, ep=2)),
    Run("plain", mesh(dp_shard=2, cp=2, tp=2, ep=4)),
    Run("tied", mesh(pp=2, cp=2, tp=2, ep=2), accum=2),
]


NARROW = [
    Run("options", config, accum=2, dtype="bf16")
    for config in (
        mesh(dp_shard=2),
        mesh(tp=2),
        mesh(cp=2),
        mesh(dp_shard=2, ep=2),
        mesh(pp=2),
        mesh(dp_shard=2, tp=2, ep=4),
        mesh(pp=2, cp=2),
    )
]


@functools.cache
def results() -> dict[Run, list[Trace]]:
    return traces_of([*RUNS, *(run.reference for run in RUNS)])


def axes_of(run: Run) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if getattr(run.mesh, axis) > 1)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    check(results()[run], results()[run.reference][0], run.dtype)


@pytest.mark.parametrize("run", [run for run in RUNS if run.evaluate], ids=str)
def test_the_same_evaluation(run: Run) -> None:
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        assert trace.sharded and trace.evaluations == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_expert_counts_are_the_same_integers(run: Run) -> None:
    """Summed over the ranks of a stage; each stage has the routers of its own layers."""
    expected = results()[run.reference][0].counts
    assert expected and all(counts.sum() > 0 for counts in expected)
    found = [trace.counts for trace in results()[run]]
    assert any(counts for counts in found)
    for counts in found:
        assert all(any(torch.equal(own, one) for one in expected) for own in counts)


def test_bf16_stays_near_fp32() -> None:
    """bf16 compute, fp32 masters, reductions and contract: 8 bits keep each loss to 2^-8."""
    wide = Run("options", mesh(), accum=2, dtype="fp32")
    found = traces_of([*NARROW, wide])
    for run in NARROW:
        for trace in found[run]:
            for part in trace.parameters.values():
                assert part.local.dtype == torch.float32
            for a, b in zip(trace.losses, found[wide][0].losses, strict=True):
                assert a != b and abs(a / b - 1) < 2**-8, (str(run), trace.losses)


def test_every_pair_of_axes_is_among_them() -> None:
    proven = {pair for run in RUNS for pair in combinations(axes_of(run), 2)}
    assert proven == set(combinations(AXES, 2))


def test_a_broken_mesh_would_show() -> None:
    """The comparison itself: another seed's gradients are far away."""
    run = RUNS[0]
    expected = results()[run.reference][0]
    moved = {
        k: dataclasses.replace(v, local=v.local * (1 + 1e-9)) for k, v in expected.gradients.items()
    }
    other = dataclasses.replace(expected, gradients=moved)
    with pytest.raises(AssertionError):
        check(results()[run], other, run.dtype)
