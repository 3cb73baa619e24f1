"""Closed forms of working sets against a traced step, part by part."""

from __future__ import annotations

import pytest
import torch

from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.kernels.linear_cross_entropy import chunked as linear_cross_entropy
from megacpp.memory.forms import working_head
from megacpp.memory.forms.activation_share import Share
from megacpp.memory.forms.batch import ids_bytes, mask_bytes
from megacpp.memory.forms.working import backward, first_attention, forward
from megacpp.model.pattern import block_letters
from tests.memory.working_cases import misses
from tests.memory.working_sets import working_sets

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
    own = Share.of(config, size, 0)
    letters = block_letters(config.model.pattern, config.model.depth)
    names = {f"blocks.{i}": letter for i, letter in enumerate(letters)}
    names[f"blocks.{len(letters) - 1}"] += " last"
    makes_mask = f"blocks.{letters.index('A')}"
    stream = trace_step(config, size)
    with_batch, batch = working_sets(stream, batch=True), ids_bytes(own) + mask_bytes(own, letters)
    for (phase, part), found in working_sets(stream).items():
        form = forward if phase == "forward" else backward
        moments = form(own, names.get(part, part))
        if (phase, part) == ("forward", makes_mask):
            found = with_batch[phase, part]
            moments = tuple(moment.more(batch) for moment in first_attention(own, names[part]))
        most = max(moment.bytes for moment in moments)
        # Indices and sums of single tokens are left out; nothing that is left out weighs more.
        assert 0.995 <= most / found.bytes <= 1.02, (phase, part, most, found.bytes)


def test_gradients_are_part_of_a_moment() -> None:
    config = parse_run([*f"{NAM56R} AEF".split(), *ONE_STEP.split()], 8).config
    own = Share.of(config, 8, 0)
    dim, hidden = config.model.dim, config.model.mlp.hidden_dim
    assert max(m.gradients for m in backward(own, "F")) == 3 * dim * hidden * 2 + dim * 4
    assert not any(m.gradients for m in forward(own, "F"))


@pytest.mark.parametrize("tokens", [1, 100, 4096, 65_536])
@pytest.mark.parametrize("words", [256, 32_768])
def test_chunks_of_the_head_are_those_of_the_kernel(tokens: int, words: int) -> None:
    x_ND, w_VD = (torch.empty(n, 640, device="meta") for n in (tokens, words))
    assert working_head.chunk_rows(tokens, 640, words) == linear_cross_entropy.chunk_rows(
        x_ND, w_VD
    )


def test_blocks_of_kernels_are_as_large() -> None:
    assert working_head.FEWEST_ROWS == linear_cross_entropy.FEWEST_ROWS


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
