"""Predict published training runs, and print how far each prediction is from the measurement.

    python -m bench.published [--rows FILE] [--json] [--points docs/published.json]

A row is a JSON object (bench/published.jsonl has one a line). Each goes through the time model of
our own runs (megacpp/speed/): operators, collectives, simulation. At most three constants per GPU
and software family are fitted, on the rows of `FITTED` alone; a family without such rows has 1.0,
the figures of hardware.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import parser_of
from bench.others import UnknownRowError
from bench.rows import family_of, machine_of, step_of
from megacpp.errors import ConfigError
from megacpp.speed.hardware import Rates
from megacpp.speed.step import StepTime, predict

ROWS = Path(__file__).with_name("published.jsonl")
FITTED = ("mpt-7b-", "mpt-13b-", "tt-8b-fsdp8-")
GRID = tuple(0.5 + 0.05 * n for n in range(19))
RANGED = ("torchtitan", "MosaicML")  # whose spread is the range of a prediction
HOLD = 0.02  # of the log of a constant, added to the error: one that rows don't decide stays 1


@dataclass(frozen=True)
class Compared:
    """Row with its prediction, or with the reason why there is none."""

    row: dict[str, Any]
    time: StepTime | None
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured step."""
        assert self.time is not None
        return self.time.step_s / float(self.row["step_s"])


Key = tuple[str, str]  # GPU, family


def key_of(row: dict[str, Any]) -> Key:
    """Return the GPU and the family whose constants a row has.

    Raises:
        UnknownRowError: the GPU isn't known.
    """
    return machine_of(row).name, family_of(row).name


def compare(row: dict[str, Any], constants: dict[Key, Rates]) -> Compared:
    """Return a row's prediction; a row that can't be predicted has a reason instead."""
    try:
        if not float(row.get("step_s") or 0) > 0:
            return Compared(row, None, reason="no measured step")
        step, machine, notes = step_of(row)
        rates = constants.get(key_of(row), Rates())  # 1.0: the figures of hardware.json
        return Compared(row, predict(step, machine, rates), tuple(notes))
    except UnknownRowError as error:
        return Compared(row, None, reason=str(error))
    except (ArithmeticError, LookupError, TypeError, ValueError, AssertionError) as error:
        return Compared(row, None, reason=f"{type(error).__name__}: {error}")


def fit(rows: Iterable[dict[str, Any]]) -> dict[Key, Rates]:
    """Return the constants of each GPU and family that has rows of `FITTED`."""
    groups: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if str(row.get("id")).startswith(FITTED) and compare(row, {}).time:
            groups[key_of(row)].append(row)
    return {key: _fitted(group) for key, group in groups.items()}


def _fitted(rows: Sequence[dict[str, Any]]) -> Rates:
    """Return the constants with the least mean error, by descent along each in turn."""
    steps = [(step_of(row), float(row["step_s"])) for row in rows]

    def error(rates: Rates) -> float:
        off = [abs(predict(s, m, rates).step_s / t - 1) for (s, m, _), t in steps]
        return statistics.fmean(off) + HOLD * sum(abs(x - 1) for x in rates)

    best = Rates()
    for _ in range(4):
        before = best
        for name in Rates._fields:
            best = min((best._replace(**{name: x}) for x in GRID), key=error)
        if best == before:
            break
    return best


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal ones share their mean rank."""
    return [(sum(v < x for v in values) + sum(v <= x for v in values) - 1) / 2 for x in values]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None: fewer than three values, or all equal."""
    if len(left) < 3:
        return None
    a, b = ranks(left), ranks(right)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(a, b)


def summary(found: Sequence[Compared]) -> dict[str, Any]:
    """Return rows, median, 90th percentile, worst and mean error, and the rank correlation."""
    shown = [one for one in found if one.time]
    off = sorted(abs(one.ratio - 1) for one in shown)
    if not off:
        return {"rows": 0}
    speeds = (
        [one.row["tokens_per_s_per_gpu"] for one in shown],
        [one.time.tokens_per_s for one in shown if one.time],
    )
    return {
        "rows": len(off),
        "median": statistics.median(off),
        "p90": off[min(len(off) - 1, int(0.9 * len(off)))],
        "worst": off[-1],
        "bias": statistics.fmean(one.ratio - 1 for one in shown),
        "rank_correlation": rank_correlation(*speeds),
    }


