"""Rotary positions and YaRN: against the formula, and far out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megacpp.blocks.attention import rope
from megacpp.blocks.attention.config import YarnConfig
from megacpp.model.documents import Documents
from tests.model.attention_cases import GQA, MLA, close, noise, packed


@pytest.mark.parametrize("start", [0, 1, 2], ids=["all", "odd_column", "even_column"])
def test_the_complex_product_is_the_rotation_written_out(start: int) -> None:
    table = rope.rotary_table(packed(), 6, GQA, torch.float64)
    x = noise(2, 23, 3, 6 + start).requires_grad_()
    d_y, results = noise(2, 23, 3, 6, seed=1), []
    for form in (rope.rotate_pairs, rope.rotate):
        y = form(x[..., start:], table)
        results.append((y, *torch.autograd.grad(y, x, d_y)))
    for want, got in zip(*results, strict=True):
        close(got, want)


def test_scores_depend_on_distance_only() -> None:
    q, k = noise(1, 1, 1, 8).expand(1, 40, 1, 8), noise(1, 1, 1, 8, seed=1).expand(1, 40, 1, 8)
    table = rope.rotary_table(Documents.rows(1, 40), 8, GQA, torch.float64)
    scores = (rope.rotate(q, table) @ rope.rotate(k, table)[0, 0, 0])[0, :, 0]
    later = (rope.rotate(q, table) @ rope.rotate(k, table)[0, 5, 0])[0, :, 0]
    close(later[5:], scores[:-5])


def test_angles_are_exact_far_out_and_never_narrow() -> None:
    far = Documents(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[1_000_003]]))
    table = rope.rotary_table(far, 8, GQA, torch.bfloat16)
    assert table.dtype == torch.float32
    want = [1_000_003 * 500_000.0 ** (-i / 4) for i in range(4)]
    got = table[0, 0].double()
    for pair, angle in enumerate(want):
        assert abs(got[pair, 0].item() - math.cos(angle)) < 1e-7  # fp32 rounding of the result
        assert abs(got[pair, 1].item() - math.sin(angle)) < 1e-7


def test_a_part_of_a_head_turns_as_a_head_of_its_own_and_the_rest_stands_still() -> None:
    docs, x = packed(), noise(2, 23, 3, 16)
    table = rope.rotary_table(docs, 16, replace(GQA, rope_fraction=0.375), torch.float64)
    own = rope.rotary_table(docs, 6, GQA, torch.float64)
    got = rope.rotate(x, table)
    close(got[..., :6], rope.rotate(x[..., :6], own))
    assert torch.equal(got[..., 6:], x[..., 6:])


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    yarn = YarnConfig(original_seq_len=4096, factor=40.0)
    plain = rope.inverse_frequencies(64, replace(MLA, rope_theta=1e4))
    config = replace(MLA, rope_theta=1e4, yarn=yarn, max_seq_len=4097)
    ratio = (rope.inverse_frequencies(64, config) / plain).tolist()
    # Pair i turns 4096 theta^(-i / 32) / 2 pi times: 32 times at i = 10.5, once at i = 22.5.
    assert ratio[:11] == [1.0] * 11
    assert all(abs(r - 1 / 40) < 1e-12 for r in ratio[23:])
    assert all(1 / 40 < r < 1.0 for r in ratio[11:23])
    assert abs(ratio[11] - (12 / 13 + 1 / 13 / 40)) < 1e-12
    mscale = 0.1 * math.log(40.0) + 1.0
    assert abs(rope.softmax_scale(192, config) - mscale**2 / math.sqrt(192)) < 1e-15
    short = replace(config, max_seq_len=4096)
    assert torch.equal(rope.inverse_frequencies(64, short), plain)
    assert rope.softmax_scale(192, short) == 192**-0.5
