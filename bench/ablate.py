"""Ablation of the tiny hybrid's features: bits per byte, speed, memory.

    python -m bench.ablate                     every feature, three seeds; then the tables
    python -m bench.ablate --only mtp mhc      some of them, and the base
    python -m bench.ablate --show              the tables again, from docs/ablation.json
    python -m bench.ablate --only mimo --steps 200 --record docs/mimo.json      and its curve

Each run reads the same tokens in the same order as the base of its seed, from the same weights
where the two models have the same ones, so differences are taken seed by seed. A run is `train.py`
in a process and a folder of its own; finished ones are not run again. Bits per byte are of the
held-out rows. Memory is the traced peak of tensors of a step, which doesn't depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.variant_runs import ROOT, VariantRun, by_variant, trained, words
from megacpp.config.arguments import flatten
from megacpp.config.presets import TINY_FEATURES, tiny, tiny_full
from megacpp.config.schema import ModelConfig

RECORD = ROOT / "docs/ablation.json"
BASE, ALL, MIMO = "base", "all", "mimo"
SEEDS, STEPS, EVAL_ROWS = 3, 50, 64
SHARED = 96  # width of the shared expert beside MIMO: as many parameters as the base, to 0.04 %
WARM = 5  # steps that are left out of the speed
PARTS = 10  # of a run, each with its mean loss: the curve
# Student's t for a two-sided 95 % interval of the mean, by number of pairs.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


class AblationRun(VariantRun):
    """Training run of one variant and seed."""

    RUNS = ROOT / "runs/ablation"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the variant."""
        return flags_of(self.variant)

    def figures(self, steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
        """Return held-out bits per byte and loss, speed, and the curve."""
        return {
            "bits_per_byte": last["bits_per_byte"],
            "loss": last["loss"],
            "tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps[WARM:]),
            "losses": curve_of([step["loss"] for step in steps]),
        }


def variants() -> list[str]:
    """Return the base, each feature alone, and all together; `mimo` is compared apart."""
    return [BASE, *TINY_FEATURES, ALL]


def model_of(variant: str) -> ModelConfig:
    """Return the model settings of a variant."""
    if variant == ALL:
        return tiny_full().model
    base = tiny().model
    if variant == MIMO:
        return _mimo(base)
    return base if variant == BASE else TINY_FEATURES[variant](base)


def _mimo(model: ModelConfig) -> ModelConfig:
    """Return the model with rank 4, two groups, and a shared expert that pays for B and C."""
    mamba3 = replace(model.mamba3, mimo_rank=4, chunk_size=16, ngroups=2)
    return replace(model, mamba3=mamba3, moe=replace(model.moe, shared_hidden_dim=SHARED))


def flags_of(variant: str) -> dict[str, Any]:
    """Return the settings in which the variant differs from the base."""
    base = tiny()
    before = flatten(base)
    after = flatten(replace(base, model=model_of(variant)))
    return {key: value for key, value in after.items() if value != before[key]}


def curve_of(losses: list[float]) -> list[float]:
    """Return the mean loss of each tenth of a run."""
    cuts = [len(losses) * part // PARTS for part in range(PARTS + 1)]
    return [statistics.mean(losses[start:end]) for start, end in pairwise(cuts) if end > start]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all variants, seed by seed, so that slow hours affect all variants alike."""
    names = [BASE, *(v for v in options.only if v != BASE)] if options.only else variants()
    plan = [
        AblationRun(variant, seed, options.steps, options.eval_rows)
        for seed in range(1, options.seeds + 1)
        for variant in names
    ]
    runs = list(trained(plan, _words, options.jobs))
    return {
        "machine": f"{platform.processor() or platform.machine()}, {options.jobs} runs at a time",
        "torch": version("torch"),
        "steps": options.steps,
        "tokens": runs[0]["tokens"],
        "eval_rows": options.eval_rows,
        "models": {name: model_figures(name) for name in names},
        "runs": runs,
    }


def _words(run: dict[str, Any]) -> str:
    return f"{run['bits_per_byte']:.4f} bits per byte  {run['tokens_per_s']:,.0f} tok/s"


def model_figures(variant: str) -> dict[str, int]:
    """Return parameters, FLOPs a token, and peak bytes of a step."""
    from megacpp.cli.trace import trace_step
    from megacpp.config.arguments import parse_run
    from megacpp.model.count import count_parameters
    from megacpp.model.flops import train_flops_per_token

    config = parse_run(["tiny", *words(flags_of(variant)), "--train.device=cpu"], 1).config
    count = count_parameters(config.model)
    return {
        "parameters": count.total,
        "active": count.active,
        "flops_per_token": round(train_flops_per_token(config.model, config.data.seq_len)),
        "peak_bytes": trace_step(config, 1).peak()[1],
    }


@dataclass(frozen=True)
class AblationLine:
    """Comparison of a variant with the base, seed by seed.

    Attributes:
        bits_per_byte: mean over seeds; `difference` from the base, `within` half of its 95 %
            interval (None: the base, or one seed).
        speed: tokens per second over the base's: median, least and most over seeds.
    """

    variant: str
    bits_per_byte: float
    difference: float
    within: float | None
    speed: tuple[float, float, float]
    figures: dict[str, int]

    @property
    def verdict(self) -> str:
        """Text about the interval: better, worse or within noise."""
        if self.within is None:
            return ""
        if abs(self.difference) <= self.within:
            return "within noise"
        return "better" if self.difference < 0 else "worse"


def lines_of(record: dict[str, Any]) -> list[AblationLine]:
    """Return the table's lines from a record."""
    of = by_variant(record)
    base, found = of[BASE], []
    for variant, runs in of.items():
        apart = [runs[s]["bits_per_byte"] - base[s]["bits_per_byte"] for s in sorted(runs)]
        speed = [runs[s]["tokens_per_s"] / base[s]["tokens_per_s"] for s in sorted(runs)]
        within = None
        if variant != BASE and len(apart) in STUDENT:
            within = STUDENT[len(apart)] * statistics.stdev(apart) / math.sqrt(len(apart))
        found.append(
            AblationLine(
                variant,
                statistics.mean(run["bits_per_byte"] for run in runs.values()),
                statistics.mean(apart),
                within,
                (statistics.median(speed), min(speed), max(speed)),
                record["models"][variant],
            )
        )
    return found


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    rows = [
        "| model | parameters | bits per byte | difference, 95 % | | tokens/s, of the base's "
        "| FLOPs/token | peak of a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = record["models"][BASE]
    for line in lines_of(record):
        own = line.figures
        apart = "" if line.within is None else f"{line.difference:+.4f} ± {line.within:.4f}"
        middle, least, most = line.speed
        rows.append(
            f"| {line.variant} | {own['parameters'] / 1e6:.2f}M | {line.bits_per_byte:.4f} "
            f"| {apart} | {line.verdict} | {middle:.2f} ({least:.2f} to {most:.2f}) "
            f"| {own['flops_per_token'] / first['flops_per_token']:.2f} "
            f"| {own['peak_bytes'] / 2**20:.0f} MiB |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*variants(), MIMO], help="variants beside the base"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default {SEEDS}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--eval-rows", type=int, default=EVAL_ROWS, help=f"default {EVAL_ROWS}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the figures")
    parser.add_argument("--show", action="store_true", help="tables of the file, no runs")
    options = parser.parse_args()
    if not options.show:
        options.record.write_text(json.dumps(measure(options), indent=1) + "\n")
    print(table(json.loads(options.record.read_text())))


if __name__ == "__main__":
    main()
