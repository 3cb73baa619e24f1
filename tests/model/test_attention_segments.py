"""Parts of a row by flash kernels, merged: whole rows' attention and gradients.

On a CPU operators of one segment after another stand for the GPU's; fake tensors go through the
real ones; on a GPU the real ones run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacpp.kernels.attention.causal import causal_attention, document_mask
from megacpp.model.documents import Documents
from tests.model.attention_cases import close, noise, packed, segments_on_a_cpu
from tests.model.attention_merged import CHUNKS, merged, parts

SIZE = 6
LENGTHS = ((5, 7, 10, 2), (1, 20, 3))  # one starts where a chunk starts, one crosses three chunks
HEADS = [(4, 2, 8, 8), (4, 1, 8, 6), (2, 2, 6, 8)]  # query heads, key heads, q and k dim, v dim
DOCS = {"packed": packed(LENGTHS), "whole": Documents.rows(2, CHUNKS * SIZE)}


def numbers(heads: tuple[int, int, int, int], T: int, dtype: torch.dtype) -> list[Tensor]:
    num_q, num_kv, dim, value_dim = heads
    shapes = ((num_q, dim), (num_kv, dim), (num_kv, value_dim), (num_q, value_dim))
    return [noise(2, T, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def whole(given: list[Tensor], docs: Documents) -> list[Tensor]:
    """Output and gradients of whole rows at once."""
    qkv = [x.detach().requires_grad_() for x in given[:3]]
    o = causal_attention(*qkv, docs, qkv[0].shape[-1] ** -0.5)  # type: ignore[misc]
    return [o.detach(), *torch.autograd.grad(o, qkv, given[3])]


@pytest.mark.parametrize("docs", DOCS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_merged_parts_equal_whole_rows(heads: tuple[int, int, int, int], docs: str) -> None:
    given = numbers(heads, CHUNKS * SIZE, torch.float64)
    with segments_on_a_cpu():
        found = merged(*given, DOCS[docs])
    for a, b in zip(found, whole(given, DOCS[docs]), strict=True):
        close(a, b, limit=1e-12)


@pytest.mark.parametrize("docs", DOCS)
def test_segments_hold_the_visible_pairs_and_no_others(docs: str) -> None:
    """A segment's pairs are all visible, or half of them and the diagonal in a chunk itself."""
    visible = 0
    for part in parts(DOCS[docs]):
        ends = zip(part.segments.queries.diff(), part.segments.keys.diff(), strict=True)
        for queries, keys in ends:
            visible += int(queries * (queries + 1) // 2 if part.segments.causal else queries * keys)
    mask = document_mask(DOCS[docs], DOCS[docs])
    assert visible == int(mask.expand(2, -1, -1, -1).sum())


def test_the_operators_take_it_and_nothing_reads_a_value() -> None:
    """Tensors without values go through the real operators; a read value is an error."""
    with FakeTensorMode():
        ids = torch.empty(2, 24, dtype=torch.int64)
        ends = torch.empty(8, dtype=torch.int32)
        docs = Documents(ids, torch.empty_like(ids), boundaries=ends)
        shapes = ((4, 16), (2, 16), (2, 8), (4, 8))
        given = [torch.empty(2, 24, *s, dtype=torch.bfloat16) for s in shapes]
        found = merged(*given, docs)
    assert [x.shape for x in found] == [given[i].shape for i in (3, 0, 1, 2)]
    assert [x.dtype for x in found] == [torch.bfloat16, *[torch.float32] * 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (4, 1, 128, 128), (4, 4, 192, 128)], ids=str)
@pytest.mark.parametrize("lengths", [((100, 300, 1, 111), (3, 509, 0, 0)), ((512,), (512,))])
def test_merged_parts_on_a_gpu(
    heads: tuple[int, int, int, int], lengths: tuple[tuple[int, ...], ...]
) -> None:
    """Bound the distance from fp64 on bf16 numbers as test_backends_on_a_gpu does."""
    docs, given = packed(lengths), numbers(heads, 512, torch.bfloat16)
    want = whole([x.double() for x in given], docs)
    found = merged(*(x.cuda() for x in given), docs.to("cuda"))
    for a, b in zip(found, want, strict=True):
        close(a.cpu().double(), b, limit=2.0**-6)
