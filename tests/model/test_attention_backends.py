"""Backends of attention against the definition: fp64 on a CPU where one runs, bf16 on a GPU.

torch's flex kernels have no backward on a CPU, but their definition has, which is what runs here:
it proves what we ask of them (masks, soft cap, heads, layout), and the table of blocks, which it
does not read, is compared with the mask. The flash kernels run on CUDA alone: here one document
after another stands in for the operator, and fake tensors go through the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp.blocks.attention.compiled import graph_inputs
from megacpp.blocks.attention.logits import LogitRecorder
from megacpp.kernels.attention import flex as attention_flex
from megacpp.kernels.attention.causal import VARLEN, causal_attention, document_mask
from megacpp.kernels.attention.reference import attention_reference
from megacpp.kernels.backend import Kernels
from megacpp.model.documents import Documents
from tests.golden import check_mla
from tests.golden.harness import GoldenFile
from tests.model.attention_cases import (
    close,
    flex_on_a_cpu,
    mixer,
    noise,
    packed,
    varlen_on_a_cpu,
)

GOLDEN = Path(__file__).parents[1] / "golden/data"
HEADS = [(4, 2, 6, 6), (4, 1, 8, 5), (2, 2, 4, 7)]
named = pytest.mark.parametrize("heads", HEADS, ids=lambda h: "-".join(map(str, h)))
both = pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])


@pytest.fixture
def flex_here() -> Iterator[None]:
    with flex_on_a_cpu():
        yield


@pytest.fixture
def varlen_here() -> Iterator[list[list[int]]]:
    with varlen_on_a_cpu() as given:
        yield given


def sent(docs: Documents) -> Documents:
    """As they come from the host: with what it could see of them."""
    return replace(docs, boundaries=docs.cu_seqlens)


def results(form: Callable[..., Tensor], qkv: list[Tensor], *args: object) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    o = form(*qkv, *args)
    d_o = noise(*o.shape, seed=9, dtype=o.dtype).to(o.device)
    return [o, *torch.autograd.grad(o, qkv, d_o)]


def arguments(heads: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    num_q, num_kv, dim, value_dim = heads
    shapes = ((num_q, dim), (num_kv, dim), (num_kv, value_dim))
    made = [noise(2, 23, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    return [x.requires_grad_() for x in made]


@named
@both
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_flex_is_the_definition(
    heads: tuple[int, int, int, int],
    docs: Documents,
    softcap: float | None,
    window: int,
    flex_here: None,
) -> None:
    qkv, docs = arguments(heads), docs.within(window)
    want = results(attention_reference, qkv, docs, 0.7, softcap)
    got = results(causal_attention, qkv, docs, 0.7, softcap, "flex")
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_flex_in_fp32_is_as_exact_as_the_fused_kernels(flex_here: None) -> None:
    """1e-5 of fp64: sums of 20 products of order 1, each rounded to 6e-8."""
    wide = arguments(HEADS[0])
    narrow = [x.detach().float().requires_grad_() for x in wide]
    want = results(attention_reference, wide, packed(), 0.7)
    for backend in ("flex", "torch"):
        got = results(causal_attention, narrow, packed(), 0.7, None, backend)
        for a, b in zip(got, want, strict=True):
            close(a.double(), b, limit=1e-5)


def test_flex_takes_some_queries_and_all_keys_in_any_order(flex_here: None) -> None:
    """As under context parallelism, where keys lie in the order of the ranks."""
    docs, q, kv = packed(), noise(2, 23, 4, 6), noise(2, 23, 2, 6, seed=1)
    order, part = torch.randperm(23), torch.tensor([0, 17, 1, 2, 18, 22])
    for softcap in (None, 1.5):
        want = causal_attention(q, kv, kv, docs, 0.5, softcap)[:, part]
        given, keys = (q[:, part], kv[:, order], kv[:, order], docs.take(part)), docs.take(order)
        close(causal_attention(*given, 0.5, softcap, "flex", keys), want)
        close(causal_attention(*given, 0.5, softcap, "torch", keys), want)


@pytest.mark.parametrize("window", [0, 1, 120, 300])
@pytest.mark.parametrize("tokens", [512, 600])
def test_blocks_are_those_of_the_mask(tokens: int, window: int) -> None:
    """Of whole rows exactly; of tokens in another order never too few, never too full."""
    rows = ((100, 156, 1, 255), (3, 400, 109, 0))
    docs = packed(tuple((*row[:3], row[3] + tokens - 512) for row in rows)).within(window)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    chunks = torch.cat([order[:0], torch.arange(256, tokens), torch.arange(256)])
    for queries, keys, exact in (
        (docs, docs, True),
        (docs.take(chunks), docs, False),
        (docs.take(order[:200]), docs.take(chunks), False),
        (Documents.rows(2, tokens).within(window), Documents.rows(2, tokens), True),
    ):
        mask = attention_flex.block_mask(queries, keys)
        some, every = seen_blocks(document_mask(queries, keys))
        every[:, :, -1] &= queries.ids_BT.shape[1] % 128 == 0
        every[..., -1] &= keys.ids_BT.shape[1] % 128 == 0
        full = table(mask.full_kv_num_blocks, mask.full_kv_indices)
        visited = table(mask.kv_num_blocks, mask.kv_indices) | full
        assert not (some & ~visited).any() and not (full & ~every).any()
        assert not exact or (torch.equal(visited, some) and torch.equal(full, every))


def seen_blocks(mask_B1TS: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 128 with any and with all of their tokens True; tokens past the end don't count."""
    pads = [n for size in mask_B1TS.shape[:1:-1] for n in (0, -size % 128)]
    some, every = (F.pad(mask_B1TS, pads, value=fill) for fill in (False, True))
    some, every = (x.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)) for x in (some, every))
    return some.any(3).any(-1), every.all(3).all(-1)


