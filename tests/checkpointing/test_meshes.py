"""Any policy on any mesh: the same training as with everything kept on one process.

Forked gloo ranks, fp64 at 1e-12 (tests/parallel/parity.py): loss, norm and auxiliary terms of three
steps, gradients of the first, expert counts, weights after the last. Packed documents throughout.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest

from megacpp.config.checks.recompute import recompute_rules
from megacpp.config.schema import KEEP, MeshConfig
from tests.parallel.parity import Run, Trace, check, config_of, traces_of
from tests.together import Together

REGIONS = replace(
    KEEP,
    ablock="selective",
    eblock="expert_gemm_only",
    mblock="conv_bc_only",
    rblock="recurrence",
    norms=True,
    mlp=True,
)
BLOCKS = replace(
    KEEP,
    ablock="full",
    eblock="full",
    mblock="conv_bc_only",
    rblock="full_plus_norms",
    fblock="full",
)
# With experts on ranks: whole E blocks would send rows again, and are refused.
SPREAD_BLOCKS = replace(BLOCKS, eblock="expert_gemm_only")
KEEP_STATES = replace(KEEP, rblock="none")
RUNS = [
    Run("plain", recompute=REGIONS, accum=2),
    Run("plain", recompute=BLOCKS, accum=2),
    Run("options", recompute=KEEP_STATES),
    Run("plain", MeshConfig(dp_shard=2), recompute=REGIONS, accum=2),
    Run("plain", MeshConfig(dp_shard=2), recompute=BLOCKS, accum=2, sync="each"),
    Run("options", MeshConfig(tp=2, dp_shard=1), recompute=REGIONS),
    Run("mla", MeshConfig(tp=2, dp_shard=1), recompute=BLOCKS),
    Run("options", MeshConfig(cp=2, dp_shard=1), recompute=REGIONS),
    Run("plain", MeshConfig(cp=2, dp_shard=1, cp_attention="ring"), recompute=BLOCKS),
    Run(
        "mla",
        MeshConfig(cp=2, dp_shard=1, cp_attention="heads", cp_mamba3="heads"),
        recompute=REGIONS,
    ),
    Run("plain", MeshConfig(dp_shard=2, ep=2), recompute=REGIONS, accum=2),
    Run("options", MeshConfig(dp_shard=2, ep=2, ep_dispatch="per_expert"), recompute=SPREAD_BLOCKS),
    Run("plain", MeshConfig(pp=2, dp_shard=1), recompute=REGIONS, accum=4),
    Run("mla", MeshConfig(pp=2, dp_shard=1, pp_schedule="interleaved"), recompute=BLOCKS, accum=4),
    Run("plain", MeshConfig(pp=2, dp_shard=1, pp_schedule="zbv"), recompute=REGIONS, accum=4),
    Run("options", MeshConfig(dp_shard=2, tp=2, ep=2), recompute=REGIONS, accum=2),
    Run("plain", MeshConfig(dp_shard=2, tp=2, ep=4), recompute=SPREAD_BLOCKS, accum=2),
    Run("plain", MeshConfig(pp=2, dp_shard=2, ep=2), recompute=REGIONS, accum=4),
    Run(
        "options", MeshConfig(dp_replicate=2, dp_shard=2), recompute=REGIONS, optimizer="muon_adamw"
    ),
]


@pytest.fixture(scope="module")
def traces() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run, traces: dict[Run, list[Trace]]) -> None:
    check(traces[run], traces[run.reference][0], run.dtype)
    ran = set().union(*(trace.again for trace in traces[run]))
    wanted = {REGIONS: {"norm", "core_attn", "mlp", "expert_gemm", "conv_bc"}, BLOCKS: {"block"}}
    wanted[SPREAD_BLOCKS] = {"block", "expert_gemm"}
    assert wanted.get(run.recompute, set()) <= ran


SENDS = [
    Run("plain", MeshConfig(dp_shard=2, ep=2), accum=2),
    Run("plain", MeshConfig(dp_shard=2, ep=2, ep_dispatch="per_expert"), accum=2),
    Run("options", MeshConfig(tp=2, dp_shard=1)),
    Run("options", MeshConfig(cp=2, dp_shard=1)),
    Run("plain", MeshConfig(dp_shard=2, tp=2, ep=2), accum=2),
]


@pytest.fixture(scope="module")
def sends() -> Together[Run, list[Trace]]:
    make, again = functools.partial(traces_of, collectives=True), (REGIONS, SPREAD_BLOCKS)
    return Together(__name__, SENDS, make, lambda run: [replace(run, recompute=p) for p in again])


@pytest.mark.parametrize("run", SENDS, ids=str)
def test_no_piece_sends_anything_again(run: Run, sends: dict[Run, list[Trace]]) -> None:
    """Not a byte but the inputs of mixers over `tp`, which `recompute.regather` gathers again."""
    for keeps, rebuilds in zip(sends[run], sends[replace(run, recompute=REGIONS)], strict=True):
        more = Counter(rebuilds.collectives) - Counter(keeps.collectives)
        assert not Counter(keeps.collectives) - Counter(rebuilds.collectives)
        assert all(c.axis == "tp" and c.kind == "all_gather" for c in more)
        assert bool(more) == (run.mesh.tp > 1)
        left = list(rebuilds.collectives)
        for c in keeps.collectives:  # and in the same order
            left = left[left.index(c) + 1 :]


@pytest.mark.parametrize("run", SENDS, ids=str)
def test_whole_blocks_send_tokens_again_and_never_an_expert_s_rows(
    run: Run, sends: dict[Run, list[Trace]]
) -> None:
    """Over `ep` and over shards the same, one by one; over `tp` and `cp` what a forward sends."""
    within = {"tp", "cp"}
    again = sends[replace(run, recompute=SPREAD_BLOCKS)]
    for keeps, rebuilds in zip(sends[run], again, strict=True):
        assert rebuilds.again["block"] > 0
        others = [
            [c for c in trace.collectives if c.axis not in within] for trace in (keeps, rebuilds)
        ]
        assert others[0] == others[1]
        more = Counter(rebuilds.collectives) - Counter(keeps.collectives)
        assert {c.axis for c in more} <= within
        assert bool(more) == (run.mesh.tp > 1 or run.mesh.cp > 1)


def test_whole_expert_blocks_are_refused_where_they_would_send() -> None:
    base = config_of(Run("plain", MeshConfig(dp_shard=2, ep=2)))
    refused = replace(base, recompute=BLOCKS)
    (error,) = recompute_rules(refused)
    assert str(error).startswith("recompute.eblock=full: would send the rows of all experts again")
    assert not list(recompute_rules(replace(base, recompute=SPREAD_BLOCKS)))
    assert not list(recompute_rules(replace(refused, mesh=MeshConfig(dp_shard=2))))
