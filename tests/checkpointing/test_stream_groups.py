"""Streams that run again in groups: the same bits, fewer bytes, and which layers are together.

One process, fp64, a hybrid of every letter.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.hyper_connections.groups import group_size, places_in_groups, stream_groups
from megacpp.config.schema import (
    KEEP,
    Config,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
)
from parallel.build import build_model
from parallel.mesh import World
from tests.parallel.parity import models
from tests.synthetic import ragged_batch

ONE = World(0, 1, torch.device("cpu"))
FULL = {"ablock": "full", "eblock": "full", "rblock": "full_plus_norms", "fblock": "full"}
STEPS = 2
ROWS, T, DIM, STREAMS, DEPTH = 4, 32, 16, 3, 9


def config_of(**policy: Any) -> Config:
    model = replace(models()["streams"], pattern="AEMRFE", depth=DEPTH)
    recompute = replace(KEEP, **{"mhc_group_size": -1, **policy})
    return Config(model=model, recompute=recompute, precision=PrecisionConfig("fp64"))


def run(config: Config, watched: bool = True) -> tuple[list[Tensor], dict[str, int], int]:
    """Loss and gradients, what ran again, and bytes alive behind a forward, beyond the first."""
    ac = ActivationCheckpointing(config)
    model, kept = build_model(config, ONE, ac), 0
    batch = ragged_batch(list(range(ROWS)), T, config.model.vocab_size)
    loss = torch.zeros(())
    for _ in range(STEPS):
        model.zero_grad()
        with LiveBytes() if watched else nullcontext() as live:
            loss = model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
            kept = live.now if live is not None else 0
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads], ac.replays.counts, kept


@cache
def plain() -> tuple[list[Tensor], dict[str, int], int]:
    return run(config_of())


POLICIES: list[tuple[dict[str, Any], int, int]] = [  # and how often streams are read and mixed
    ({"mhc_group_size": 0}, 8, 4),
    ({"mhc_group_size": 1}, 8, 0),
    ({"mhc_group_size": 3, "norms": True}, 8, 5),
    ({"mhc_group_size": 100, "mlp": True, "mblock": "conv_bc_only"}, 8, 7),
    ({"mhc_group_size": 4, **FULL}, 8, 6),
    ({"mhc_group_size": -1, **FULL}, 0, 0),
    ({"mhc_group_size": 4, "offload": "saved_tensors", "offload_min_mib": 0.0}, 8, 6),
    ({"mhc_group_size": 4, "offload": "block_inputs", "offload_min_mib": 0.0, **FULL}, 8, 6),
]


@pytest.mark.parametrize(("policy", "reads", "mixes"), POLICIES, ids=[str(p[0]) for p in POLICIES])
def test_the_same_bits(policy: dict[str, Any], reads: int, mixes: int) -> None:
    found, counts, _ = run(config_of(**policy))
    assert all(map(torch.equal, found, plain()[0])) and len(found) == len(plain()[0])
    assert counts.get("read_streams", 0) == STEPS * reads
    assert counts.get("mix_streams", 0) == STEPS * mixes


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_streams_are_kept_by_group_not_by_layer(size: int) -> None:
    """To the byte: entries instead of all, and neither what is read nor coefficients."""
    tokens, numbers = ROWS * T * 8, (STREAMS**2 + 2 * STREAMS + 1) + (STREAMS**2 + STREAMS)
    entries = -(-(DEPTH - 1) // size)
    saved = (DEPTH - 1 - entries) * STREAMS * DIM + (DEPTH - 1) * (DIM + numbers)
    assert plain()[2] - run(config_of(mhc_group_size=size))[2] == tokens * saved


def test_nothing_is_left_behind() -> None:
    """No block holds a forward's tensors when its backward is over."""
    config = config_of(mhc_group_size=3)
    model = build_model(config, ONE, ActivationCheckpointing(config))
    batch = ragged_batch(list(range(ROWS)), T, config.model.vocab_size)
    alive = []
    with LiveBytes() as live:
        for _ in range(3):
            model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
            alive.append(live.now)
    assert alive[1] == alive[2]


# ---- which layers -------------------------------------------------------------------------------


def test_groups() -> None:
    assert [list(g) for g in stream_groups(config_of(mhc_group_size=3))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]
    assert stream_groups(config_of()) == []
    chosen = config_of(mhc_group_size=0)
    one = replace(chosen.model, mhc=replace(chosen.model.mhc, streams=1))
    assert stream_groups(replace(chosen, model=one)) == []
    assert stream_groups(replace(chosen, train=TrainConfig(compile="aot_eager"))) == []
    places = places_in_groups(config_of(mhc_group_size=3))
    assert places[8] is None and [p.place for p in places if p] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [p.closes for p in places if p] == [False, False, True] * 2 + [False, True]


def test_groups_end_with_stages() -> None:
    config = config_of(mhc_group_size=100)
    model = replace(config.model, pattern="AEMR|FEAEM")
    config = replace(config, model=model, mesh=MeshConfig(pp=2))
    assert stream_groups(config) == [range(4), range(4, 8)]


def test_groups_end_behind_an_ngram_memory() -> None:
    config = config_of(mhc_group_size=100)
    memory = replace(config.model.engram, layers="1")  # the second A block
    found = stream_groups(replace(config, model=replace(config.model, engram=memory)))
    assert found == [range(7), range(7, 8)]  # of AEMRFEAEM, whose last layer is in none


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("layers", [1, 5, 24, 51])
def test_the_chosen_size_needs_fewest_numbers(streams: int, layers: int) -> None:
    """Among all, but for what rounding a size makes of it."""

    def most(size: int) -> float:
        return streams * layers / size + (streams + 1) * size

    best = min(most(size) for size in range(1, layers + 1))
    assert most(group_size(streams, layers)) <= 1.02 * best


def test_compiled_blocks_agree() -> None:
    """Compile A and F blocks to one graph each, connections inside; no group is recomputed."""
    eager = config_of(mhc_group_size=0)
    mhc = replace(eager.model.mhc, iterations=2)
    model = replace(eager.model, pattern="AF", depth=3, mhc=mhc)
    eager = replace(eager, model=model)
    found, counts, _ = run(replace(eager, train=TrainConfig(compile="aot_eager")), watched=False)
    expected = run(eager)[0]
    assert not counts
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()
