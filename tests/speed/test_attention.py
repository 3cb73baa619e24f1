"""Attention of a block as work of the time model: windows, indexers, chosen keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from megacpp.kernels.attention.softcap import BLOCK, block_starts
from megacpp.kernels.sparse_attention import indexer
from megacpp.kernels.sparse_attention.indexer import AT_ONCE, choose_keys, query_blocks
from megacpp.kernels.sparse_attention.indexer_loss import Target, indexer_loss
from megacpp.kernels.sparse_attention.reference import sparse_attention
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.model.documents import Documents
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Attend, Operator, Passes, Product, seconds
from megacpp.speed.ours import step_work
from megacpp.speed.sparse import (
    INDEXED,
    KEYS,
    QUERIES,
    TRACED,
    attention_work,
    indexer_work,
)
from megacpp.speed.step import predict
from parallel.simulate.few_chunks import ends_of_blocks, ends_of_queries
from tests.speed.test_ours import EveryOperator, config_of

ROW = 4096
SPARSE = ("--data.seq-len", str(ROW), "--train.device-batch-size", "1")
SPARSE += ("--model.attention.sparse.layers", "all", "--model.attention.sparse.num-heads", "16")


@pytest.mark.parametrize("window", [0, 1, 1000, 2048, 3000, 5000])
def test_a_query_attends_to_the_keys_of_its_window(window: int) -> None:
    """On average over a row, half a key of the diagonal apart."""
    words = ("dense_110m", "--data.seq-len", "4096", "--model.attention.window", str(window))
    block = step_work(config_of(*words, "--kernels.attention", "flex"), 1, "H100").blocks[1]
    found = next(op.keys for op in block.forward if isinstance(op, Attend))
    seen = [min(token + 1, window or 4096) for token in range(4096)]
    assert found == pytest.approx(sum(seen) / 4096, abs=0.5)


class EveryPass(EveryOperator):
    """Counts operators that are kernels, and what those that multiply no matrices move."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "unsafe_view" in func.__name__ or "device" in func.__name__:
            return func(*args, **(kwargs or {}))
        if "baddbmm" in func.__name__:  # the sum of heads, which is no product of the model
            self.bytes += sum(x.nbytes for x in (*args, args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)


def assert_counted(work: tuple[Operator, ...], flops: int, every: EveryPass, left: float) -> None:
    """Check an operator's products and passes; blocks of a row are counted in their middles."""
    products = sum(op.flops for op in work if isinstance(op, Product))
    passes = sum(op.bytes for op in work if isinstance(op, Passes))
    launches = sum(op.launches for op in work if isinstance(op, Passes))
    assert products == pytest.approx(flops, rel=0.08)
    assert passes == pytest.approx(every.bytes * left, rel=0.15)
    assert launches == pytest.approx(every.count * left, rel=0.15)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_attention_to_chosen_keys_is_what_its_kernel_does(kind: str) -> None:
    """By the operators of the kernel itself, over the blocks that no trace runs."""
    config = config_of(
        "dense_110m", *SPARSE, "--model.attention.kind", kind, "--model.attention.qk-norm", "false"
    )
    a, own = config.model.attention, LocalShapes.on_rank(config, 1, 0)
    work = attention_work(config.model, own)
    query, value = (a.head_dim,) * 2
    if kind == "mla":
        query, value = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
    groups = a.num_kv_heads if kind == "gqa" else a.num_heads
    left = 1 - TRACED[0] / len(block_starts(ROW))
    with FakeTensorMode():
        docs = Documents.rows(1, ROW)
        chosen = torch.empty(1, ROW, a.sparse.top_k, dtype=torch.int32)
        parts = (noise(1, ROW, a.num_heads, query), noise(1, ROW, groups, query))
        with FlopCounterMode(display=False) as ahead, EveryPass() as forward:
            o = sparse_attention(*parts, noise(1, ROW, groups, value), chosen, docs, docs, 0.1)
        with FlopCounterMode(display=False) as back, EveryPass() as backward:
            o.backward(torch.empty_like(o))
    assert_counted(work.forward, ahead.get_total_flops(), forward, left)
    assert_counted(work.backward, back.get_total_flops(), backward, left)
    assert all(op.dtype == "fp32" for op in work.forward if isinstance(op, Product))


def test_an_indexer_is_what_its_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads at once, as on a GPU; the loss makes its gradients in the forward."""
    monkeypatch.setitem(AT_ONCE, "cpu", AT_ONCE["cuda"])
    config = config_of("dense_110m", *SPARSE)
    a, own = config.model.attention, LocalShapes.on_rank(config, 1, 0)
    work = indexer_work(config.model, own)
    heads, width = a.sparse.num_heads, a.sparse.head_dim
    left = 1 - TRACED[1] / len(query_blocks(ROW))
    with FakeTensorMode():
        docs = Documents.rows(1, ROW)
        index = noise(1, ROW, heads, width), noise(1, ROW, width), noise(1, ROW, heads).float()
        main = noise(1, ROW, a.num_heads, a.head_dim), noise(1, ROW, a.num_kv_heads, a.head_dim)
        with FlopCounterMode(display=False) as flops, EveryPass() as every:
            chosen = choose_keys(*index, docs, docs, a.sparse.top_k)
            target = Target(*(x.detach() for x in main), 0.1, None, docs, docs, chosen)
            indexer_loss(*index, target)
    sums = 2 * heads * ROW * ROW  # of heads: at once a product on a GPU, no work worth counting
    assert_counted(work.forward, flops.get_total_flops() - sums, every, left)
    assert not work.backward


def test_traces_run_as_many_blocks_as_are_left_out_of_the_count() -> None:
    assert BLOCK == QUERIES and (indexer.QUERIES, indexer.KEYS) == (INDEXED, KEYS)
    assert (len(ends_of_blocks(1 << 15)), len(ends_of_queries(1 << 15))) == TRACED
    short = config_of("dense_110m", *SPARSE, "--data.seq-len", "256")
    work = attention_work(short.model, LocalShapes.on_rank(short, 1, 0))
    assert not any(isinstance(op, Passes) for op in work.forward)


def test_products_in_fp32_run_at_the_peak_without_tensor_cores() -> None:
    product = Product(8192, 8192, 8192, dtype="fp32")
    speed = product.flops / seconds(product, gpu("H100"), Rates())
    assert speed == pytest.approx(67e12 * gpu("H100").bf16_reached, rel=0.1)


def test_a_long_row_with_an_indexer_is_not_faster_than_its_products() -> None:
    """64 heads of 128 dims score all keys of a row of 32,768."""
    words = ("dense_110m", *SPARSE, "--data.seq-len", "32768")
    words += (
        "--model.attention.sparse.num-heads",
        "64",
        "--model.attention.sparse.head-dim",
        "128",
    )
    config = config_of(*words)
    found = predict(step_work(config, 1, "H100"), gpu("H100"), Rates())
    scores = 5 * 2 * 64 * 128 * 32768 * 16384  # of a layer: twice, and three of the gradient
    layers = config.train.grad_accum * config.model.depth / 2
    assert found.parts["products"] > layers * scores / 67e12
    assert found.mfu < 0.1 and math.isfinite(found.step_s)