def table(num_B1Q: Tensor | None, index_B1QC: Tensor | None) -> Tensor:
    assert num_B1Q is not None and index_B1QC is not None
    listed = torch.arange(index_B1QC.shape[-1]) < num_B1Q[..., None]
    return torch.zeros_like(listed).scatter_(-1, index_B1QC.to(torch.int64), listed)


@named
@both
@pytest.mark.parametrize("window", [0, 4])
def test_varlen_is_the_definition(
    heads: tuple[int, int, int, int], docs: Documents, window: int, varlen_here: list[list[int]]
) -> None:
    """Layout, boundaries, zero columns, grouped heads, gradients: around the kernel."""
    backend = "varlen" if heads[2] == heads[3] else "varlen_padded"
    qkv, docs = arguments(heads), docs.within(window)
    want = results(attention_reference, qkv, docs, 0.7)
    got = results(causal_attention, qkv, docs, 0.7, None, backend)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    assert varlen_here == [docs.cu_seqlens.tolist()]


class Largest(TorchDispatchMode):
    """The largest tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize("heads", [(4, 2, 16, 16), (4, 4, 24, 16)], ids=["gqa", "mla"])
def test_flash_kernels_get_no_mask_and_no_expanded_heads(heads: tuple[int, int, int, int]) -> None:
    """The real operator, with its gradient, on tensors without values: nothing is [T, T]."""
    T, (num_q, num_kv, dim, value_dim) = 4096, heads
    docs = sent(packed(((1000, 3000, 96),)))
    with FakeTensorMode(allow_non_fake_inputs=True), Largest() as largest:
        q, k = (torch.empty(1, T, n, dim, dtype=torch.bfloat16) for n in (num_q, num_kv))
        v = torch.empty(1, T, num_kv, value_dim, dtype=torch.bfloat16)
        qkv = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        backend = "varlen" if dim == value_dim else "varlen_padded"
        o = causal_attention(*qkv, docs, 0.5, backend=backend)
        gradients = torch.autograd.grad(o.sum(), qkv)
    assert o.shape == (1, T, num_q, value_dim)
    assert [g.shape for g in gradients] == [x.shape for x in qkv]
    assert largest.numbers == T * num_q * dim < T * T


def test_flash_kernels_keep_what_the_estimate_says() -> None:
    """q, k, v, the output, one fp32 number per query and head; beside them the boundaries."""
    T, docs, kept = 64, sent(packed(((40, 24),))), dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        q = torch.empty(1, T, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(1, T, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        o = causal_attention(q, k, v, docs, 0.5, backend="varlen")
    boundaries, random_state = 4 * 3, 2 * 8
    numbers = T * (4 + 2 + 2 + 4) * 16 * 2 + T * 4 * 4
    assert sum(kept.values()) == numbers + boundaries + random_state and o.requires_grad


def test_the_table_of_blocks_is_made_without_a_mask() -> None:
    T = 4096
    docs = packed(((1000, 3000, 96),))
    with Largest() as largest:
        attention_flex.block_mask(docs, docs)
    assert largest.numbers <= T  # the table itself has 32 x 32 blocks
    assert attention_flex.block_mask(docs, docs) is attention_flex.block_mask(docs, docs)


def test_new_documents_need_no_new_graph(flex_here: None) -> None:
    """A compiled block takes the masks of every batch as inputs."""
    block, plain = (mixer("gqa_softcap", torch.float32) for _ in range(2))
    inner = block.get_submodule("inner")
    inner.kernels = Kernels(attention="flex")  # type: ignore[assignment]
    torch._dynamo.utils.counters.clear()
    graph = torch.compile(lambda x, docs: block(x, docs), fullgraph=True, backend="aot_eager")
    for lengths in (((7, 1, 15), (20, 1, 2)), ((5, 18, 0), (23, 0, 0))):
        x, docs = noise(2, 23, 16, dtype=torch.float32).requires_grad_(), packed(lengths)
        y = graph(x, graph_inputs(block, docs, x))  # type: ignore[arg-type]
        want = plain(x, docs)
        close(y, want, limit=1e-5)
        gradients = (torch.autograd.grad(out.sum(), x)[0] for out in (y, want))
        close(*gradients, limit=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_graph_holds_the_flash_kernel_whole() -> None:
    """No break in front of it; nothing here can run it."""
    found: list[str] = []

    class FoundError(Exception):
        pass

    def look(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.extend(str(node.target) for node in graph.graph.nodes)

        def run(*args: object) -> Any:
            raise FoundError

        return run

    block = mixer("mla", torch.bfloat16)
    inner = block.get_submodule("inner")
    inner.kernels = Kernels(attention="varlen_padded")  # type: ignore[assignment]
    x, docs = noise(2, 23, 16, dtype=torch.bfloat16), sent(packed())
    read = graph_inputs(block, docs, x)  # type: ignore[arg-type]
    with pytest.raises(FoundError):
        torch.compile(block, fullgraph=True, backend=look)(x, read)
    assert any("varlen_attn" in target for target in found), found


@pytest.mark.parametrize("name", ["mla_dense", "mla_docs", "mla_yarn"])
def test_golden_blocks_by_flex(name: str, flex_here: None) -> None:
    golden = GoldenFile(GOLDEN / f"{name}.safetensors", torch.float64)
    check_mla.check_backend(golden, "flex")
    golden.finish()


@pytest.mark.parametrize("name", ["mla_dense", "mla_docs", "mla_yarn"])
def test_golden_blocks_by_varlen(name: str, varlen_here: list[list[int]]) -> None:
    """The operator's stand-in computes in fp64."""
    golden = GoldenFile(GOLDEN / f"{name}.safetensors", torch.float64)
    check_mla.check_backend(golden, "varlen_padded")
    golden.finish()
    assert varlen_here


