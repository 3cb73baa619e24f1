"""Sparse A blocks on meshes: the same run as one process, what moves, pipelines, the warm-up.

Forked gloo ranks and tests/parallel/parity.py in fp64; fake process groups for what moves.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megacpp.cli.explain import KINDS
from megacpp.config import CheckpointingPolicy, Config, DataConfig, MeshConfig, TrainConfig
from megacpp.kernels.lightning_indexer import QUERIES
from megacpp.model.pattern import layer_kinds
from megacpp.model.stages import split_layers
from megacpp.presets import preset
from megacpp.rules import check as check_rules
from megacpp.rules import resolve
from megacpp.sparse_rules import promoted, sparse_lines
from parallel.context_layout import ContextLayout
from parallel.drawing import Drawn, draw
from parallel.fake import as_trained
from parallel.sparse import in_order_of_row
from tests.parallel.parity import Run, Trace, check, models, traces_of

FULL = CheckpointingPolicy(ablock="full")


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
    Run("sparse_mla_warmup", mesh(dp_shard=2), accum=2),
    Run("sparse_mla_warmup", mesh(cp=2, tp=2)),
    Run("sparse_mla", mesh(dp_shard=2, tp=2), accum=2, optimizer="muon_adamw"),
    # three axes and more
    Run("sparse_mla", mesh(dp_shard=2, cp=2, tp=2, ep=4)),
    Run("sparse_stages", mesh(pp=2, cp=2, dp_shard=2), accum=2),
]


@functools.cache
def results() -> dict[Run, list[Trace]]:
    return traces_of([*RUNS, *dict.fromkeys(run.reference for run in RUNS)])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_same_run(run: Run) -> None:
    """Losses (the indexers' too), gradients, parameters after three steps."""
    found, expected = results()[run], results()[run.reference][0]
    check(found, expected, run.dtype)
    assert expected.auxiliary[0]["indexer"] > 0
    if run.recompute.ablock != "none":
        assert sum(found[0].again.values()) > 0


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
    layout = ContextLayout.of(order, 1, 4)  # type: ignore[arg-type]
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
    """Doors as of any A block; the probabilities of the chosen keys."""
    found, chosen = drawn(model, tp=2), models()[model].attention.sparse.top_k
    for kind, sums in (("A.index", T // QUERIES), ("A.share", 0)):
        residual = B * T * models()[model].dim
        door = {("all_gather", residual): 1, ("reduce_scatter", residual): 1}
        assert moves(found, kind, "backward") == door
        added = {("all_reduce", B * QUERIES * chosen): sums} if sums else {}
        assert moves(found, kind, "forward") == door | added


@pytest.mark.parametrize(("model", "numbers"), [("sparse_mla", 12 + 4), ("sparse_gqa", 4 * 16)])
def test_over_cp_keys_travel_together(model: str, numbers: int) -> None:
    """One all-gather, one reduce-scatter; of an indexer its key comes along."""
    found, index_key = drawn(model, cp=2), models()[model].attention.sparse.head_dim
    for kind, more in (("A.index", index_key), ("A.share", 0)):
        size = B * T * (numbers + more)
        assert moves(found, kind, "forward") == {("all_gather", size): 1}
        assert moves(found, kind, "backward") == {("reduce_scatter", size): 1}


# --- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("pp", [2, 4])
def test_no_stage_begins_with_a_layer_that_shares(pp: int, schedule: str) -> None:
    """The cuts may move when an indexer is added; what is left was settled with it."""
    base = preset("nam56r")
    attention = replace(
        base.model.attention,
        sparse=replace(base.model.attention.sparse, layers="1,2,3,5,6,7,9,10,11", share=3),
    )
    model = replace(base.model, attention=attention)
    config = promoted(replace(base, model=model, mesh=MeshConfig(pp=pp, pp_schedule=schedule)))
    kinds = layer_kinds(config.model)
    stages = split_layers(config.model, pp * (1 if schedule == "1f1b" else 2))
    for layers in stages:
        sparse = [kinds[i] for i in layers if kinds[i].startswith("A.")]
        assert not sparse or sparse[0] == "A.index", (layers, kinds)
    assert promoted(config) == config, "settled"
    fewer = [kind for kind in layer_kinds(model) if kind == "A.index"]
    assert kinds.count("A.index") >= len(fewer) == 3
    ranks = config.model.attention.sparse.own
    assert bool(ranks) == (kinds.count("A.index") > 3)
    assert not ranks or any(ranks in line for line in sparse_lines(config))


def test_what_a_pipeline_adds_is_in_the_resolved_configuration() -> None:
    base = preset("tiny")
    sparse = replace(base.model.attention.sparse, layers="all", share=9)
    attention = replace(base.model.attention, sparse=sparse)
    config = replace(base, model=replace(base.model, attention=attention), mesh=MeshConfig(pp=2))
    config = replace(config, train=replace(config.train, grad_accum=2))
    check_rules(config, 2)
    assert resolve(config, 2).model.attention.sparse.own not in ("", "all")
    one = replace(config, mesh=MeshConfig())
    assert resolve(one, 2).model.attention.sparse.own == ""


def test_explain_has_words_for_every_kind() -> None:
    kinds = {kind for name in ("sparse_stages", "plain") for kind in layer_kinds(models()[name])}
    assert {"A", "A.index", "A.share"} <= kinds == set(KINDS)