def source_of(row: dict[str, Any]) -> str:
    """Return the source without its release."""
    words = str(row.get("source") or "unknown").split()
    return " ".join(words[:2]) if words[0] in ("SimuMax", "Llama", "Megatron") else words[0]


def layouts(found: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """Return summaries of layouts of one model on the same GPUs, where there are five or more."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        m, row = one.row.get("model") or {}, one.row
        name = f"{source_of(row)} {m.get('name')} on {row.get('gpus')} x {row.get('gpu')}"
        groups[f"{name}, rows of {m.get('seq')}"].append(one)
    return {name: summary(group) for name, group in groups.items() if len(group) >= 5}


def measured_range(found: Sequence[Compared]) -> list[float] | None:
    """Return the bounds of four of five measured over predicted steps, of rows with overlap.

    These are the rows of `RANGED` sources that no constant was fitted to.
    """
    kept = [one for one in found if one.time and source_of(one.row) in RANGED]
    ratios = sorted(1 / one.ratio for one in kept if not str(one.row["id"]).startswith(FITTED))
    if len(ratios) < 10:
        return None
    return [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]]


def report(rows: Sequence[dict[str, Any]], fitting: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return everything that the command prints.

    Args:
        rows: compared.
        fitting: rows among which those of `FITTED` decide the constants.
    """
    constants = fit(fitting)
    found = [compare(row, constants) for row in rows]
    by_source: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        by_source[source_of(one.row)].append(one)
    return {
        "constants": [
            {"gpu": key[0], "family": key[1], **rates._asdict()} for key, rates in constants.items()
        ],
        "sources": {name: summary(group) for name, group in by_source.items()},
        "layouts": layouts(found),
        "pairs": pairs(found),
        "measured_over_predicted": measured_range(found),
        "rows": [_shown(one) for one in found if one.time],
        "left_out": [
            {"id": one.row.get("id"), "reason": one.reason} for one in found if one.reason
        ],
    }


def _shown(one: Compared) -> dict[str, Any]:
    assert one.time is not None
    return {
        "id": one.row.get("id"),
        "source": one.row.get("source"),
        "measured_s": float(one.row["step_s"]),
        "predicted": {
            "step_s": one.time.step_s,
            "tokens_per_s_per_gpu": one.time.tokens_per_s,
            "parts": one.time.parts,
        },
        "ratio": one.ratio,
        "fitted": str(one.row.get("id")).startswith(FITTED),
        "assumed": list(one.notes),
    }


def lines(content: dict[str, Any]) -> list[str]:
    """Return the report as text."""

    def numbers(name: str, s: dict[str, Any]) -> str:
        if not s["rows"]:
            return f"{name:58}{0:5}"
        order = f"{s['rank_correlation']:.2f}" if s["rank_correlation"] is not None else "-"
        off = "".join(f"{s[k]:8.1%}" for k in ("median", "p90", "worst"))
        return f"{name[:57]:58}{s['rows']:5}{off}{s['bias']:+8.1%}{order:>7}"

    heading = "".join(f"{w:>8}" for w in ("median", "p90", "worst", "bias"))
    found = ["constants (1 is hardware.json)", ""]
    for one in content["constants"]:
        words = ", ".join(f"{name} {one[name]:.2f}" for name in Rates._fields)
        found.append(f"  {one['gpu']} {one['family']}: {words}")
    for title, part in (("source", "sources"), ("layouts of one model", "layouts")):
        found += ["", f"{title:58}{'rows':>5}{heading}{'order':>7}"]
        found += [numbers(name, s) for name, s in content[part].items()]
    if content["pairs"]:
        found += ["", f"{'one setting changed':30}{'measured':>10}{'predicted':>10}  by"]
    for one in content["pairs"]:
        off = f"{one['measured']:+10.1%}{one['predicted']:+10.1%}"
        wrong = "" if one["same_direction"] else "  WRONG DIRECTION"
        found.append(f"{one['change']:30}{off}  {one['part']}{wrong}")
    if content["measured_over_predicted"]:
        low, high = content["measured_over_predicted"]
        words = f"four of five rows of {' and '.join(RANGED)} without fitted ones"
        found += ["", f"measured over predicted: {low:.2f} to {high:.2f} ({words})"]
    found += ["", f"left out: {len(content['left_out'])}"]
    found += [f"  {one['id']}: {one['reason']}" for one in content["left_out"]]
    return found


# Rows of one model on the same GPUs that differ in one setting; the first is the base.
PAIRS = {
    "EP overlap, HybridEP": ("mb-skill-qwen3-30b-ep16-off", "mb-skill-qwen3-30b-ep16-on"),
    "EP overlap, all-to-all": ("mb-skill-qwen3-30b-a2a-off", "mb-skill-qwen3-30b-a2a-on"),
    "pp 4 to 8": ("mb-skill-70b-sft-base", "mb-skill-70b-sft-pp8"),
    "tp 4 to 8": ("mb-skill-70b-sft-base", "mb-skill-70b-sft-tp8"),
    "recompute norms too": ("mb-skill-nano30b-moe", "mb-skill-nano30b-moe-ln"),
    "recompute attention": ("mb-skill-moonlight-none", "mb-skill-moonlight-core_attn"),
    "recompute up-projection": ("mb-skill-moonlight-none", "mb-skill-moonlight-mla_up_proj"),
    "recompute MLP too": ("mb-skill-moonlight-none", "mb-skill-moonlight-mla_up_proj+mlp"),
    "recompute activation": ("mb-skill-moonlight-none", "mb-skill-moonlight-moe_act"),
    "recompute norms": ("mb-skill-moonlight-none", "mb-skill-moonlight-layernorm+moe_act"),
}


def pairs(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return measured and predicted change of each of `PAIRS`, and the part that changes most."""
    by_id = {str(one.row.get("id")): one for one in found if one.time}
    rows = []
    for name, (base, other) in PAIRS.items():
        if base not in by_id or other not in by_id:
            continue
        a, b = by_id[base], by_id[other]
        assert a.time is not None and b.time is not None
        off = {
            part: b.time.parts.get(part, 0.0) - a.time.parts.get(part, 0.0)
            for part in {**a.time.parts, **b.time.parts}
        }
        measured = float(b.row["step_s"]) / float(a.row["step_s"]) - 1
        predicted = b.time.step_s / a.time.step_s - 1
        most = max(off, key=lambda part: abs(off[part]))
        rows.append({
            "change": name, "measured": measured, "predicted": predicted,
            "same_direction": measured * predicted > 0, "part": most,
        })  # fmt: skip
    return rows


def points(rows: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return measured and predicted seconds of each step, by source: docs/published.json."""
    by_source: dict[str, list[list[float]]] = {}
    for row in rows:
        pair = [float(f"{s:.4g}") for s in (row["measured_s"], row["predicted"]["step_s"])]
        by_source.setdefault(source_of(row), []).append(pair)
    return by_source


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, one JSON object a line.

    Raises:
        ConfigError: there is no such file, or a line isn't an object.
    """
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"rows={path}: must be a file of JSON objects ({error})") from None
    if not all(isinstance(row, dict) for row in found):
        raise ConfigError(f"rows={path}: must have one JSON object a line")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Compare the rows of a file with predictions."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of rows to compare")
    parser.add_argument("--points", type=Path, help="JSON to write: measured and predicted steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    try:
        content = report(read(args.rows), read(ROWS))
        if args.points:
            args.points.write_text(json.dumps(points(content["rows"])) + "\n")
    except ConfigError as error:
        print(f"error: {error}. Fix: write --rows FILE", file=sys.stderr)
        return 2
    print(json.dumps(content, indent=1) if args.json else "\n".join(lines(content)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
