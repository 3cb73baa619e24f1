"""Held-out rows that divide unevenly: over batches, over ranks, or both. Each counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacpp.config.schema import Config, RunConfig, TrainConfig
from megacpp.data.corpus import Corpus
from megacpp.run.evaluate import evaluate, validation_share
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from tests.figures import Record
from tests.model.small import small

SEQ = 32
# Rows to evaluate (0: all), rows of a batch, ranks.
UNEVEN = [(7, 2, 1), (7, 2, 2), (7, 3, 2), (1, 2, 3), (5, 1, 4), (8, 2, 2), (0, 4, 1), (0, 3, 2)]


@pytest.fixture(scope="module")
def held_out(corpus: Path) -> Corpus:
    found = Corpus(corpus, SEQ, seed=0)
    assert found.num_validation_rows > 8
    return found


def config_of(rows: int, device_batch: int) -> Config:
    model = replace(small("AF"), vocab_size=400, depth=2)
    return Config(
        model=model,
        run=RunConfig(eval_rows=rows),
        train=TrainConfig(device_batch_size=device_batch),
        precision=replace(Config(model=model).precision, dtype="fp64"),
    )


@pytest.mark.parametrize(("rows", "device_batch", "ranks"), UNEVEN)
def test_every_row_is_on_one_rank_once(
    held_out: Corpus, rows: int, device_batch: int, ranks: int, record_property: Record
) -> None:
    config, past = config_of(rows, device_batch), held_out.num_validation_rows
    shares = [validation_share(held_out, config, rank, ranks) for rank in range(ranks)]
    wanted = min(rows or past, past)
    assert len({len(share) for share in shares}) == 1, "ranks meet in every batch"
    assert all(len(b.rows) == device_batch for share in shares for b in share)
    found = sorted(row for share in shares for b in share for row in b.rows if row < past)
    assert found == list(range(wanted))
    for share in shares:
        for batch in share:
            assert (batch.num_targets > 0) == any(row < wanted for row in batch.rows)
    record_property("uneven shares of held-out rows, each counted once", 1)


def test_the_loss_of_uneven_rows_is_that_of_the_rows_one_by_one(
    held_out: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 to 6 alone, in batches of 2 and of 3, and on three ranks: the same sums in fp64."""
    torch.manual_seed(0)
    model = build_model(config_of(7, 1), World(0, 1, torch.device("cpu")))
    boundary = AccumulationBoundary(model, World(0, 1, torch.device("cpu")), config_of(7, 1))
    with torch.no_grad():
        alone = [held_out.validation_batch([row]) for row in range(7)]
        nll = [model(b.ids_BT, b.labels_BT, b.docs).nll_sum.item() for b in alone]
    targets, text = sum(b.num_targets for b in alone), sum(b.target_bytes for b in alone)
    assert targets > 0 and nll[-1] > 0, "the last row counts"
    for device_batch, ranks in ((1, 1), (2, 1), (3, 1), (2, 3)):
        config = config_of(7, device_batch)
        sums = [
            boundary.evaluate(validation_share(held_out, config, rank, ranks))
            for rank in range(ranks)
        ]
        assert sum(s.valid_tokens for s in sums) == targets
        assert sum(s.target_bytes for s in sums) == text
        assert sum(s.nll_sum.item() for s in sums) == pytest.approx(sum(nll), rel=1e-12)
    values = evaluate(
        boundary.evaluate, validation_share(held_out, config_of(7, 2), 0, 1), held_out
    )
    assert values["loss"] == pytest.approx(sum(nll) / targets, rel=1e-12)
    assert values["target_bytes"] == text and values["complete"] == 0
    assert values["xz_bits_per_byte"] == held_out.xz_bits_per_byte()
    monkeypatch.setitem(held_out.index["splits"]["validation"], "xz_bits_per_byte", None)
    assert "xz_bits_per_byte" not in evaluate(boundary.evaluate, [], held_out)
