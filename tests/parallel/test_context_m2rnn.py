"""M2RNN over forked gloo context ranks against one process: values, clips, isolation, messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.m2rnn.descriptor import heads_exchanged
from megacpp.blocks.m2rnn.module import M2RNN, M2RNNScan
from megacpp.config.schema import MeshConfig, ModelConfig
from megacpp.kernels.m2rnn.backends import m2rnn_chunked
from megacpp.kernels.m2rnn.chunks import StateClip
from megacpp.kernels.m2rnn.reference import m2rnn_sequential
from megacpp.lessons.context import (
    ROWS,
    TOKENS,
    Pass,
    error,
    normal,
    packed_rows,
    run,
    run_part,
    whole,
)
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.apply import context_plan
from parallel.context.layout import ContextLayout, Order
from parallel.context.scan import ContextScan, heads_if_divisible
from tests.collectives import Collective
from tests.model.small import small
from tests.parallel.context_documents import ORDERS, outside
from tests.ranks import run_ranks

DIM = 12
FP64, FP32 = 1e-12, 1e-5  # rounding: of max |reference|
BOUND = 0.05  # of the state gradient: most entries are above it
KINDS: tuple[Literal["heads", "serial"], ...] = ("heads", "serial")
HEADS = {"one_qk": (4, 1, 1), "shared_q": (4, 2, 4), "three": (3, 1, 3)}
CLIPS: dict[str, tuple[float | None, Literal["total", "carried"]]] = {
    "unclipped": (None, "total"),
    "total": (BOUND, "total"),
    "carried": (BOUND, "carried"),
}


class Case(NamedTuple):
    heads: str
    clip: str
    kind: Literal["heads", "serial"]
    order: Order
    docs: str


def layer_of(heads: str, clip: str) -> M2RNN:
    """All parameters away from their special initial values."""
    (num_heads, num_q, num_k), (bound, mode) = HEADS[heads], CLIPS[clip]
    sizes = M2RNNConfig(num_heads, num_q, num_k, key_dim=6, value_dim=4, chunk_size=3)
    m2rnn = M2RNNConfig(**{**vars(sizes), "gradient_clip": bound, "clip_mode": mode})
    layer = M2RNN(ModelConfig(dim=DIM, m2rnn=m2rnn)).to(torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=i))
    return layer


LAYERS = {key: layer_of(*key) for key in product(HEADS, CLIPS)}
DOCS = {"packed": packed_rows(), "whole": Documents.rows(ROWS, TOKENS)}
DATA = normal(ROWS, TOKENS, DIM, seed=100), normal(ROWS, TOKENS, DIM, seed=101)


def cases_of(world: int) -> list[Case]:
    """Every combination that divides."""
    cases = [Case(*c) for c in product(HEADS, CLIPS, KINDS, ORDERS, ["packed"])]
    cases += [Case("one_qk", "carried", *c, "whole") for c in product(KINDS, ORDERS)]
    return [c for c in cases if c.kind == "serial" or HEADS[c.heads][0] % world == 0]


def on_rank(rank: int, world: int, cases: list[Case]) -> list[Pass]:
    passes = []
    for case in cases:
        layout = ContextLayout.for_rank(case.order, rank, world)
        layer, style = LAYERS[case.heads, case.clip], ContextScan(case.kind, layout)
        passes.append(run_part(layer, style, layout, *DATA, DOCS[case.docs])[0])
    return passes


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_and_order_is_the_unsharded_mixer(world: int) -> None:
    cases = cases_of(world)
    results = run_ranks(on_rank, world, cases)
    wanted = {(c.heads, c.clip, c.docs) for c in cases}
    want = {key: run(LAYERS[key[0], key[1]], *DATA, DOCS[key[2]]) for key in wanted}
    for i, case in enumerate(cases):
        got = whole([result[i] for result in results], case.order)
        assert error(got, want[case.heads, case.clip, case.docs]) <= FP64, case
    # The clips are not idle, and not the same: their gradients differ in the first digits.
    for a, b in (("unclipped", "total"), ("unclipped", "carried"), ("total", "carried")):
        assert error(want["one_qk", a, "packed"], want["one_qk", b, "packed"]) > 1e-2


@pytest.mark.parametrize("mode", ["total", "carried"])
def test_a_carried_state_is_the_sequential_one(mode: Literal["total", "carried"]) -> None:
    """Two parts of a row, one after the other, each with several documents and a ragged chunk."""
    clip, docs = StateClip(BOUND, mode), packed_rows()
    shapes = [(1, 6), (1, 6), (3, 4), (3,)]
    leaves = [normal(ROWS, TOKENS, *s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    w_NVV = normal(3, 4, 4, seed=9).requires_grad_()
    q, k, v, f = leaves
    y_BTNV, final_SNKV = m2rnn_sequential(q, k, v, f.sigmoid(), w_NVV, docs, clip=clip)
    last_B = docs.ends_BT.flatten().cumsum(0).view(ROWS, TOKENS)[:, -1] - 1
    want = (y_BTNV, final_SNKV[last_B])

    h_BNKV, ys = torch.zeros(ROWS, 3, 6, 4, dtype=torch.float64), []
    for tokens in (slice(0, 13), slice(13, TOKENS)):
        q, k, v, f = (x[:, tokens] for x in leaves)
        part = docs.take(torch.arange(TOKENS)[tokens])
        h_BNKV = torch.where(part.positions_BT[:, 0, None, None, None] > 0, h_BNKV, 0.0)
        given = q, k, v, f.sigmoid(), w_NVV, part, h_BNKV, clip
        y, h_BNKV = m2rnn_chunked(*given, chunk_size=5, by_row=True)
        ys.append(y)
    got = (torch.cat(ys, 1), h_BNKV)

    cotangents = normal(*y_BTNV.shape, seed=10), normal(*h_BNKV.shape, seed=11)
    want_grads = torch.autograd.grad(want, [*leaves, w_NVV], cotangents)
    got_grads = torch.autograd.grad(got, [*leaves, w_NVV], cotangents)
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        assert (a - b).abs().max() <= FP64 * b.abs().max()


def narrow(dtype: torch.dtype) -> M2RNN:
    """A layer of fp32 or bf16; what is under the fp32 contract is fp32 in both."""
    return layer_of("one_qk", "carried").float().to(dtype)


def widths_on_rank(rank: int, world: int, dtype: torch.dtype) -> list[Pass]:
    layer, layout = narrow(dtype), ContextLayout.for_rank("head_tail", rank, world)
    x_BTD, dy_BTD = (x.to(dtype) for x in DATA)
    return [
        run_part(layer, ContextScan(kind, layout), layout, x_BTD, dy_BTD, DOCS["packed"])[0]
        for kind in KINDS
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_widths(dtype: torch.dtype) -> None:
    """In fp32 as far from the unsharded mixer as rounding; in bf16 as far as it from fp64."""
    layer, docs, (x_BTD, dy_BTD) = narrow(dtype), DOCS["packed"], (x.to(dtype) for x in DATA)
    unsharded = run(layer, x_BTD, dy_BTD, docs)
    exact = run(layer.double(), x_BTD.double(), dy_BTD.double(), docs)
    results = run_ranks(widths_on_rank, 2, dtype)
    for i in range(len(KINDS)):
        got = whole([result[i] for result in results], "head_tail")
        assert error(got, exact) <= 1.5 * error(unsharded, exact)
        assert dtype != torch.float32 or error(got, unsharded) <= FP32


def isolation_on_rank(rank: int, world: int) -> list[list[float]]:
    mesh, found = init_device_mesh("cpu", (world,)), []
    for kind, order in product(KINDS, ORDERS):
        layout = ContextLayout.for_rank(order, rank, world)
        layer = layer_of("one_qk", "carried")
        parallelize_module(layer, mesh, ContextScan(kind, layout))
        found.append(outside(layer, layout, *DATA, DOCS["packed"]))
    return found


def test_documents_are_isolated_exactly() -> None:
    for result in run_ranks(isolation_on_rank, 4):
        assert result == [[0.0, 0.0]] * 4


def recompute_on_rank(rank: int, world: int) -> list[float]:
    """Largest difference of dx with and without recomputation, by kind."""
    mesh, differences = init_device_mesh("cpu", (world,)), []
    layout = ContextLayout.for_rank("head_tail", rank, world)
    index_T = layout.index(TOKENS)
    part = DOCS["packed"].take(index_T)
    x_BtD, dy_BtD = (x[:, index_T] for x in DATA)
    for kind in KINDS:
        layer = layer_of("one_qk", "carried")
        parallelize_module(layer, mesh, ContextScan(kind, layout))
        x_BtD = x_BtD.detach().requires_grad_()
        again = checkpoint(layer, x_BtD, part, use_reentrant=False)
        grads = [torch.autograd.grad(y, x_BtD, dy_BtD)[0] for y in (layer(x_BtD, part), again)]
        differences.append((grads[0] - grads[1]).abs().max().item())
    return differences


def test_recomputed_in_backward() -> None:
    """States travel a second time, and gradients after them: the same figures to the last bit."""
    assert run_ranks(recompute_on_rank, 2) == [[0.0, 0.0]] * 2


def kept_states_on_rank(rank: int, world: int) -> list[bool]:
    """Bit by bit the same gradients with the states of every token kept, set after the cut."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for kind, order in product(KINDS, ORDERS):
        layout, layer = ContextLayout.for_rank(order, rank, world), layer_of("one_qk", "carried")
        parallelize_module(layer, mesh, ContextScan(kind, layout))
        index_T, runs = layout.index(TOKENS), []
        (scan,) = (m for m in layer.modules() if isinstance(m, M2RNNScan))
        for scan.keep_states in (False, True):
            x_BtD, kept = DATA[0][:, index_T].requires_grad_(), set()
            with saved_tensors_hooks(lambda t, kept=kept: kept.add(t.shape) or t, lambda t: t):
                y_BtD = layer(x_BtD, DOCS["packed"].take(index_T))
            leaves = [x_BtD, *layer.parameters()]
            grads = torch.autograd.grad(y_BtD, leaves, DATA[1][:, index_T])
            runs.append(([y_BtD, *grads], kept))
        (plain, kept), (same, kept_more) = runs
        found.append(kept != kept_more and all(map(torch.equal, plain, same)))
    return found


