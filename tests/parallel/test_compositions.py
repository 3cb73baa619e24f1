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
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.config.schema import MeshConfig
from tests.parallel.parity import AdamW, Run, Slices, Trace, adamw_bound, check, traces_of
from tests.together import Together

ADAMW = AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
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
    Run("plain", mesh(dp_shard=2, tp=2, ep=4, ep_dispatch="padded"), accum=2),
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
    Run("bias", mesh(cp=2, tp=2)),
    Run("bias", mesh(cp=2, cp_attention="ring")),
    Run("bias", mesh(cp=2, cp_attention="heads")),
    Run("bias", mesh(pp=2), accum=2),
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
    Run("tied", mesh(pp=2, dp_shard=2, pp_schedule="zbv"), accum=4, optimizer="muon_adamw"),
    Run("tied", mesh(pp=2, dp_shard=2, pp_schedule="dualpipev"), accum=4, evaluate=True),
    Run("plain", mesh(pp=2, dp_shard=2, ep=2, pp_schedule="zbv"), accum=4),
    # states handed over cp in series, and of MIMO, in a schedule that splits the backward
    Run("options", mesh(pp=2, cp=2, cp_m2rnn="serial", pp_schedule="zbv"), accum=4),
    Run("options", mesh(pp=2, cp=2, cp_m2rnn="serial", pp_schedule="dualpipev"), accum=4),
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
    # null experts and groups of experts, on every axis
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
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


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


@pytest.mark.parametrize("what", ["gradients", "clipped", "parameters"])
@pytest.mark.parametrize("run", [RUNS[0], Run("nulls", mesh(tp=2))], ids=str)
def test_a_broken_mesh_would_show(run: Run, what: str) -> None:
    """The comparison itself: one tensor that is 1e-9 off, whichever it is, is found."""
    expected = results()[run.reference][0]

    def off(slices: Slices, name: str) -> Slices:
        part = slices[name]
        return slices | {name: dataclasses.replace(part, local=part.local * (1 + 1e-9))}

    for name, part in expected.gradients.items():
        if not part.local.any():
            continue
        if what == "clipped":  # in the last step only
            first, last = expected.clipped[:-1], expected.clipped[-1]
            moved: Any = [*first, off(last, name)]
        else:
            moved = off(getattr(expected, what), name)
        with pytest.raises(AssertionError):
            check(results()[run], dataclasses.replace(expected, **{what: moved}), run.dtype)


def adamw(gradients: Sequence[Tensor], start: Tensor, correct: bool = True) -> Tensor:
    """Weights after torch's AdamW, or after one without bias correction."""
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], ADAMW.lr, ADAMW.betas, ADAMW.eps, fused=True)
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        if not correct:
            optimizer.state[weight]["step"] += 1
    return weight.detach()


def test_the_bound_of_adamw() -> None:
    """Holds from gradients of 1 to gradients that are rounding, is tight, and knows a formula."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(40, 50, generator=generator, dtype=torch.float64)

    size = torch.logspace(0, -16, 40, dtype=torch.float64)[:, None]
    gradients = [noise() * size for _ in range(3)]
    others = [g + 1e-15 * noise() for g in gradients]
    start = noise()
    weight = adamw(gradients, start)
    bound = adamw_bound(gradients, others, weight, ADAMW)
    difference = (adamw(others, start) - weight).abs()
    assert (difference <= bound).all()
    assert ((difference / bound).amax(1) > 0.02).all()
    assert bound[0].max() < 1e-13 and 1e-9 < bound[-1].max() < 1e-6
    assert ((adamw(gradients, start, correct=False) - weight).abs() > bound)[:-10].any(1).all()
