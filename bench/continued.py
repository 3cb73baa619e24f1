"""Continued training of a small model: other text, a second schedule, longer rows, more ids.

    python -m bench.continued                     all runs, one after another; then the figures
    python -m bench.continued --only corpus ids   some of the experiments
    python -m bench.continued --show              the figures again, from docs/continued.json

Text is torch's: its C++ headers, and its Python files as the other corpus. Each run is `train.py`
in a process and a folder of its own (runs/continued); finished ones are not run again, and the
record is written after each. All runs of one seed begin with the same weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.variant_runs import ROOT, VariantRun, made_with, trained

RECORD, HOME = ROOT / "docs/continued.json", ROOT / "runs/continued"
IDS, NEW_IDS = 1024, 64
EVAL_ROWS = 128
ROW, LONG, PLACES = 128, 512, 16  # tokens of a row, of a longer one, and its parts
MODEL: dict[str, Any] = {
    "model.pattern": "AF",
    "model.depth": 4,
    "model.dim": 64,
    "model.vocab_size": IDS,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "model.attention.head_dim": 16,
    "model.attention.rope_theta": 10_000,
    "model.mlp.hidden_dim": 128,
    "data.seq_len": ROW,
    "train.device_batch_size": 16,
    "precision.dtype": "fp32",
    "optim.schedule": "cosine",
    "optim.warmup_steps": 12,
    "run.eval_every": 20,
}
GENTLE: dict[str, Any] = {"optim.lr": 1.5e-3, "optim.muon_lr": 5e-3}  # half of the first peak
YARN: dict[str, Any] = {
    "model.attention.yarn.factor": LONG // ROW,
    "model.attention.yarn.original_seq_len": ROW,
    "model.attention.max_seq_len": LONG,
}
# With this base, pair 3 of 8 (theta ** (-3 / 8) radians a token, the fastest that turns less than
# once in a row) turns as far in a longer row as it did in a row, and slower pairs less far.
THETA: dict[str, Any] = {
    "model.attention.rope_theta": round(10_000 * (LONG / ROW) ** (8 / 3)),
    "model.attention.max_seq_len": LONG,
}
LONG_ROWS: dict[str, Any] = {"data.seq_len": LONG, "train.device_batch_size": 16 * ROW // LONG}
AS_IT_IS: dict[str, Any] = {"optim.warmup_steps": 0}  # of a run without a step
GROWN: dict[str, Any] = {"model.vocab_size": IDS + NEW_IDS}
BOTH = "headers=1,python=1"


@dataclass(frozen=True)
class ContinuedPart:
    """Run of an experiment.

    Attributes:
        steps: last step; one that goes on from a checkpoint counts on from there.
        data: sources and their shares.
        settings: further settings.
        begins: run whose final weights it begins with.
        goes_on: run whose last checkpoint it goes on from.
    """

    steps: int
    data: str
    settings: dict[str, Any] = field(default_factory=dict)
    begins: str = ""
    goes_on: str = ""


def _stable(steps: int, before: str = "") -> ContinuedPart:
    return ContinuedPart(steps, OLD, {"optim.schedule": "constant"}, goes_on=before)


def _tail(steps: int, before: str) -> ContinuedPart:
    return ContinuedPart(
        steps, OLD, {"optim.schedule": "wsd", "optim.decay_ratio": 0.2}, goes_on=before
    )


OLD, NEW = "headers=1,python=0", "headers=0,python=1"
BASE: dict[str, ContinuedPart] = {"base": ContinuedPart(320, OLD)}
EXPERIMENTS: dict[str, dict[str, ContinuedPart]] = {
    "corpus": {
        "python": ContinuedPart(160, NEW, GENTLE, "base"),
        "python, 10% rehearsal": ContinuedPart(160, "headers=1,python=9", GENTLE, "base"),
        "python, 25% rehearsal": ContinuedPart(160, "headers=1,python=3", GENTLE, "base"),
        "python from scratch": ContinuedPart(160, NEW),
    },
    "schedule": {
        "cosine 80": ContinuedPart(80, OLD),
        "cosine 160": ContinuedPart(160, OLD),
        "stable 64": _stable(64),
        "stable 128": _stable(128, "stable 64"),
        "stable 256": _stable(256, "stable 128"),
        "tail 80": _tail(80, "stable 64"),
        "tail 160": _tail(160, "stable 128"),
        "tail 320": _tail(320, "stable 256"),
    },
    "rows": {
        "yarn 0": ContinuedPart(0, OLD, YARN | LONG_ROWS | AS_IT_IS, "base"),
        "yarn 60": ContinuedPart(60, OLD, YARN | LONG_ROWS | GENTLE, "base"),
        "theta 0": ContinuedPart(0, OLD, THETA | LONG_ROWS | AS_IT_IS, "base"),
        "theta 60": ContinuedPart(60, OLD, THETA | LONG_ROWS | GENTLE, "base"),
        "long 60": ContinuedPart(60, OLD, LONG_ROWS | GENTLE, "base"),
    },
    "ids": {
        "grown": ContinuedPart(0, BOTH, GROWN | AS_IT_IS, "base"),
        "grown 0": ContinuedPart(0, "grown=1", GROWN | AS_IT_IS, "base"),
        "grown 100": ContinuedPart(100, "grown=1", GROWN | GENTLE, "base"),
        "as it was 100": ContinuedPart(100, "python=1", GENTLE, "base"),
    },
}
PARTS = {name: part for parts in (BASE, *EXPERIMENTS.values()) for name, part in parts.items()}


def folder_of(name: str, seed: int) -> Path:
    """Return the folder of a run."""
    return ContinuedRun(name, seed, 0).folder


class ContinuedRun(VariantRun):
    """Run of one part and seed."""

    RUNS = HOME

    def settings(self) -> dict[str, Any]:
        """Return the settings of the part."""
        part = PARTS[self.variant]
        found = MODEL | part.settings | {"data.path": HOME / "data/headers", "data.mix": part.data}
        if part.begins:
            found["checkpoint.init"] = folder_of(part.begins, self.seed)
        if part.goes_on:
            steps = PARTS[part.goes_on].steps
            saved = folder_of(part.goes_on, self.seed) / f"checkpoints/step-{steps:06d}"
            found["checkpoint.resume"] = saved
        return found

    def figures(self, steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
        """Return held-out loss by source of each evaluation, and the last bits per byte."""
        lines = (self.folder / "evaluations.jsonl").read_text().splitlines()
        seen = {one["step"] + 1: one["val_loss"] for one in map(json.loads, lines)}
        return {"held_out": sorted(seen.items()), "bits_per_byte": last["bits_per_byte"]}


def prepare() -> None:
    """Prepare three corpora: headers, Python with their tokenizer, and with a grown one."""
    from megacpp.data.prepare import ensure_corpus
    from megacpp.data.sources import torch_headers
    from megacpp.data.spec import CorpusSpec
    from megacpp.lessons.grown import grow_tokenizer

    data, headers = HOME / "data", torch_headers()
    python, part = headers.parent / "nn", 0.1  # the part that is held out
    ensure_corpus(
        CorpusSpec(str(headers / "c10"), vocab_size=IDS, validation_fraction=part), data / "headers"
    )
    texts = (path.read_text() for path in sorted(python.rglob("*.py")))
    grow_tokenizer(data / "headers", texts, data / "words", NEW_IDS)
    for name, words in (("python", data / "headers"), ("grown", data / "words")):
        ensure_corpus(
            CorpusSpec(str(python), tokenizer=str(words), validation_fraction=part), data / name
        )


def measure(options: argparse.Namespace) -> None:
    """Run the requested experiments; the record is written after each run."""
    prepare()
    wanted = dict(BASE)
    for name in options.only or EXPERIMENTS:
        wanted |= EXPERIMENTS[name]
    seeds = range(1, options.seeds + 1)
    plan = [ContinuedRun(n, s, PARTS[n].steps, EVAL_ROWS) for s in seeds for n in wanted]
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    made = made_with()
    if record.get("torch") != made["torch"]:
        record = {}
    known = {(run["variant"], run["seed"]): run for run in record.get("runs", ())}
    for figures in trained(plan, lambda run: _words(run["held_out"][-1][1])):
        known[figures["variant"], figures["seed"]] = figures
        record = made | {
            "runs": list(known.values()),
            "token_losses": record.get("token_losses", {}),
        }
        write(options.record, record)
    for name, found in token_figures(options.only or list(EXPERIMENTS), seeds).items():
        record["token_losses"][name] = found
    write(options.record, record)


def _words(losses: dict[str, float]) -> str:
    return "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


def token_figures(experiments: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Return losses by place in a longer row, and of known and new ids, for each seed."""
    from megacpp.cli.weights import load_model
    from megacpp.lessons.token_losses import loss_by_place, loss_of_ids

    found: dict[str, Any] = {}
    if "rows" in experiments:
        for name in ("base", *EXPERIMENTS["rows"]):
            models = (load_model(folder_of(name, seed), "final", "cpu") for seed in seeds)
            corpus = HOME / "data/headers"
            found[f"{name}, by place"] = [loss_by_place(m, corpus, LONG, PLACES) for m in models]
    if "ids" in experiments:
        for name in ("grown 0", "grown 100"):
            models = (load_model(folder_of(name, seed), "final", "cpu") for seed in seeds)
            corpus = HOME / "data/grown"
            found[f"{name}, known and new ids"] = [loss_of_ids(m, corpus, ROW, IDS) for m in models]
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record, with losses to four decimals."""
    rounded = json.loads(json.dumps(record), parse_float=lambda text: round(float(text), 4))
    path.write_text(json.dumps(rounded) + "\n")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), help="some experiments")
    parser.add_argument("--seeds", type=int, default=1, help="default 1")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the figures")
    parser.add_argument("--show", action="store_true", help="the figures of the file, no runs")
    options = parser.parse_args()
    if not options.show:
        measure(options)
    record = json.loads(options.record.read_text())
    for run in record["runs"]:
        print(f"{run['variant']:20} seed {run['seed']}  {_words(run['held_out'][-1][1])}")
    for name, seeds in record["token_losses"].items():
        for losses in seeds:
            print(f"{name}:", *(f"{loss:.2f}" for loss in losses))


if __name__ == "__main__":
    main()
