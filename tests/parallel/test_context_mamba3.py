"""Mamba-3 over forked gloo context ranks against one process: values, isolation, what is sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from checkpointing.apply import give
from checkpointing.recompute import BlockRecompute, Replays
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
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
from megacpp.model.regions import Region
from megacpp.model.short_conv import Convolve
from parallel.context.convolution import ContextConvolve
from parallel.context.heads import for_own_heads, own_heads
from parallel.context.layout import ContextLayout, Order
from parallel.context.scan import ContextScan
from tests.collectives import Collective, CollectiveCounter
from tests.model.mamba3_cases import VARIANTS
from tests.parallel.context_documents import ORDERS, outside
from tests.ranks import run_ranks

DIM = 16  # 8 heads of 4
KINDS: tuple[Literal["state", "heads"], ...] = ("state", "heads")
REGIONS: tuple[frozenset[Region], ...] = (frozenset(), frozenset({"conv_bc"}))
FP64, FP32 = 1e-12, 1e-5  # rounding: of max |reference|


class Case(NamedTuple):
    layer: str
    kind: Literal["state", "heads"]
    order: Order
    docs: str


def layer_of(name: str) -> Mamba3:
    """All parameters away from their special initial values."""
    mamba = VARIANTS.get(name, Mamba3Config(ngroups=2, out_norm=True))
    layer = Mamba3(
        ModelConfig(dim=DIM, mamba3=replace(mamba, d_state=8, headdim=4, chunk_size=3))
    ).to(torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=i))
    return layer


def half(layer: Mamba3) -> Mamba3:
    """A layer that holds the second half of the heads, as a tensor-parallel rank does."""
    shared = ("in_B", "in_C", "conv_B", "conv_C", "B_norm", "C_norm", "in_angles")
    for name, parameter in list(layer.named_parameters()):
        if not name.startswith(shared):
            dim = 1 if name == "out_proj.weight" else 0
            parameter.data = parameter.data.chunk(2, dim)[1].clone()
    return layer


LAYERS = {name: layer_of(name) for name in VARIANTS}
LAYERS["half_the_heads"] = half(layer_of("siso_conv_softplus"))
DOCS = {
    "packed": packed_rows(),
    "whole": Documents.rows(ROWS, TOKENS),
    "short": Documents.from_ids(packed_rows().ids_BT[:, 3:11]),  # chunks of one token on 4 ranks
}


def data(docs: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Documents]:
    """Input, cotangent of the output, documents."""
    shape = *DOCS[docs].ids_BT.shape, DIM
    return normal(*shape, seed=100).to(dtype), normal(*shape, seed=101).to(dtype), DOCS[docs]


def on_rank(rank: int, world: int, cases: list[Case]) -> list[Pass]:
    passes = []
    for case in cases:
        layout = ContextLayout.for_rank(case.order, rank, world)
        style = ContextScan(case.kind, layout)
        passes.append(run_part(LAYERS[case.layer], style, layout, *data(case.docs))[0])
    return passes


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_and_order_is_the_unsharded_mixer(world: int) -> None:
    cases = [Case(*c) for c in product(LAYERS, KINDS, ORDERS, ["packed"])]
    cases += [Case("mimo_groups_conv_outnorm", *c, "whole") for c in product(KINDS, ORDERS)]
    cases += [Case("mimo", *c, "short") for c in product(KINDS, ORDERS)]
    results = run_ranks(on_rank, world, cases)
    want = {key: run(LAYERS[key[0]], *data(key[1])) for key in {(c.layer, c.docs) for c in cases}}
    for i, case in enumerate(cases):
        got = whole([result[i] for result in results], case.order)
        assert error(got, want[case.layer, case.docs]) <= FP64, case


def narrow(name: str, dtype: torch.dtype) -> Mamba3:
    """A layer of fp32 or bf16; what is under the fp32 contract is fp32 in both."""
    return layer_of(name).float().to(dtype)


def widths_on_rank(rank: int, world: int, dtype: torch.dtype) -> list[Pass]:
    layer, layout = (
        narrow("mimo_groups_conv_outnorm", dtype),
        ContextLayout.for_rank("head_tail", rank, world),
    )
    arguments = (layout, *data("packed", dtype))
    return [run_part(layer, ContextScan(kind, layout), *arguments)[0] for kind in KINDS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_widths(dtype: torch.dtype) -> None:
    """In fp32 as far from the unsharded mixer as rounding; in bf16 as far as it from fp64."""
    layer, (x_BTD, dy_BTD, docs) = narrow("mimo_groups_conv_outnorm", dtype), data("packed", dtype)
    unsharded = run(layer, x_BTD, dy_BTD, docs)
    exact = run(layer.double(), x_BTD.double(), dy_BTD.double(), docs)
    results = run_ranks(widths_on_rank, 2, dtype)
    for i in range(len(KINDS)):
        got = whole([result[i] for result in results], "head_tail")
        assert error(got, exact) <= 1.5 * error(unsharded, exact)
        assert dtype != torch.float32 or error(got, unsharded) <= FP32


def isolation_on_rank(rank: int, world: int, cases: list[Case]) -> list[list[float]]:
    mesh, found = init_device_mesh("cpu", (world,)), []
    for case in cases:
        layout = ContextLayout.for_rank(case.order, rank, world)
        layer = layer_of(case.layer)
        parallelize_module(layer, mesh, ContextScan(case.kind, layout))
        found.append(outside(layer, layout, *data("packed")))
    return found


def test_documents_are_isolated_exactly() -> None:
    cases = [Case(*c) for c in product(["mimo_groups_conv_outnorm"], KINDS, ORDERS, ["packed"])]
    for result in run_ranks(isolation_on_rank, 4, cases):
        assert result == [[0.0, 0.0]] * len(cases)


def sent_on_rank(rank: int, world: int) -> dict[str, list[list[Collective]]]:
    layout, found = ContextLayout.for_rank("head_tail", rank, world), {}
    for kind in KINDS:
        for name, dtype in (("siso_conv_softplus", torch.float32), ("siso", torch.bfloat16)):
            style, layer = ContextScan(kind, layout), narrow(name, dtype)
            _, *calls = run_part(layer, style, layout, *data("packed", dtype))
            found[f"{kind} {name}"] = calls
    return found


def test_what_is_sent() -> None:
    """B 2, T 32, 8 chunks of 4 ranks; H 8, P 4, N 8, G 1, R 1, A 2; 3 past tokens."""
    F32, BF = torch.float32, torch.bfloat16
    past_x, past_bc = 8 * 2 * 3 * 32, 8 * 2 * 3 * 16  # chunks, rows, tokens, channels
    # Per chunk and row: P N of state, A + P + 2 of each head, and one K.
    states = 8 * 2 * (8 * (4 * 8) + 8 * (2 + 4 + 2) + 8)
    by_head, shared, back = 2 * 8 * 8 * (2 * 4 + 3), 2 * 32 * (2 * 8 + 2), 2 * 8 * 8 * 4
    for found in run_ranks(sent_on_rank, 4):
        forward, backward = found["state siso_conv_softplus"]
        sizes = [past_x, past_bc, states]
        assert forward == [Collective("all_gather", F32, n) for n in sizes]
        assert backward == [Collective("reduce_scatter", F32, n) for n in sizes[::-1]]
        assert forward[2].bytes == 16 * 4 * (8 * 4 * 8 + 72)
        forward, backward = found["state siso"]  # fp32 also where activations are narrow
        assert forward == [Collective("all_gather", F32, states)]
        assert backward == [Collective("reduce_scatter", F32, states)]
        forward, backward = found["heads siso_conv_softplus"]
        assert forward == [
            Collective("all_gather", F32, past_x),
            Collective("all_gather", F32, past_bc),
            Collective("all_to_all", F32, by_head),
            Collective("all_gather", F32, shared),
            Collective("all_to_all", F32, back),
        ]
        assert backward == [
            Collective("all_to_all", F32, back),
            Collective("reduce_scatter", F32, shared),
            Collective("all_to_all", F32, by_head),
            Collective("reduce_scatter", F32, past_bc),
            Collective("reduce_scatter", F32, past_x),
        ]
        forward, _ = found["heads siso"]  # x, z and trap narrow, dt and A dt wide
        assert forward == [
            Collective("all_to_all", BF, 2 * 8 * 8 * (2 * 4 + 1)),
            Collective("all_to_all", F32, 2 * 8 * 8 * 2),
            Collective("all_gather", BF, shared),
            Collective("all_to_all", BF, back),
        ]


def recompute_on_rank(rank: int, world: int) -> list[bool]:
    """Bit by bit the same gradients, and the same collectives, with regions that run again."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    x_BTD, dy_BTD, docs = data("packed")
    for kind, order in product(KINDS, ORDERS):
        layout, layer = (
            ContextLayout.for_rank(order, rank, world),
            layer_of("mimo_groups_conv_outnorm"),
        )
        parallelize_module(layer, mesh, ContextScan(kind, layout))
        index_T, runs = layout.index(TOKENS), []
        for regions in REGIONS:
            recompute = BlockRecompute(regions, replays := Replays())
            give(layer, recompute)
            x_BtD = x_BTD[:, index_T].requires_grad_()
            with CollectiveCounter() as counter:
                y_BtD = recompute("block", layer, x_BtD, docs.take(index_T))
                leaves = [x_BtD, *layer.parameters()]
                grads = torch.autograd.grad(y_BtD, leaves, dy_BTD[:, index_T])
            runs.append((counter.calls, [y_BtD, *grads]))
            # Two convolutions, norms, rotation; the gate where its result isn't sent on and kept.
            assert replays.counts == ({"conv_bc": 5 if kind == "state" else 4} if regions else {})
        (calls, plain), (calls_again, again) = runs
        found.append(calls == calls_again and all(map(torch.equal, plain, again)))
    return found


