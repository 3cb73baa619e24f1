"""Attention of a block as work of the time model: windows, indexers, chosen keys."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from megacpp.cli.block_trace import trace_blocks
from megacpp.config.schema import PrecisionConfig
from megacpp.kernels.attention.softcap import BLOCK
from megacpp.kernels.hyper_connections import reference as hyper_connections
from megacpp.kernels.sparse_attention import indexer
from megacpp.kernels.sparse_attention.indexer import AT_ONCE, choose_keys
from megacpp.kernels.sparse_attention.indexer_loss import Target, indexer_loss
from megacpp.kernels.sparse_attention.reference import sparse_attention
from megacpp.memory.budget import as_run
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.traced import TracedPart, request_of
from megacpp.model.documents import Documents
from megacpp.model.pattern import layer_kinds
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Attend, Product, seconds
from megacpp.speed.ours import step_work
from megacpp.speed.sparse import INDEXED, QUERIES, attention_products, indexer_products
from megacpp.speed.step import predict
from parallel.simulate import stand_ins
from tests.speed.test_ours import config_of

ROW = 4096
SPARSE = ("--data.seq-len", str(ROW), "--train.device-batch-size", "1")
SPARSE += ("--model.attention.sparse.layers", "all", "--model.attention.sparse.num-heads", "16")
CHOSEN = "--model.attention.sparse.layers all"


@pytest.mark.parametrize("window", [0, 1, 1000, 2048, 3000, 5000])
def test_a_query_attends_to_the_keys_of_its_window(window: int) -> None:
    """On average over a row, half a key of the diagonal apart."""
    words = ("dense_110m", "--data.seq-len", "4096", "--model.attention.window", str(window))
    block = step_work(config_of(*words, "--kernels.attention", "flex"), 1, "H100").blocks[1]
    found = next(op.keys for op in block.forward if isinstance(op, Attend))
    seen = [min(token + 1, window or 4096) for token in range(4096)]
    assert found == pytest.approx(sum(seen) / 4096, abs=0.5)


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)


def flops_of(products: tuple[Product, ...]) -> float:
    assert {op.dtype for op in products} == {"fp32"}
    return sum(op.flops for op in products)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_attention_to_chosen_keys_is_what_its_kernel_does(kind: str) -> None:
    """By the operators of the kernel itself, over the blocks that no trace runs."""
    config = config_of(
        "dense_110m", *SPARSE, "--model.attention.kind", kind, "--model.attention.qk-norm", "false"
    )
    a, own = config.model.attention, LocalShapes.on_rank(config, 1, 0)
    forward, backward = attention_products(config.model, own)
    query, value = (a.head_dim,) * 2
    if kind == "mla":
        query, value = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
    groups = a.num_kv_heads if kind == "gqa" else a.num_heads
    with FakeTensorMode():
        docs = Documents.rows(1, ROW)
        chosen = torch.empty(1, ROW, a.sparse.top_k, dtype=torch.int32)
        parts = (noise(1, ROW, a.num_heads, query), noise(1, ROW, groups, query))
        with FlopCounterMode(display=False) as ahead:
            o = sparse_attention(*parts, noise(1, ROW, groups, value), chosen, docs, docs, 0.1)
        with FlopCounterMode(display=False) as back:
            o.backward(torch.empty_like(o))
    assert flops_of(forward) == pytest.approx(ahead.get_total_flops(), rel=0.08)
    assert flops_of(backward) == pytest.approx(back.get_total_flops(), rel=0.08)


def test_an_indexer_is_what_its_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads at once, as on a GPU; the loss makes its gradients in the forward."""
    monkeypatch.setitem(AT_ONCE, "cpu", AT_ONCE["cuda"])
    config = config_of("dense_110m", *SPARSE)
    a, own = config.model.attention, LocalShapes.on_rank(config, 1, 0)
    heads, width = a.sparse.num_heads, a.sparse.head_dim
    with FakeTensorMode():
        docs = Documents.rows(1, ROW)
        index = noise(1, ROW, heads, width), noise(1, ROW, width), noise(1, ROW, heads).float()
        main = noise(1, ROW, a.num_heads, a.head_dim), noise(1, ROW, a.num_kv_heads, a.head_dim)
        with FlopCounterMode(display=False) as flops:
            chosen = choose_keys(*index, docs, docs, a.sparse.top_k)
            target = Target(*(x.detach() for x in main), 0.1, None, docs, docs, chosen)
            indexer_loss(*index, target)
    sums = 2 * heads * ROW * ROW  # of heads: at once a product on a GPU, no work worth counting
    made = flops.get_total_flops() - sums
    assert flops_of(indexer_products(config.model, own)) == pytest.approx(made, rel=0.08)


@pytest.mark.parametrize(
    "words",
    [
        f"{CHOSEN} --model.attention.sparse.share 2",
        f"{CHOSEN} --model.attention.softcap 30",
        f"{CHOSEN} --model.attention.sparse.stage dense",
        "--model.attention.softcap 30 --kernels.attention torch",
        "--model.mhc.streams 2",
    ],
    ids=["sparse", "sparse softcap", "indexer's warm-up", "softcap", "hyper-connections"],
)
def test_what_a_trace_runs_of_a_loop_counts_for_all(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_connections, "CHUNK", 1 << 16)
    given = "dense_110m --model.pattern AA --model.depth 2 --data.seq-len 2048 --recompute.ablock "
    config = as_run(config_of(*given.split(), "selective", *words.split()), "cuda", narrow=True)
    own = LocalShapes.on_rank(replace(config, precision=PrecisionConfig(dtype="fp32")), 1, 0)
    for kind in dict.fromkeys(layer_kinds(config.model)):
        request, found, events = request_of(own, TracedPart((kind,))), [], []
        for few in (stand_ins.FEW, ()):
            with monkeypatch.context() as patch:
                patch.setattr(stand_ins, "FEW", few)
                (trace,) = trace_blocks([request])
            found.append(trace.work)
            events.append(len(trace.events))
        assert events[0] < 0.75 * events[1], "loops were cut"
        assert found[0] == found[1]


def test_blocks_of_queries_are_those_of_the_kernels() -> None:
    assert BLOCK == QUERIES and indexer.QUERIES == INDEXED


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