def test_kept_states_give_the_same_gradients() -> None:
    assert run_ranks(kept_states_on_rank, 2) == [[True] * 4] * 2


class Messages(TorchDispatchMode):
    """Sizes of what is sent from rank to rank and received, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in ("send", "recv_"):
            tensors: list[Tensor] = args[0]
            self.calls.append((name, sum(x.numel() for x in tensors)))
        return func(*args, **(kwargs or {}))


def sent_on_rank(rank: int, world: int) -> dict[str, Any]:
    layout, found = ContextLayout.for_rank("head_tail", rank, world), {}
    layer = LAYERS["one_qk", "carried"]
    for kind in KINDS:
        with Messages() as messages:
            _, *calls = run_part(layer, ContextScan(kind, layout), layout, *DATA, DOCS["packed"])
        between_all = [[c for c in part if c.kind not in ("send", "recv")] for part in calls]
        found[kind] = [*between_all, messages.calls]
    return found


def test_what_is_sent() -> None:
    """B 2, T 32, 8 chunks of 4 ranks; N 4, K 6, V 4, one q and one k head; 3 past tokens."""
    F64 = torch.float64
    past = [8 * 2 * 3 * (6 + 6), 8 * 2 * 3 * (4 * 4)]  # chunks, rows, tokens, channels of qk and v
    by_head, shared, back = 2 * 8 * 4 * (4 + 1), 2 * 32 * (6 + 6), 2 * 8 * 4 * 4
    halo = [Collective("all_gather", F64, n) for n in past]
    halo_back = [Collective("reduce_scatter", F64, n) for n in past[::-1]]
    results = run_ranks(sent_on_rank, 4)
    for rank, found in enumerate(results):
        forward, backward, messages = found["heads"]
        assert forward == [
            *halo,
            Collective("all_to_all", F64, by_head),
            Collective("all_gather", F64, shared),
            Collective("all_to_all", F64, back),
        ]
        assert sorted(backward, key=str) == sorted(
            [
                *halo_back,
                Collective("all_to_all", F64, by_head),
                Collective("reduce_scatter", F64, shared),
                Collective("all_to_all", F64, back),
            ],
            key=str,
        )
        assert messages == []
        forward, backward, messages = found["serial"]
        assert (forward, backward) == (halo, halo_back)
        # Two chunks a rank; the last rank's are neighbours, and hand the state on in memory.
        there = {0: ["send", "recv_"], 3: ["recv_", "send"]}
        inner = ["recv_", "send", "recv_", "send"]
        way = there.get(rank, inner)
        reverse = {"send": "recv_", "recv_": "send"}
        names = way + [reverse[name] for name in way[::-1]]
        assert messages == [(name, 2 * 4 * 6 * 4) for name in names]


def test_auto_takes_heads_where_they_divide() -> None:
    for wanted, degree, kind in (
        ("auto", 4, "heads"),
        ("auto", 8, "serial"),
        ("serial", 4, "serial"),
        ("heads", 8, "heads"),
    ):
        assert heads_if_divisible(wanted, 132, degree) == kind


def test_heads_are_divided_by_tp_before_cp() -> None:
    """With tp 1 each of four context ranks takes one of four heads; with tp 2 a rank has two."""
    config = small("R")
    config = replace(config, m2rnn=replace(config.m2rnn, num_heads=4))
    with torch.device("meta"):
        model = HybridLM(config)
    cp, kinds = heads_exchanged(config)[1], []
    for tp in (1, 2):
        layout = ContextLayout.for_rank("contiguous", 0, cp)
        styles = context_plan(model, MeshConfig(tp=tp, cp=cp, cp_m2rnn="auto"), layout).values()
        kinds += [style.kind for style in styles if isinstance(style, ContextScan)]
    assert kinds == ["heads", "serial"]