def test_logits_are_recorded_whatever_the_backend(
    flex_here: None, varlen_here: list[list[int]]
) -> None:
    found = []
    for backend in ("torch", "flex", "varlen", "reference"):
        block = mixer("gqa_norm")
        inner = block.get_submodule("inner")
        recorder = LogitRecorder(inner.scale, (8,), "max")  # type: ignore[arg-type]
        inner.recorder, inner.kernels = recorder, Kernels(attention=backend)  # type: ignore[assignment]
        block(noise(2, 23, 16), packed())
        found.append(recorder.maxima[0])
    assert all(torch.equal(f, found[0]) for f in found)


@pytest.fixture
def on_gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda")
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=lambda d: f"{d[0]}-{d[1]}")
@pytest.mark.parametrize("backend", ["torch", *VARLEN, "flex", "flex_softcap"])
@pytest.mark.parametrize("lengths", [((100, 300, 1, 111), (512, 0, 0, 0)), ((600,), (600,))])
def test_backends_on_a_gpu(
    dims: tuple[int, int], backend: str, lengths: tuple[tuple[int, ...], ...], on_gpu: torch.device
) -> None:
    """bf16 inputs against the definition in fp64 on the same numbers.

    Each result is rounded to bf16 (2^-9 of itself), and probabilities (and their gradients) to bf16
    before the product with values: relative errors of 2^-9 in terms that add up to the result at
    most in magnitude; over three products in a row 2^-6 of the largest result bounds them.
    """
    softcap = 5.0 if backend == "flex_softcap" else None
    backend = backend.removesuffix("_softcap")
    if backend == "varlen" and dims[0] != dims[1]:
        pytest.skip("one head dim")
    (dim, value_dim), docs = dims, packed(lengths)
    T = docs.ids_BT.shape[1]
    shapes = (
        (4, dim),
        (4 if dim > value_dim else 2, dim),
        (4 if dim > value_dim else 2, value_dim),
    )
    qkv = [noise(2, T, *s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    wide = [x.double().requires_grad_() for x in qkv]
    narrow = [x.to(on_gpu).requires_grad_() for x in qkv]
    want = results(causal_attention, wide, docs, dim**-0.5, softcap)
    got = results(causal_attention, narrow, docs.to(on_gpu), dim**-0.5, softcap, backend)
    for a, b in zip(got, want, strict=True):
        close(a.cpu().double(), b, limit=2.0**-6)
