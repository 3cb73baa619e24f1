"""Meshes, schedules, exchanges and policies drawn at random are the same run as one process.

Other files of this folder list the combinations that are likely to differ. These are drawn by a
fixed seed from all that the configuration's rules allow, on two ranks, in fp64. A draw that no rule
refuses must train.
"""

from __future__ import annotations

import functools
import random

import pytest

from megacpp.config.checks.every import broken
from megacpp.config.policy import CheckpointingPolicy
from megacpp.config.schema import MeshConfig
from tests.figures import Record
from tests.parallel.parity import Run, Trace, check, config_of, models, traces_of
from tests.together import Together

CASES, SEED = 8, 2026
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def drawn(draw: random.Random) -> Run:
    """Return a run on two ranks; a rule may refuse it."""
    name = draw.choice(sorted(models()))
    degrees = {axis: 1 for axis in AXES} | {draw.choice(AXES): 2}
    spread = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    experts = "E" in models()[name].pattern
    mesh = MeshConfig(
        **degrees,
        ep=draw.choice([1, spread]) if experts else 1,
        reshard=draw.choice(["auto", "always", "never"]),
        cp_order=draw.choice(["head_tail", "contiguous"]),
        cp_attention=draw.choice(["all_gather", "ring", "heads"]),
        cp_mamba3=draw.choice(["state", "heads"]),
        cp_m2rnn=draw.choice(["auto", "heads", "serial"]),
        cp_gated_deltanet=draw.choice(["state", "heads"]),
        ep_dispatch=draw.choice(["per_rank", "per_expert", "padded"]),
        pp_schedule=draw.choice(["gpipe", "1f1b", "interleaved", "looped_bfs", "zbv", "dualpipe"]),
    )
    policy = CheckpointingPolicy(
        ablock=draw.choice(["none", "selective", "full"]),
        eblock=draw.choice(["none", "expert_gemm_only", "full"]),
        mblock=draw.choice(["none", "conv_bc_only"]),
        rblock=draw.choice(["none", "recurrence", "full_plus_norms"]),
        gblock=draw.choice(["none", "conv_gate", "full"]),
        fblock=draw.choice(["none", "full"]),
        norms=draw.random() < 0.5,
        mlp=draw.random() < 0.5,
    )
    sync = draw.choice(["defer", "each", "resident"])
    accum = draw.choice([2, 4] if mesh.pp > 1 else [1, 2])
    return Run(name, mesh, accum, sync=sync, recompute=policy, evaluate=draw.random() < 0.3)


def allowed(run: Run) -> bool:
    return not any(broken(config_of(run), run.world))


@functools.cache
def runs() -> list[Run]:
    """Return the first draws that all rules allow."""
    draw, found = random.Random(SEED), list[Run]()
    while len(found) < CASES:
        run = drawn(draw)
        if run not in found and allowed(run):
            found.append(run)
    return found


@functools.cache
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, runs(), traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", runs(), ids=str)
def test_the_same_run(run: Run, record_property: Record) -> None:
    check(results()[run], results()[run.reference][0], run.dtype)
    record_property("meshes equal one rank", 1)
