"""Continued training: commands of its runs, its records, and the token losses that they hold."""

from __future__ import annotations

import dataclasses
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.continued import EXPERIMENTS, PARTS, PLACES, RECORD, ContinuedRun
from bench.pictures.continued import vocabularies
from megacpp.config.arguments import parse_run
from megacpp.data.corpus import Corpus
from megacpp.lessons.models import small
from megacpp.lessons.token_losses import loss_by_place, loss_of_ids, token_losses
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise


@pytest.mark.parametrize("name", PARTS)
def test_the_command_of_a_run_is_legal(name: str) -> None:
    run = ContinuedRun(name, 1, PARTS[name].steps)
    folders = ("--checkpoint.init", "--checkpoint.resume")
    flags = [word for word in run.command()[2:] if not word.startswith(folders)]
    config = parse_run(flags, 1).config
    theta = 403_175 if name.startswith("theta") else 10_000
    assert config.run.steps == PARTS[name].steps and config.model.attention.rope_theta == theta
    before = [PARTS[n] for n in (PARTS[name].begins, PARTS[name].goes_on) if n]
    assert all(one.steps > 0 for one in before)


def test_a_tail_begins_where_its_stable_run_ends() -> None:
    for name, part in EXPERIMENTS["schedule"].items():
        if name.startswith("tail "):
            assert PARTS[part.goes_on].steps == part.steps - round(0.2 * part.steps)


def test_the_record_is_whole() -> None:
    record = json.loads(RECORD.read_text())
    assert {run["variant"] for run in record["runs"]} == PARTS.keys()
    for run in record["runs"]:
        part = PARTS[run["variant"]]
        first = PARTS[part.goes_on].steps if part.goes_on else 0
        assert run["tokens"] == (part.steps - first) * 16 * 128 and not run["skipped"]
        assert run["held_out"][-1][0] == part.steps
    assert all(record[key] for key in ("torch", "commit", "date", "machine"))
    places = {k: v[0] for k, v in record["token_losses"].items() if k.endswith("by place")}
    assert len(places) == 6 and {len(one) for one in places.values()} == {PLACES}


def test_the_record_shows_what_the_chapters_say() -> None:
    record = json.loads(RECORD.read_text())
    runs = {run["variant"]: run for run in record["runs"] if run["seed"] == 1}
    last = {name: run["held_out"][-1][1] for name, run in runs.items()}
    shares = [last[name] for name in ("python", "python, 10% rehearsal", "python, 25% rehearsal")]
    for less, more in pairwise(shares):  # more rehearsal keeps more, and learns less
        assert less["headers"] > more["headers"] > last["base"]["headers"]
        assert less["python"] < more["python"] < last["python from scratch"]["python"]
    behind = {
        name: statistics.mean(record["token_losses"][f"{name}, by place"][0][PLACES // 4 :])
        for name in ("base", *EXPERIMENTS["rows"])
    }
    assert behind["base"] > behind["long 60"] > behind["yarn 0"] > behind["yarn 60"]
    assert behind["base"] > behind["theta 0"] > behind["yarn 0"]
    assert behind["long 60"] > behind["theta 60"] > behind["yarn 60"]
    assert abs(last["grown"]["headers"] - last["base"]["headers"]) < 0.01
    (_, before), (_, after) = (
        record["token_losses"][f"{name}, known and new ids"][0] for name in ("grown 0", "grown 100")
    )
    assert after < before - 3
    as_it_was, grown = (points for _, points in vocabularies())
    for (step, less), (same_step, more) in zip(grown, as_it_was, strict=True):
        assert step == same_step and less < more
    bits = [runs[name]["bits_per_byte"] for name in ("grown 0", "grown 100", "as it was 100")]
    drawn = [grown[0][1], grown[-1][1], as_it_was[-1][1]]
    assert drawn == pytest.approx(bits, abs=1e-3)


def test_token_losses_are_those_of_the_model(corpus: Path) -> None:
    """Their sum is the loss of the model's own head; places and ids part the same tokens."""
    rows = Corpus(corpus, 64)
    num = rows.num_validation_rows
    model = HybridLM(dataclasses.replace(small("AF"), vocab_size=rows.vocab_size)).double()
    initialise(model, model.init_rules(), seed=1)
    model.eval()
    batch = rows.validation_batch(range(num))
    losses_BT = token_losses(model, batch)
    with torch.no_grad():
        own = model(batch.ids_BT, batch.labels_BT, batch.docs)
    assert torch.equal(losses_BT == 0, batch.labels_BT < 0)
    assert losses_BT.sum().item() == pytest.approx(own.nll_sum.item(), rel=1e-5)

    whole = (batch.labels_BT >= 0).all(1)
    assert 0 < whole.sum() < num  # some rows hold the end of a document
    places = loss_by_place(model, corpus, 64, 4, rows=num)
    wanted = losses_BT[whole].view(-1, 4, 16).mean((0, 2))
    assert places == pytest.approx(wanted.tolist(), rel=1e-5)

    known, new = loss_of_ids(model, corpus, 64, first=200, rows=num)
    labels_BT = batch.labels_BT
    old_BT = (labels_BT >= 0) & (labels_BT < 200)
    assert known == pytest.approx(losses_BT[old_BT].mean().item(), rel=1e-5)
    assert new == pytest.approx(losses_BT[labels_BT >= 200].mean().item(), rel=1e-5)
