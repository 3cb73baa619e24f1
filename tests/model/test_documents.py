"""Document boundaries against a walk over every token.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacpp.model import documents
from megacpp.model.documents import Documents, documents_of
from parallel.context.layout import ContextLayout, Order
from parallel.context.segments import segment_documents
from tests.golden.harness import packed_row


def walk(ids_BT: Tensor) -> tuple[list[list[int]], list[list[bool]], list[list[bool]], list[int]]:
    """Positions, starts and ends of each token, and all boundaries: one token at a time."""
    positions, starts, ends, boundaries, flat = [], [], [], [0], 0
    for row in ids_BT.tolist():
        positions.append([])
        for t, number in enumerate(row):
            first = t == 0 or row[t - 1] != number
            positions[-1].append(0 if first else positions[-1][-1] + 1)
            flat += 1
            if t + 1 == len(row) or row[t + 1] != number:
                boundaries.append(flat)
        starts.append([p == 0 for p in positions[-1]])
        ends.append([t + 1 == len(row) or row[t + 1] != row[t] for t in range(len(row))])
    return positions, starts, ends, boundaries


def random_ids(rows: int, tokens: int, seed: int) -> Tensor:
    """Random cuts; numbers repeat later in a row, decrease, and may be large."""
    generator = torch.Generator().manual_seed(seed)
    change_BT = torch.rand(rows, tokens, generator=generator) < 0.35
    return (change_BT.cumsum(1) * 7 % 3 - 1) * 10**12


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 17), (4, 1), (3, 29), (2, 64)])
@pytest.mark.parametrize("seed", range(4))
def test_from_ids_is_the_walk(rows: int, tokens: int, seed: int) -> None:
    ids_BT = random_ids(rows, tokens, seed)
    docs = Documents.from_ids(ids_BT)
    positions, starts, ends, boundaries = walk(ids_BT)
    assert docs.positions_BT.tolist() == positions
    assert docs.starts_BT.tolist() == starts
    assert docs.ends_BT.tolist() == ends
    assert docs.cu_seqlens.tolist() == boundaries
    assert docs.cu_seqlens.dtype == torch.int32
    assert docs.ids_BT.dtype == docs.positions_BT.dtype == torch.int64
    assert not docs.whole


@pytest.mark.parametrize("seed", range(4))
def test_ids_are_equal_exactly_within_a_document(seed: int) -> None:
    """Also where the given number comes back later in the row (`1 2 1` are three documents)."""
    given_BT = random_ids(2, 40, seed)
    docs = Documents.from_ids(given_BT)
    starts = docs.starts_BT
    for b in range(2):
        for i in range(40):
            for j in range(i, 40):
                same = not starts[b, i + 1 : j + 1].any()
                assert (docs.ids_BT[b, i] == docs.ids_BT[b, j]).item() == same


def test_a_row_is_a_document_border_even_if_the_number_goes_on() -> None:
    docs = Documents.from_ids(torch.tensor([[5, 5, 6], [6, 6, 6]]))
    assert docs.cu_seqlens.tolist() == [0, 2, 3, 6]
    assert docs.ends_BT.tolist() == [[False, True, True], [False, False, True]]


@pytest.mark.parametrize("lengths", [[1], [5], [1, 1, 1], [3, 1, 4, 1, 5]])
def test_boundaries_are_those_of_ids(lengths: list[int]) -> None:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    docs = packed_row(boundaries)
    ids_1T = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    assert docs.ids_BT.tolist() == ids_1T.tolist()
    assert docs.positions_BT.tolist() == [[t for n in lengths for t in range(n)]]
    assert torch.equal(docs.cu_seqlens, boundaries)


def test_rows_is_one_document_a_row() -> None:
    docs = Documents.rows(3, 5)
    same = Documents.from_ids(torch.zeros(3, 5, dtype=torch.int64))
    assert docs.whole
    assert torch.equal(docs.ids_BT, same.ids_BT)
    assert torch.equal(docs.positions_BT, same.positions_BT)
    assert docs.cu_seqlens.tolist() == same.cu_seqlens.tolist() == [0, 5, 10, 15]


def test_documents_of_defaults_to_rows() -> None:
    x_BTD, given = torch.zeros(2, 3, 4), Documents.from_ids(torch.tensor([[0, 1, 1]]))
    assert documents_of(x_BTD, given) is given
    made = documents_of(x_BTD, None)
    assert made.whole and made.ids_BT.shape == (2, 3)


def test_every_layer_shares_what_the_first_one_made() -> None:
    docs, calls = Documents.rows(1, 2), []
    assert docs.memo("mask", lambda: calls.append(1) or "made") == "made"
    assert docs.memo("mask", lambda: calls.append(1) or "again") == "made"
    assert docs.memo(("mask", 2), lambda: "other key") == "other key"
    assert len(calls) == 1
    assert docs.cu_seqlens is docs.cu_seqlens and docs.ends_BT is docs.ends_BT


def test_a_memo_belongs_to_its_batch_and_device() -> None:
    """What was made for one batch or one device must not be seen by another."""
    docs, other = Documents.rows(1, 2), Documents.rows(1, 2)
    docs.memo("mask", lambda: "made")
    assert other.memo("mask", lambda: "its own") == "its own"
    moved = docs.to("meta")
    assert moved.whole and moved.ids_BT.device.type == moved.positions_BT.device.type == "meta"
    assert moved.memo("mask", lambda: "its own") == "its own"


# ---- parts of the tokens ------------------------------------------------------------------------


def test_a_row_that_continues_starts_a_sequence() -> None:
    """Rows cut for context ranks: where a document goes on, positions don't start at 0."""
    part = Documents.from_ids(random_ids(2, 17, 0)).take(torch.arange(5, 12))
    boundaries = part.cu_seqlens.tolist()
    assert not part.starts_BT[:, 0].any(), "no row starts with a document"
    starts = {int(i) for i in part.starts_BT.flatten().nonzero()} | {0, 7, 14}
    assert boundaries == sorted(starts)


