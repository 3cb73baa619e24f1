"""Launches and bytes of each kind of block: by hand where that is short, and as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.gpu.tables import write_section
from bench.launches import (
    CASES,
    HEADING,
    PAGE,
    Count,
    counted,
    line,
)
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.kernels.linear_cross_entropy.chunked import (
    ONE_CHUNK,
    chunk_rows,
    linear_cross_entropy,
)
from tests.model.in_child import run_cases

# The recurrences of torch's forms have thousands of launches: many seconds each.
QUICK = [case for case in CASES if case[0] != "G" and case[1:] != ("m2rnn", "torch")]


def test_an_operator_is_a_launch_and_a_view_is_none() -> None:
    """Products, copies and SiLU are launches; views and empty memory aren't. Bytes by hand."""
    with counted() as counter:
        x, w = torch.empty(8, 4, requires_grad=True), torch.empty(4, 4, requires_grad=True)
        counter.now = forward = Count()
        y = F.silu((x @ w.T).view(2, 4, 4)[:, 1:].contiguous())
        counter.now = backward = Count()
        y.backward(torch.empty_like(y))
    product, part = 32 + 16 + 32, 24
    assert forward == Count(3, 0, 4 * (product + 2 * part + 2 * part))
    assert backward == Count(4, 0, 4 * (3 * part + (part + 32) + 2 * product))


def test_a_tensor_written_to_is_not_read() -> None:
    """Adding a product into a tensor reads it and both factors and writes it, either way."""
    with counted() as counter:
        total, x, w = torch.empty(8, 4), torch.empty(8, 4), torch.empty(4, 4)
        torch.addmm(total, x, w, out=total)
        total.addmm_(x, w)
    assert counter.now == Count(2, 0, 2 * 4 * (32 + 32 + 16 + 32))


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_the_page_has_todays_counts(case: tuple[str, str, str]) -> None:
    pytest.importorskip("triton")
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    assert line(case) in section.splitlines(), "python -m bench.launches --write"


def test_what_a_compiler_schedules() -> None:
    """In a process of its own: Inductor remembers whether its first question found a GPU."""
    pytest.importorskip("triton")
    run_cases("tests/scheduled_cases.py", interpreted=False)


@pytest.mark.parametrize("later", ["", "\n## B\n\nb\n\n## C\n\nc\n"])
def test_a_section_is_rewritten_in_place(tmp_path: Path, later: str) -> None:
    page = tmp_path / "page.md"
    text = f"# A\n\n{HEADING}\n\nWords.\n\n| old |\n{later}"
    page.write_text(text)
    for _ in range(2):
        write_section(page, HEADING, "| new |")
        assert page.read_text() == text.replace("old", "new")


@pytest.mark.parametrize("sizes, rows", [((8192, 3584, 65536), 8192), ((8192, 1024, 65536), 4096)])
def test_all_tokens_at_once_where_that_takes_no_more_memory(
    sizes: tuple[int, int, int], rows: int
) -> None:
    """A single chunk has more logits, and no sum of the weight's gradient in fp32."""
    pytest.importorskip("triton")

    def held(chunk: int | None) -> tuple[int, int]:
        tokens, dim, words = sizes
        with counted() as counter, LiveBytes() as live:
            x_ND, weight_VD = (torch.empty(n, dim, dtype=torch.bfloat16) for n in (tokens, words))
            leaves, before = (x_ND.requires_grad_(), weight_VD.requires_grad_()), live.now
            target_N = torch.empty(tokens, dtype=torch.int64)
            assert chunk or chunk_rows(*leaves, "triton") == rows
            linear_cross_entropy(*leaves, target_N, chunk=chunk, backend="triton")
            return live.peak - before, counter.now.bytes

    (peak, moved), (of_chunks, moved_by_chunks) = held(None), held(4096)
    assert peak <= ONE_CHUNK * of_chunks
    assert rows == 4096 or moved < 0.6 * moved_by_chunks
