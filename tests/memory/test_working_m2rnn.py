"""What R blocks have alive, in closed form, against traced steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkpointing.tracing.recorder import Recorder
from megacpp.kernels.m2rnn.reference import m2rnn_chunked
from megacpp.model.documents import Documents
from tests.memory.working_cases import misses

LEAST, MOST = -0.5, 2.0  # per cent of the trace

# With many heads the mixer is fuller than the norm in front of it.
MANY = "--recompute.rblock recurrence --model.m2rnn.num_heads 96"
CASES = {
    "runs again as a whole": ("", 8),
    "keeps all states, fp32": ("--recompute.rblock none --precision.dtype fp32", 1),
    "some of the heads": (
        "--recompute.rblock recurrence --model.m2rnn.num_heads 96 --mesh.tp 2",
        2,
    ),
    "heads for tokens": (f"{MANY} --mesh.cp 2", 2),
    "chunk after chunk": ("--recompute.rblock recurrence --mesh.cp 2 --mesh.cp_m2rnn serial", 2),
}


@pytest.mark.parametrize("name", [*CASES])
def test_moments_are_those_of_a_trace(name: str) -> None:
    flags, size = CASES[name]
    found = misses("RR", flags, size, rank=size - 1)
    assert all(LEAST < miss < MOST for miss in found.values()), found


B, T, N, K, V, CHUNK = 2, 96, 2, 8, 16, 32
STATES = 4 * CHUNK * B * N * K * V  # bytes of those of a chunk


def most_bytes(starts: tuple[int, ...]) -> int:
    """Peak bytes of tensors in forward and backward, where documents start at tokens of row 0."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((B, T, N, K), (B, T, N, K), (B, T, N, V), (B, T, N), (N, V, V))
    leaves = [torch.rand(shape, generator=gen).requires_grad_() for shape in shapes]
    ids_BT = torch.zeros(B, T, dtype=torch.int64)
    for start in starts:
        ids_BT[0, start:] += 1
    docs = Documents.from_ids(ids_BT)
    with Recorder(nn.Module()) as recorder:
        recorder.begin()
        m2rnn_chunked(*leaves, docs, chunk_size=CHUNK)[0].sum().backward()
    return recorder.stream().peak()[1]


def test_a_document_that_starts_in_a_chunk_costs_the_states_of_a_token() -> None:
    """Of many starts the bound has room for the states of a chunk, twice."""
    plain = most_bytes(())
    assert 0 <= most_bytes((40,)) - plain <= STATES // 8
    assert most_bytes(tuple(range(1, T))) - plain <= 2 * STATES
    assert most_bytes(tuple(range(1, T, 2))) - plain <= 2 * STATES