def test_parts_that_do_not_follow_one_another_are_apart() -> None:
    """Also where the next position happens to be that of another document's token."""
    row = Documents.from_ids(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    assert row.take(torch.tensor([0, 1, 6, 7])).cu_seqlens.tolist() == [0, 2, 4]
    assert row.take(torch.tensor([0, 1, 2, 3])).cu_seqlens.tolist() == [0, 4]


def test_every_piece_starts_a_sequence() -> None:
    row = Documents.from_ids(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]))
    assert row.take(torch.tensor([2, 3, 4, 5]), pieces=2).cu_seqlens.tolist() == [0, 2, 3, 4]
    assert row.take(torch.arange(8), 4).take(torch.tensor([0, 1])).cu_seqlens.tolist() == [0, 2]


# ---- on another device --------------------------------------------------------------------------


def arrived(docs: Documents, monkeypatch: pytest.MonkeyPatch) -> Documents:
    """As on a device, but with values that can be read; nothing can be found there."""
    monkeypatch.setattr(documents, "to_device", lambda x, device: x)
    there = docs.to("meta")
    monkeypatch.setattr(Documents, "_cu_seqlens", lambda self: pytest.fail("a wait for the device"))
    return there


def test_boundaries_are_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is made of documents on the device knows them, and nothing waits for it."""
    docs = Documents.from_ids(random_ids(2, 17, 1))
    part = docs.take(torch.arange(3, 9))
    want, of_part = docs.cu_seqlens.tolist(), part.cu_seqlens.tolist()
    there = arrived(part, monkeypatch)
    assert there.cu_seqlens.tolist() == of_part
    row = there.row
    assert row is not None and row.cu_seqlens.tolist() == want
    assert row.with_tokens(row.ids_BT, row.ids_BT).to("meta").cu_seqlens.tolist() == want
    assert docs.to("cpu").boundaries is None, "nothing left the host"


def test_whole_rows_need_nothing_from_the_host() -> None:
    there = Documents.rows(3, 5).to("meta")
    assert there.boundaries is None and there.cu_seqlens.shape == (4,)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_boundaries_of_a_context_rank(
    order: Order, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks as rows of their own, of which two may follow one another."""
    layout = ContextLayout.for_rank(order, rank, 3)
    part = Documents.from_ids(random_ids(2, 24, 2)).take(layout.index(24), layout.per_rank)
    segments = segment_documents(part, layout)
    want = Documents(segments.ids_BT, segments.positions_BT).cu_seqlens.tolist()
    assert {i * segments.ids_BT.shape[1] for i in range(len(segments.ids_BT))} <= set(want)
    assert segment_documents(arrived(part, monkeypatch), layout).cu_seqlens.tolist() == want
