"""`train.py` as a whole, every wire live, against a composition by hand.

One table: what the run has, and on which mesh. Each run is stopped in the middle by SIGTERM after a
step that was left out, and goes on in new processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megacpp.config.arguments import parse_run
from megacpp.data.corpus import Corpus
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.state.export import export_weights
from tests.launch import Done, forked
from tests.test_run import records
from tests.wiring.composition import Composed, composed
from tests.wiring.faults import going_wrong, without_labels

SMALL = (
    "--model.dim 32 --model.depth 4 --model.pattern AEAF --model.vocab-size 400"
    " --model.attention.num-heads 4 --model.attention.num-kv-heads 2 --model.attention.head-dim 8"
    " --model.attention.qk-norm false --model.moe.num-experts 4 --model.moe.hidden-dim 16"
    " --model.moe.shared-hidden-dim 16 --model.mlp.hidden-dim 32 --model.tie-embeddings true"
    " --data.seq-len 32 --run.steps 9 --run.eval-rows 7 --run.eval-every 4 --run.sample-tokens 0"
    " --checkpoint.every 2 --checkpoint.keep 3 --train.tokens-per-step 256 --optim.name adamw"
    " --optim.schedule cosine --optim.warmup-steps 3 --optim.lr 0.01 --optim.clip-norm 0.3"
    " --optim.qk-clip 0.02 --run.tensorboard false"
).split()
FP64 = ["--precision.dtype", "fp64"]
AHEAD = "--model.mtp.depths 2 --model.mtp.loss-final 0.1 --model.mtp.switch 0.5".split()
# A scale that overflows, and doubles after two good steps.
FP16 = (
    "--precision.dtype fp16 --precision.loss-scale 1048576 --precision.loss-scale-growth 2".split()
)
STEPS, BAD, TOLD, ROWS = 9, 3, 5, 8
EVERY, KEEP = 2, 3  # checkpoints


@dataclass(frozen=True)
class Case:
    """Run of the table.

    Attributes:
        name: of the flags.
        mesh: flags of the mesh.
        ranks: number of ranks.
        rank: rank whose gradient is NaN in step `BAD`.
        device_batch: rows of a microbatch on a data rank.
    """

    name: str
    mesh: str = ""
    ranks: int = 1
    rank: int = 0
    device_batch: int = 4

    def __str__(self) -> str:
        return f"{self.name} {self.mesh or 'one process'}"


FLAGS = {
    "fp64": [*FP64, *AHEAD],
    "no labels": [*FP64, *"--train.grad-accum 2 --train.batch-warmup-steps 3".split()],
    "fp16": FP16,
    # Two axes shard a matrix, on some of the ranks: a step has to find the group of these.
    "muon": [*FP64, *"--optim.name muon_adamw".split()],
    # Sums over ranks have another order, so other steps would overflow: only the NaN halves it.
    "fp16, no overflow": [*FP16, *"--precision.loss-scale 1024 --optim.lr 1e-4".split()],
}
CASES = [
    Case("fp64"),
    Case("muon", "--mesh.pp 2 --mesh.tp 2 --mesh.dp-replicate 2 --mesh.dp-shard 1", 8, 1, 2),
    Case("no labels"),
    Case("fp16"),
    Case("fp64", "--mesh.pp 2", 2),
    Case("fp64", "--mesh.dp-shard 2", 2, 1, 2),
    Case("fp64", "--mesh.dp-replicate 2 --mesh.dp-shard 1", 2, 1, 2),
    Case("fp64", "--mesh.tp 2", 2, 1),
    Case("fp64", "--mesh.cp 2", 2, 1),
    Case("fp64", "--mesh.ep 2 --mesh.tp 2 --mesh.dp-shard 1", 2, 1),
    Case("no labels", "--mesh.dp-shard 2", 2, 1, 2),
    Case("fp16, no overflow", "--mesh.dp-shard 2", 2, 1, 2),
]
# fp64: sums in another order. fp16: the same roundings on one process; on ranks others, four of
# 2^-10 in a maximum. AdamW's first updates are signs of gradients, of which small ones flip: a rate
# of 1e-4 keeps such flips below the roundings. A lost scale is off by 1,024.
LIMITS = {
    "fp64": 1e-10,
    "no labels": 1e-10,
    "muon": 1e-10,
    "fp16": 1e-5,
    "fp16, no overflow": 2.0**-8,
}


def flags_of(name: str) -> list[str]:
    # Attention's core runs again, which also spares the header's estimate of what that would free.
    recompute = "--gradient-checkpointing false --recompute.core-attn true".split()
    return [*SMALL, *FLAGS[name], *recompute, "--train.device", "cpu"]


@functools.cache
def first_weights(corpus: Path) -> list[str]:
    """Return the flags of a run that starts from weights of another seed."""
    final = corpus.with_name("first") / "final"
    model = HybridLM(parse_run(["tiny", *SMALL], 1).config.model)
    initialise(model, model.init_rules(), 7)
    export_weights(model, final, model.config, beside=(corpus / "tokenizer.json",))
    return ["--checkpoint.init", str(final)]


def words_of(case: str, corpus: Path) -> list[str]:
    first = first_weights(corpus) if case == "no labels" else []
    return ["tiny", *flags_of(case), *first, "--data.path", str(corpus)]


@functools.cache
def by_hand(name: str, corpus: Path) -> Composed:
    words = words_of(name, corpus)
    config = parse_run([*words, "--train.device-batch-size", "4"], 1).config
    with without_labels(labels_of(name)):
        return composed(config, Corpus(corpus, config.data.seq_len), {BAD})


def labels_of(name: str) -> range:
    """Training rows without labels, of one or two steps before the last."""
    if name == "fp16":  # two good steps would double its scale
        return range((STEPS - 3) * ROWS, (STEPS - 1) * ROWS)
    if name == "no labels":  # its first two steps have half of the rows
        return range((STEPS - 3) * ROWS, (STEPS - 2) * ROWS)
    return range(0)


def run(case: Case, corpus: Path, folder: Path, first: int) -> Done:
    paths = ["--run.dir", str(folder), *case.mesh.split()]
    batch = ["--train.device-batch-size", str(case.device_batch)]
    wrong = {"nan": {BAD}, "rank": case.rank, "told": None if first else TOLD}
    taken = [row["grad_accum"] for row in by_hand(case.name, corpus).rows[first:]]
    with without_labels(labels_of(case.name)), going_wrong(taken, first, **wrong):
        return forked(*words_of(case.name, corpus), *paths, *batch, ranks=case.ranks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_is_its_composition(case: Case, corpus: Path, tmp_path: Path) -> None:
    expected, folder = by_hand(case.name, corpus), tmp_path / "run"
    stopped = run(case, corpus, folder, 0)
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    left_out = f"step {BAD + 1}: left out: "
    (line,) = [line for line in stopped.stdout.splitlines() if left_out in line]
    assert f"rank {case.rank}: " in line, "whose gradient was NaN"
    assert f"rank {1 - case.rank}: " not in line
    done = run(case, corpus, folder, TOLD + 1)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, limit = records(folder), LIMITS[case.name]
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row, want in zip(rows, expected.rows, strict=True):
        for key, value in want.items():
            same(row.get(key), value, limit, (row["step"], key))
    evaluated = [json.loads(x) for x in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluated] == [*expected.held_out] and len(evaluated) == 3
    for one, want in zip(evaluated, expected.held_out.values(), strict=True):
        same(one["loss"], want, limit, ("held out", one["step"]))
    # AdamW divides by a root of v: where v is small, roundings of a gradient show in a weight.
    limit = max(10 * limit, 2.0**-22)
    weights = load_file(folder / "final/model.safetensors")
    for name, want in expected.weights.items():
        if name in weights:
            off = (weights[name].double() - want.double()).abs().max() / want.abs().max()
            assert off < limit, (name, off)
    assert expected.weights.keys() - weights.keys() <= {"head.weight"}, "tied"
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert kept == saved(expected.rows)
    peaks = json.loads((folder / "memory/summary.json").read_text())["peak_resident_bytes"]
    assert len(peaks) == case.ranks and min(peaks) > 0, "memory of every rank"


def saved(rows: list[dict[str, Any]]) -> list[str]:
    """Return what is kept: no save in a streak of bad steps, one when told to stop and at the end.

    One in a streak isn't counted among those that are kept.
    """
    kept: list[tuple[int, bool]] = []  # newest first: steps, and whether no bad ones led there
    streak = 0
    for done, row in enumerate(rows, 1):
        if row["valid_tokens"]:  # a step without a label neither goes on with it nor ends it
            streak = streak + 1 if row["skipped"] else 0
        if done in (TOLD + 1, STEPS) or (done % EVERY == 0 and not streak):
            kept.insert(0, (done, not streak))
            sound = [place for place, (_, whole) in enumerate(kept, 1) if whole]
            del kept[sound[KEEP - 1] if len(sound) >= KEEP else len(kept) :]
    return [f"step-{step:06}" for step, _ in reversed(kept)]


def same(found: Any, want: Any, limit: float, where: Any) -> None:
    if isinstance(want, float) and math.isfinite(want):
        assert found == pytest.approx(want, rel=limit), where
    else:
        assert found == want, where


def test_a_sanitized_step_updates_and_is_not_saved(corpus: Path, tmp_path: Path) -> None:
    paths = ["--data.path", str(corpus), "--run.dir", str(tmp_path)]
    flags = "--train.device-batch-size 4 --train.nonfinite sanitize --checkpoint.keep 0".split()
    with going_wrong([2] * 2 * EVERY, nan={EVERY - 1}):
        done = forked("tiny", *flags_of("fp64"), *paths, *flags, "--run.steps", str(2 * EVERY))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["skipped"] for row in records(tmp_path)] == [False] * 2 * EVERY
    kept = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert kept == [f"step-{2 * EVERY:06}"]


def test_the_table_has_every_wire(corpus: Path) -> None:
    """Each of these would be a dead wire otherwise."""
    ahead, labels, half = (by_hand(name, corpus) for name in ("fp64", "no labels", "fp16"))
    for found in (ahead, labels, half):
        norms = [row["grad_norm"] for row in found.rows if "grad_norm" in row]
        assert max(norms) > 0.3, "clipped"
        assert all(torch.isfinite(w).all() for w in found.weights.values())
    assert [row["skipped"] for row in ahead.rows].count(True) == 1
    assert [row["valid_tokens"] for row in labels.rows].count(0) == 1
    assert any(row.get("max_logit", 0) > 0.02 for row in ahead.rows), "queries and keys shrink"
    scales = [row["loss_scale"] for row in half.rows]
    assert len(set(scales)) > 2 and any(b > a for a, b in itertools.pairwise(scales))
    assert [row["skipped"] for row in half.rows].count(True) > 1, "an overflow, too"
