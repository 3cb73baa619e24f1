"""Sparse A blocks on meshes: the same run as one process, what moves, pipelines, the warm-up.

Forked gloo ranks and tests/parallel/parity.py in fp64; fake process groups for what moves.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp.blocks.attention.sparse import note_choice, noted_choice
from megacpp.cli.explain import KINDS
from megacpp.config.checks.every import check as check_rules
from megacpp.config.checks.every import resolve
from megacpp.config.presets import preset
from megacpp.config.schema import (
    KEEP,
    Config,
    DataConfig,
    MeshConfig,
    TrainConfig,
)
from megacpp.kernels.sparse_attention.indexer import QUERIES
from megacpp.model.documents import Documents
from megacpp.model.pattern import layer_kinds
from megacpp.model.stages import choice_bytes, stage_parts
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.context.attention import in_order_of_row
from parallel.context.layout import ContextLayout
from parallel.handoff import ChoiceHandoff
from parallel.mesh import World
from parallel.simulate.collective_log import POINT_TO_POINT, Collective, CollectiveLog
from parallel.simulate.drawing import Drawn, draw
from parallel.simulate.fake import as_trained
from tests.parallel.parity import (
    Run,
    Trace,
    batches_of,
    check,
    config_of,
    models,
    traces_of,
    world_of,
)
from tests.ranks import on_worlds
from tests.together import Together

FULL = replace(KEEP, ablock="full")


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"dp_shard": 1, **axes})  # type: ignore[arg-type]


RUNS = [
    Run("sparse_mla", mesh(cp=2), recompute=FULL),
    Run("sparse_mla", mesh(cp=2, cp_order="contiguous", tp=2)),
    Run("sparse_gqa", mesh(tp=2), recompute=FULL),
    Run("sparse_gqa", mesh(cp=2)),
    Run("sparse_gqa", mesh(dp_shard=2, ep=2)),
    Run("sparse_stages", mesh(pp=2, tp=2), accum=2),
    Run("sparse_stages", mesh(pp=2, pp_schedule="zbv"), accum=2, recompute=FULL),
    Run("sparse_stages", mesh(pp=2, pp_schedule="dualpipev"), accum=4, evaluate=True),
    Run("sparse_stages", mesh(pp=2, pp_schedule="interleaved"), accum=2, recompute=FULL),
    Run("sparse_stages", mesh(pp=4, pp_schedule="gpipe"), accum=4),
    Run("sparse_mla_warmup", mesh(dp_shard=2), accum=2),
    Run("sparse_mla_warmup", mesh(cp=2, tp=2)),
    Run("sparse_mla", mesh(dp_shard=2, tp=2), accum=2, optimizer="muon_adamw"),
    # three axes and more
    Run("sparse_mla", mesh(dp_shard=2, cp=2, tp=2, ep=4)),
    Run("sparse_stages", mesh(pp=2, cp=2, dp_shard=2), accum=2),
]


@functools.cache
def results() -> Together[Run, list[Trace]]:
    return Together(__name__, RUNS, traces_of, lambda run: [run.reference])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    """Losses (the indexers' too), gradients, parameters after three steps."""
    found, expected = results()[run], results()[run.reference][0]
    check(found, expected, run.dtype)
    assert expected.auxiliary[0]["indexer"] > 0
    if run.recompute.ablock != "none":
        assert sum(found[0].again.values()) > 0


@pytest.mark.parametrize("run", [run for run in RUNS if run.evaluate], ids=str)
def test_the_same_evaluation(run: Run) -> None:
    """Forward only, by a loop of our own; in a V through both stages of a rank."""
    expected = results()[run.reference][0].evaluations
    for trace in results()[run]:
        for found, other in zip(trace.evaluations, expected, strict=True):
            assert abs(found / other - 1) <= 1e-12


@pytest.mark.parametrize("run", [run for run in RUNS if "warmup" in run.model], ids=str)
def test_the_warm_up_moves_indexers_alone(run: Run) -> None:
    """With weight decay on: what isn't trained keeps its bits through three optimizer steps."""
    for trace in results()[run]:
        moved = {
            name
            for name, part in trace.parameters.items()
            if not torch.equal(part.local, trace.start[name].local)
        }
        held = {name for name, part in trace.start.items() if part.local.numel()}
        assert moved == {name for name in held if "indexer" in name}


@pytest.mark.parametrize("order", ["head_tail", "contiguous"])
def test_what_is_gathered_is_put_in_order(order: str) -> None:
    tokens = torch.arange(24.0).view(1, 24, 1).expand(2, 24, 3)
    layout = ContextLayout.for_rank(order, 1, 4)  # type: ignore[arg-type]
    arrived = tokens[:, layout.gathered_index(24)]
    assert torch.equal(in_order_of_row(arrived, layout), tokens)


# --- what moves ----------------------------------------------------------------------------------

B, T = 2, 2 * QUERIES


def drawn(model: str, **axes: int) -> dict[str, list[Drawn]]:
    """Of each kind of block, on two ranks."""
    config = Config(
        model=models()[model],
        data=DataConfig(seq_len=T),
        train=TrainConfig(device_batch_size=B),
        mesh=MeshConfig(**axes),
    )
    check_rules(config, 2)
    return draw(as_trained(resolve(config, 2)), 2, 0, again=False)


def moves(found: dict[str, list[Drawn]], kind: str, phase: str) -> Counter[tuple[str, int]]:
    """Of one block: kind of collective, and elements of the larger side."""
    return Counter(
        (d.kind, d.bytes // d.dtype.itemsize)
        for d in found[kind]
        if d.phase == phase and d.axis in ("tp", "cp")
    )


@pytest.mark.parametrize("model", ["sparse_mla", "sparse_gqa"])
def test_over_tp_the_indexer_adds_one_sum_a_block_of_queries(model: str) -> None:
    """Activation layouts as of any A block; the probabilities of the chosen keys."""
    found, chosen = drawn(model, tp=2), models()[model].attention.sparse.top_k
    for kind, sums in (("A.index", T // QUERIES), ("A.share", 0)):
        residual = B * T * models()[model].dim
        layout = {("all_gather", residual): 1, ("reduce_scatter", residual): 1}
        assert moves(found, kind, "backward") == layout
        added = {("all_reduce", B * QUERIES * chosen): sums} if sums else {}
        assert moves(found, kind, "forward") == layout | added


@pytest.mark.parametrize(("model", "numbers"), [("sparse_mla", 12 + 4), ("sparse_gqa", 4 * 16)])
def test_over_cp_keys_travel_together(model: str, numbers: int) -> None:
    """One all-gather, one reduce-scatter; of an indexer its key comes along."""
    found, index_key = drawn(model, cp=2), models()[model].attention.sparse.head_dim
    for kind, more in (("A.index", index_key), ("A.share", 0)):
        size = B * T * (numbers + more)
        assert moves(found, kind, "forward") == {("all_gather", size): 1}
        assert moves(found, kind, "backward") == {("reduce_scatter", size): 1}


# --- pipelines -----------------------------------------------------------------------------------


def point_to_point(rank: int, run: Run) -> list[Collective]:
    """Sends and receives of one step."""
    world, config = world_of(rank, run), config_of(run)
    boundary = AccumulationBoundary(build_model(config, world), world, config)
    with CollectiveLog(world.meshes) as log:
        boundary.accumulate(batches_of(0, world, run))
    return [c for c in log.calls if c.kind in POINT_TO_POINT]


def test_ranks_send_a_choice_once_for_each_border() -> None:
    """By hand: of every token 3 keys of int16, one way, beside 16 numbers that go both ways.

    The choice crosses every border; at the bottom of a V both stages are of one rank.
    """
    borders = {"1f1b": 1, "interleaved": 3, "zbv": 2}
    runs = {
        schedule: Run("sparse_stages", mesh(pp=2, pp_schedule=schedule), accum=2)
        for schedule in borders
    }
    calls = on_worlds(point_to_point, {run: 2 for run in runs.values()})
    for schedule, run in runs.items():
        tokens = run.device_batch * 16
        for kind in POINT_TO_POINT:
            found = [c for of_rank in calls[run] for c in of_rank if c.kind == kind]
            choices = [c.bytes for c in found if c.dtype == torch.uint8]
            hidden = [c.numel for c in found if c.dtype == torch.float64]
            assert choices == [tokens * 3 * 2] * run.accum * borders[schedule], schedule
            assert hidden == [tokens * 16] * 2 * len(choices)


@pytest.mark.parametrize(
    ("pattern", "sparse", "expected"),
    [
        # one choice for all; a stage without attention passes it on
        ("A|A|E|A", {"share": 4}, [(None, 0), (0, 0), (0, 0), (0, None)]),
        ("A|A|E|E", {"share": 4}, [(None, 0), (0, None), (None, None), (None, None)]),
        ("A|A|A|A", {"share": 2}, [(None, 0), (0, None), (None, 2), (2, None)]),
        ("A|A|A|A", {"share": 4, "own": "1"}, [(None, None), (None, 1), (1, 1), (1, None)]),
        ("A|A|A|A", {"share": 1}, [(None, None)] * 4),
        ("A|A|A|A", {"share": 4, "stage": "dense"}, [(None, None)] * 4),
        ("A|A|A|A", {"layers": "0,3", "share": 2}, [(None, 0), (0, 0), (0, 0), (0, None)]),
    ],
)
def test_a_choice_goes_as_far_as_layers_share_it(
    pattern: str, sparse: dict[str, Any], expected: list[tuple[int | None, int | None]]
) -> None:
    base = models()["sparse_stages"]
    chosen = replace(base.attention.sparse, **{"layers": "all", **sparse})
    attention = replace(base.attention, sparse=chosen)
    model = replace(base, pattern=pattern, depth=4, attention=attention)
    parts = [stage_parts(model, MeshConfig(pp=4), rank)[0] for rank in range(4)]
    assert [(part.takes, part.hands) for part in parts] == expected
    kinds = layer_kinds(model)
    for part in parts:
        assert part.reads == (part.takes is not None and "A.share" in kinds[part.layers[0]])


@pytest.mark.parametrize(("row", "dtype"), [(2**15, torch.int16), (2**15 + 1, torch.int32)])
def test_numbers_of_keys_travel_exactly(row: int, dtype: torch.dtype) -> None:
    """The last key of a row, and the -1 of an unused slot, in the fewest bytes that hold both."""
    model, docs = models()["sparse_stages"], Documents.rows(1, row)
    chosen = torch.tensor([[[0, row - 1, -1]]], dtype=torch.int32).expand(1, row, 3)
    note_choice(docs, 2, chosen)
    handoff = ChoiceHandoff(model, World(0, 1, torch.device("cpu")))
    packed = handoff.packed(docs, 2)
    assert packed.nbytes == row * choice_bytes(model, row) == row * 3 * dtype.itemsize
    assert packed.shape == handoff.buffer(1, row).shape
    arrived = Documents.rows(1, row)
    handoff.unpack(packed, arrived, 2)
    assert torch.equal(noted_choice(arrived, 2), chosen)


def test_a_model_is_the_same_on_every_pipeline() -> None:
    """Resolving changes nothing of the model, whatever the cuts."""
    base = preset("tiny_full")
    for pp, schedule in ((2, "1f1b"), (3, "interleaved"), (6, "gpipe")):
        mesh = MeshConfig(pp=pp, pp_schedule=schedule)  # type: ignore[arg-type]
        config = replace(base, mesh=mesh, train=replace(base.train, grad_accum=6))
        check_rules(config, pp)
        assert resolve(config, pp).model == base.model


def test_explain_has_words_for_every_kind() -> None:
    kinds = {
        kind for name in ("sparse_stages", "plain", "delta") for kind in layer_kinds(models()[name])
    }
    assert {"A", "A.index", "A.share"} <= kinds == set(KINDS)
