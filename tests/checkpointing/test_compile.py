"""Compiled blocks: the same gradients, bytes by the budget, one graph for blocks that are alike.

One process; fp64 at 1e-12; aot_eager, which is the compiler's choice of what is kept without its
code, in seconds. Packed documents throughout.

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from checkpointing.apply import ActivationCheckpointing, give
from checkpointing.compile import LOOKED_UP, Compiled, Compiler, compile_blocks, why_eager
from checkpointing.recompute import BlockRecompute, Replays
from megacpp.blocks.attention.compiled import CONTEXT
from megacpp.blocks.attention.logits import LogitRecorder
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.descriptor import ROUTED
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.arguments import parse_run
from megacpp.config.schema import (
    KEEP,
    Config,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.data.batches import Batch
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels, set_kernels
from megacpp.lessons.kept import WIDE, kept_bytes, pair
from megacpp.model.block import Block
from megacpp.model.compiled import CUT
from megacpp.model.decoding import decode, init_state
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from megacpp.model.recompute import PLAIN
from megacpp.model.regions import BLOCK
from parallel.build import build_model
from parallel.context.layout import ContextLayout
from parallel.context.scan import ScanByHeads
from parallel.mesh import World
from parallel.simulate.fake import fake_world, planned_model
from tests.model.small import small, variants
from tests.parallel.parity import models
from tests.synthetic import ragged_batch

pytestmark = pytest.mark.usefixtures("no_graphs_of_others")
CPU = torch.device("cpu")
ONE = World(0, 1, CPU)
LETTERS = "AMERFAF"
B, T = 4, 12


def backward(model: HybridLM, batch: Batch, docs: Documents) -> None:
    model(batch.ids_BT, batch.labels_BT, docs).loss_sum.backward()


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max(), name


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


# ---- the same numbers, once for all layers ------------------------------------------------------

MODELS = {
    "gqa": small(LETTERS),
    "window": replace(
        small(LETTERS), attention=replace(small().attention, window=5, full_layers="1")
    ),
    "mla": replace(variants()["mla_low_rank_queries_yarn"], pattern=LETTERS, depth=7),
    "capacity": replace(small("EEF"), moe=replace(small().moe, capacity_factor=0.75)),
    "softcap relu2": replace(
        small("AFF"),
        attention=replace(small().attention, softcap=3.0),
        mlp=MLPConfig(hidden_dim=24, activation="relu2"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_blocks_as_written(name: str) -> None:
    """Rows that are packed and rows that are whole, by turns; graphs are made once for each."""
    plain, compiled, found = pair(MODELS[name], 0.5)
    graphs: list[int] = []
    for step in range(3):
        batch = ragged_batch(range(step * B, (step + 1) * B), T)
        for docs in (batch.docs, Documents.rows(B, T)):
            if step == 2:  # layers of other kinds remember things of their own
                docs.memo("something else", lambda: torch.zeros(3))
            for model in (plain, compiled):
                model.zero_grad()
                backward(model, batch, docs)
            assert_same_gradients(compiled, plain)
            graphs.append(num_graphs())
    # Attention, and the scan: packed and whole. Feed-forward: with the budget and, as the last
    # layer, without.
    parts = [found.graphs.get(layer) for layer in range(len(plain.letters))]
    scans = sum(letter == "M" for letter in plain.letters)
    kinds = len({kind for kind in plain.kinds if kind[0] == "A"})
    experts = parts.count("shared expert") + min(parts.count("experts"), 1)
    dense = len({found.budgets[n] for n, kind in enumerate(plain.kinds) if kind[0] == "F"})
    expected = 2 * kinds + dense + experts + 2 * min(scans, 1)
    assert graphs[1:] == [expected] * 5
    assert not counters["graph_break"]


def test_without_gradients_nothing_is_compiled() -> None:
    plain, compiled, _ = pair(small(LETTERS), 0.5)
    batch = ragged_batch(range(B), T)
    with torch.no_grad():
        expected = plain(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
        assert torch.equal(compiled(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum, expected)
        decode(compiled, batch.ids_BT[:, 0], init_state(compiled, B, CPU, torch.float64))
    assert num_graphs() == 0


def test_names_and_saved_state_are_untouched() -> None:
    plain, compiled, _ = pair(small(LETTERS), 0.5)
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in compiled.named_modules()]
    ours, theirs = plain.state_dict(), compiled.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_recorded_logits_are_the_same() -> None:
    """Compare QK-clip logits: a graph for the first microbatch of a step, one for the others."""
    plain, compiled, _ = pair(small("AF"), 0.5)
    recorders = [LogitRecorder(0.3, (8,)) for _ in range(2)]
    for model, recorder in zip((plain, compiled), recorders, strict=True):
        model.get_submodule("blocks.0.mixer.inner").recorder = recorder  # type: ignore[assignment]
    for step in range(2):
        for model, recorder in zip((plain, compiled), recorders, strict=True):
            recorder.reset()
            for rows in (range(step, step + B), range(step + B, step + 2 * B)):
                batch = ragged_batch(rows, T)
                backward(model, batch, batch.docs)
        for found, expected in zip(*(r.maxima for r in recorders), strict=True):
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
            assert not found.requires_grad
        assert num_graphs() == 3


# ---- what is compiled ---------------------------------------------------------------------------


def test_the_table_says_what_is_compiled_and_why_the_rest_is_not() -> None:
    _, _, found = pair(small(LETTERS), 0.5)
    assert [found.words(layer) for layer in range(7)] == [
        "block by aot_eager, budget 0.5",
        "block by aot_eager, budget 0.5",
        f"shared expert by aot_eager, budget 0.5; eager: {ROUTED}",
        "eager: no compiler sees into the torch form of its scan",
        "block by aot_eager, budget 0.5",
        "block by aot_eager, budget 0.5",
        "block by aot_eager, budget 1",  # the last: its backward comes at once
    ]
    assert found.whole == {0, 1, 4, 5, 6}


def test_a_scan_that_is_cut_or_done_by_a_kernel_stays_eager() -> None:
    block = HybridLM(small("M")).blocks["0"]
    assert isinstance(block, Block) and isinstance(block.mixer, Mamba3)
    assert why_eager(block) is None
    set_kernels(block, Kernels(mamba3="mamba_ssm"))
    assert why_eager(block) == "no compiler sees into the mamba_ssm form of its scan"
    set_kernels(block, PLAIN_KERNELS)
    layout = ContextLayout.for_rank("contiguous", 0, 2)
    block.mixer.scan = ScanByHeads(block.mixer.scan, layout, None)  # type: ignore[arg-type]
    assert why_eager(block) == CUT


def test_attention_that_looks_at_other_ranks_stays_eager() -> None:
    found: list[Compiled] = []

    def prepare(model: HybridLM) -> None:
        found.append(compile_blocks(model, "aot_eager", 0.5))

    for name in ("plain", "mla"):
        config = Config(model=models()[name], mesh=MeshConfig(cp=2, dp_shard=1))
        with fake_world(config, 2) as world:
            planned_model(config, world, prepare)
    for compiled in found:
        assert compiled.eager[0] == CONTEXT and compiled.whole == {4}


# ---- bytes --------------------------------------------------------------------------------------

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.0)


def test_what_a_block_keeps_follows_the_budget() -> None:
    """From all that the compiler keeps by default down to the input alone.

    The budget divides the way between the two. The compiler weighs results of matrix products and
    attention only and cuts what lies between afterwards: half an input (one result of the narrower
    keys or values) is allowed for that.
    """
    docs = ragged_batch(range(2), 64).docs
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 64, 64, dtype=torch.float64, generator=generator).requires_grad_()
    input_bytes = x_BTD.numel() * 8
    compiled = {budget: pair(WIDE, budget)[1] for budget in BUDGETS}
    for layer in (0, 1):
        for model in compiled.values():
            kept_bytes(model, layer, x_BTD, docs)
    for layer in (0, 1):
        # After all of them were made, and the smallest first: each still has its own.
        kept = {b: kept_bytes(compiled[b], layer, x_BTD, docs) for b in reversed(BUDGETS)}
        falling = [kept[budget] for budget in BUDGETS]
        assert falling == sorted(falling, reverse=True) and len(set(falling)) >= 4
        assert kept[0.0] == input_bytes
        for budget in BUDGETS:
            allowed = input_bytes + budget * (kept[1.0] - input_bytes)
            assert kept[budget] <= allowed + input_bytes // 2, (layer, budget, kept)


# ---- one authority: no recompute regions inside, and the flag reaches the compiler --------------


def test_no_recompute_region_is_active_in_a_compiled_block() -> None:
    """S0-3: a policy for every kind, and in compiled blocks it is gone; elsewhere it works."""
    config = Config(
        model=small("AEFAF"),
        precision=PrecisionConfig("fp64"),
        train=TrainConfig(compile="aot_eager"),
        recompute=replace(
            KEEP,
            ablock="full",
            eblock="full",
            fblock="full",
            norms=True,
            core_attn=True,
            mlp=True,
            activation_memory_budget=0.5,
        ),
    )
    ac = ActivationCheckpointing(config)
    model = build_model(config, ONE, ac)
    assert set(ac.compiled) >= {0, 2, 3, 4}
    for key in "0234":
        modules = [m for m in model.blocks[key].modules() if hasattr(m, "recompute")]
        assert len(modules) > 1 and all(m.recompute is PLAIN for m in modules)
    assert model.blocks["1"].recompute is not PLAIN
    plain = build_model(replace(config, recompute=KEEP, train=TrainConfig()), ONE)
    batch = ragged_batch(range(B), T)
    for each in (plain, model):
        backward(each, batch, batch.docs)
    assert_same_gradients(model, plain)
    assert ac.replays.counts == {"block": 1}, "of the one E block"
    give(model.blocks["0"], BlockRecompute(BLOCK, Replays()))
    with pytest.raises(AssertionError, match="both decide"):
        backward(model, batch, batch.docs)


SMALL_RUN = (
    "dense_110m --model.depth 3 --model.dim 16 --model.vocab-size 50 --model.mlp.hidden-dim 24 "
    "--model.attention.num-heads 4 --model.attention.num-kv-heads 2 --model.attention.head-dim 8 "
    "--data.seq-len 12 --train.device-batch-size 4 --train.tokens-per-step 0"
)


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ("--gradient-checkpointing true", 0.5),
        ("--gradient-checkpointing false", 1.0),
        ("--recompute.activation-memory-budget 0.3", 0.3),
    ],
)
def test_gradient_checkpointing_reaches_the_compiler(
    flags: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0-4: from the command line to where functorch chooses what is kept."""
    from torch._functorch import config as functorch
    from torch._functorch import partitioners

    seen: list[float] = []
    choose = partitioners.choose_saved_values_set

    def spy(*args: object, memory_budget: float = 1, **kwargs: object) -> object:
        seen.append(memory_budget)
        return choose(*args, memory_budget=memory_budget, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(partitioners, "choose_saved_values_set", spy)
    words = [*SMALL_RUN.split(), "--train.compile", "aot_eager", *flags.split()]
    config = parse_run(words, 1).config
    model = build_model(config, ONE, ActivationCheckpointing(config))
    batch = ragged_batch(range(B), T)
    backward(model, batch, batch.docs)
    assert seen == ([1.0, 1.0] if budget == 1 else [budget, budget, 1.0]), "A, F and the last"
    assert functorch.activation_memory_budget == 1.0, "and nobody else's graphs"


def test_a_block_with_a_memory_stays_as_it_is_written() -> None:
    model = HybridLM(variants()["engram"])
    reasons = [why_eager(block) for block in model.blocks.values()]  # type: ignore[arg-type]
    assert reasons == [LOOKED_UP, ROUTED, LOOKED_UP]


def test_the_first_step_says_what_it_compiles_and_later_ones_nothing() -> None:
    said: list[str] = []
    config = Config(
        model=small("AEF"),
        precision=PrecisionConfig("fp64"),
        train=TrainConfig(compile="aot_eager"),
        recompute=KEEP,
    )
    model = build_model(config, ONE, ActivationCheckpointing(config, say=said.append))
    assert not said
    for _ in range(2):
        batch = ragged_batch(range(B), T)
        backward(model, batch, batch.docs)
    assert said[::2] == [
        f"compiling {name} by aot_eager, with budget 1 ..."
        for name in ("A blocks", "shared expert of E blocks", "F blocks")
    ]
    assert all("backward when it first runs" in line for line in said[1::2])


# ---- when a graph can't be made -----------------------------------------------------------------


def test_an_error_leaves_no_hook_behind() -> None:
    """It is heard as it is, and functions let go of their arguments as ever."""

    def breaks(graph: torch.fx.GraphModule, inputs: list[Any]) -> None:
        raise ValueError("no such instruction")

    compiled = Compiler(breaks, 1.0).compile(_twice)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ValueError, match="no such instruction"):
            compiled(torch.ones(2))
    assert lets_go(torch.ones(2))


def _twice(x: Tensor) -> Tensor:
    return x + x


def lets_go(*args: Tensor) -> bool:
    """Whether a function that deletes its argument is the last to hold it."""

    def gone(x: Tensor) -> bool:
        seen = weakref.ref(x)
        del x
        return seen() is None

    return gone(args[0] + 1)
