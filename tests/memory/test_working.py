"""Bytes that each part needs while it runs, against a traced step."""

from __future__ import annotations

import pytest

from megacpp.config.arguments import parse_run
from megacpp.memory.block_trace import moments
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, request_of, trace_of
from tests.memory.working_cases import misses, ratios

ONE_STEP = "--train.grad_accum 1 --train.tokens_per_step 0"
NAM56R = "nam56r_base --model.depth 3 --model.pattern"
MLA = "--model.attention.kind mla --model.attention.qk_norm false"
CASES = (
    (1, f"{NAM56R} AEF"),
    (8, f"{NAM56R} AEF --mesh.tp 2 --mesh.ep 4"),
    (64, f"{NAM56R} EFA --mesh.tp 2 --mesh.cp 2 --mesh.ep 8"),
    (8, "nam52_deep_base --model.depth 3 --model.pattern EFA --mesh.ep 8 --recompute.fblock full"),
    (8, "moe_small --model.depth 3 --mesh.ep 4 --mesh.ep_dispatch per_expert"),
    (8, "dense_110m --model.depth 3 --mesh.cp 4 --mesh.cp_attention ring --recompute.norms true"),
    (8, "dense_110m --model.depth 3 --mesh.cp 4 --mesh.cp_attention heads --recompute.mlp true"),
    (8, f"dense_110m --model.depth 3 {MLA} --mesh.tp 2 --recompute.ablock full"),
)


@pytest.mark.parametrize(("size", "flags"), CASES, ids=[f"{n} {flags}" for n, flags in CASES])
def test_moments_are_those_of_a_trace(size: int, flags: str) -> None:
    config = parse_run([*flags.split(), *ONE_STEP.split()], size).config
    # Indices and sums of single tokens are left out; nothing that is left out weighs more.
    found = ratios(config, size)
    assert found and all(0.995 <= ratio <= 1.02 for ratio in found.values()), found


def test_gradients_are_part_of_a_moment() -> None:
    config = parse_run([*f"{NAM56R} AEF".split(), *ONE_STEP.split()], 8).config
    own = LocalShapes.on_rank(config, 8, 0)
    dim, hidden = config.model.dim, config.model.mlp.hidden_dim
    trace = trace_of(request_of(own, TracedPart(("F",))))
    made = max(m.gradients for m in moments(trace, backward=True))
    assert made == 3 * dim * hidden * 2 + dim * 4
    assert not any(m.gradients for m in moments(trace, backward=False))


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, "--mesh.tp 2 --mesh.ep 4 --recompute.eblock expert_gemm_only"),
        (4, "--mesh.cp 2 --mesh.ep 4 --model.moe.num_groups 8 --model.moe.top_k_groups 4"),
    ],
)
def test_null_experts(size: int, flags: str) -> None:
    """The slots of a token are 12, its experts 6 on average: rows are those of 6."""
    found = misses("EE", f"--model.moe.null_rho 0.5 {flags}", size)
    assert max(map(abs, found.values())) < 0.5, found
