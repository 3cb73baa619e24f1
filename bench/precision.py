"""Effect of low precision on the loss of a small hybrid, compared with that of another seed.

    python -m bench.precision                     every variant, three seeds; then the table
    python -m bench.precision --only fp16         some of them, and what they are compared with
    python -m bench.precision --show              the table again, from docs/precision.json

    python -m bench.precision --again             also what is stored, instead of it

On a CPU, where bf16 and fp16 are computed as on a GPU up to the order of sums, and FP8 is rounded
to FP8 and multiplied wide. Each run is `train.py` in a process and a folder of its own; those in
the record are not run again, and it is written after each. A variant is compared with its
reference on the same seed: same rows, same order, same first weights. It is at parity when the mean
difference of held-out loss is at most twice the standard deviation of the fp32 runs over seeds:
then nobody could tell it from a run with another seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.variant_runs import ROOT, VariantRun, by_variant, trained

RECORD = ROOT / "docs/precision.json"
SEEDS, STEPS, TAIL = 3, 300, 50
BASE = "fp32"
# Every kind of block, those of FP8 between the two that it leaves alone; 0.7M parameters, so that
# all runs take half an hour on one core.
MODEL: dict[str, Any] = {
    "model.dim": 64,
    "model.depth": 6,
    "model.pattern": "RAEFEM",
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "model.attention.head_dim": 16,
    "model.moe.num_experts": 4,
    "model.moe.hidden_dim": 64,
    "model.moe.shared_hidden_dim": 64,
    "model.mlp.hidden_dim": 128,
    "model.mamba3.d_state": 16,
    "model.mamba3.headdim": 16,
    "model.mamba3.chunk_size": 32,
    "model.m2rnn.key_dim": 16,
    "data.seq_len": 64,
    "train.device_batch_size": 4,
    "optim.name": "adamw",
}
FP8: dict[str, Any] = {
    "precision.dtype": "bf16",
    "precision.fp8": "torchao",
    "precision.fp8_ends": 1,
}


@dataclass(frozen=True)
class Variant:
    """Settings, and the variant that it is compared with (empty: none)."""

    settings: dict[str, Any]
    reference: str = BASE


VARIANTS: dict[str, Variant] = {
    BASE: Variant({"precision.dtype": "fp32"}, ""),
    "bf16": Variant({"precision.dtype": "bf16"}),
    "fp8": Variant(FP8, "bf16"),
    "adamw 8bit": Variant({"precision.dtype": "fp32", "optim.adamw_state": "8bit"}),
    "adamw 4bit": Variant({"precision.dtype": "fp32", "optim.adamw_state": "4bit"}),
    "fp16": Variant({"precision.dtype": "fp16", "precision.loss_scale_growth": 100}),
}


class PrecisionRun(VariantRun):
    """Training run of one variant and seed."""

    RUNS = ROOT / "runs/precision"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the variant."""
        return MODEL | VARIANTS[self.variant].settings

    def figures(self, steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
        """Return held-out loss, the loss of each step, the loss scale and the time of a step."""
        return {
            "held_out": last["loss"],
            "losses": [round(step["loss"], 5) for step in steps],
            "loss_scales": [steps[0].get("loss_scale"), steps[-1].get("loss_scale")],
            "step_s": statistics.median(step["step_s"] for step in steps),
        }


def plan(options: argparse.Namespace) -> list[PrecisionRun]:
    """Return the runs of the base, whose seeds give the bound, then the others seed by seed."""
    names = list(VARIANTS)
    if options.only:
        wanted = {BASE, *options.only}
        wanted |= {VARIANTS[name].reference for name in wanted} - {""}
        names = [name for name in names if name in wanted]
    runs = [PrecisionRun(v, s, options.steps) for s in range(1, options.seeds + 1) for v in names]
    return sorted(runs, key=lambda run: run.variant != BASE)


def stored(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return runs of the record, unless it is of another machine, library or length."""
    if not options.record.exists():
        return []
    record = json.loads(options.record.read_text())
    if any(record[key] != value for key, value in _made_with(options).items()):
        return []
    return record["runs"]


def _made_with(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "torchao": version("torchao"),
        "steps": options.steps,
    }


def in_order(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort runs by variant, as listed, and by seed."""
    names = list(VARIANTS)
    return sorted(runs, key=lambda run: (names.index(run["variant"]), run["seed"]))


def measure(options: argparse.Namespace) -> None:
    """Run all requested variants one after another; the record is written after each."""
    known = {(run["variant"], run["seed"]): run for run in stored(options)}
    runs = plan(options)
    if not options.again:
        runs = [run for run in runs if (run.variant, run.seed) not in known]
    words = lambda run: f"held-out loss {run['held_out']:.4f}  {run['wall_s']:.0f} s"  # noqa: E731
    for figures in trained(runs, words):
        known[figures["variant"], figures["seed"]] = figures
        made = _made_with(options) | {"tokens": figures["tokens"]}
        record = made | {"runs": in_order(list(known.values()))}
        options.record.write_text(json.dumps(record) + "\n")


@dataclass(frozen=True)
class PrecisionLine:
    """Comparison of a variant with its reference, seed by seed.

    Attributes:
        held_out: mean held-out loss in nats a token, over seeds.
        difference: its mean difference from the reference's (None: it has none).
        bound: twice the standard deviation of the fp32 runs over seeds.
        apart: largest difference between losses of a step, in means of TAIL steps.
    """

    variant: str
    reference: str
    seeds: int
    held_out: float
    difference: float | None
    bound: float
    apart: float
    skipped: int

    @property
    def verdict(self) -> str:
        """Text: parity or apart."""
        if self.difference is None:
            return ""
        return "parity" if abs(self.difference) <= self.bound else "apart"


def lines_of(record: dict[str, Any]) -> list[PrecisionLine]:
    """Return the table's lines from a record."""
    of = by_variant(record)
    bound = seed_bound(record)
    found = []
    for variant, runs in of.items():
        reference = VARIANTS[variant].reference
        pairs = [(run, of[reference][seed]) for seed, run in runs.items() if reference]
        apart = [abs(a - b) for x, y in pairs for a, b in zip(smooth(x), smooth(y), strict=True)]
        differences = [x["held_out"] - y["held_out"] for x, y in pairs]
        found.append(
            PrecisionLine(
                variant,
                reference,
                len(runs),
                statistics.mean(run["held_out"] for run in runs.values()),
                statistics.mean(differences) if differences else None,
                bound,
                max(apart, default=0.0),
                sum(run["skipped"] for run in runs.values()),
            )
        )
    return found


def seed_bound(record: dict[str, Any]) -> float:
    """Return twice the standard deviation of held-out loss over seeds, in fp32."""
    losses = [run["held_out"] for run in record["runs"] if run["variant"] == BASE]
    return 2 * statistics.stdev(losses) if len(losses) > 1 else float("nan")


def smooth(run: dict[str, Any]) -> list[float]:
    """Return means of TAIL steps (of all, if there are fewer)."""
    losses = run["losses"]
    size = min(TAIL, len(losses))
    return [statistics.mean(losses[i : i + size]) for i in range(0, len(losses) - size + 1, size)]


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    rows = [
        "| run | against | seeds | held-out loss | difference | bound | "
        "| most in training | skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines_of(record):
        compared = ["", "", ""]
        if line.difference is not None:
            compared = [f"{line.difference:+.4f}", f"{line.bound:.4f}", line.verdict]
        rows.append(
            f"| {line.variant} | {line.reference} | {line.seeds} | {line.held_out:.4f} "
            f"| {' | '.join(compared)} | {line.apart:.4f} | {line.skipped} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="some variants")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default {SEEDS}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the figures")
    parser.add_argument("--again", action="store_true", help="run what is stored as well")
    parser.add_argument("--show", action="store_true", help="the table of the file, no runs")
    options = parser.parse_args()
    if not options.show:
        measure(options)
    print(table(json.loads(options.record.read_text())))


if __name__ == "__main__":
    main()