def test_nothing_is_sent_again() -> None:
    assert run_ranks(recompute_on_rank, 2) == [[True] * 4] * 2


@pytest.mark.parametrize(("groups", "degree"), [(1, 2), (2, 2), (3, 2), (2, 3), (6, 3)])
def test_groups_of_own_heads(groups: int, degree: int) -> None:
    """Repeated for the heads that share them, they are this rank's part of all heads' groups."""
    num_heads, x_G = 6, torch.arange(groups)
    for rank in range(degree):
        layout = ContextLayout.for_rank("contiguous", rank, degree)
        want = x_G.repeat_interleave(num_heads // groups)[own_heads(num_heads, layout)]
        got = for_own_heads(x_G, 0, num_heads, layout)
        assert torch.equal(got.repeat_interleave(len(want) // len(got)), want)


def test_refused() -> None:
    layout, docs = ContextLayout.for_rank("head_tail", 0, 4), DOCS["packed"]
    with pytest.raises(AssertionError, match="6 heads over 4 context ranks"):
        own_heads(6, layout)
    part = docs.take(layout.index(TOKENS))
    convolve = ContextConvolve(Convolve(), layout, None)  # type: ignore[arg-type]
    x_BtX, weight_X1K = torch.zeros(ROWS, TOKENS // 4, 3), torch.zeros(3, 1, 6)
    with pytest.raises(AssertionError, match="5 past tokens from chunks of 4"):
        convolve(x_BtX, weight_X1K, part)
    with pytest.raises(AssertionError, match="documents are a part"):
        convolve(x_BtX, weight_X1K[..., :4], docs)
