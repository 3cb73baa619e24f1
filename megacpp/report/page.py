"""HTML page about one run: no external resources, with a light and a dark style."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from megacpp.config.schema import CheckpointingPolicy
from megacpp.data.compressors import compressor_bars
from megacpp.memory.budget import words
from megacpp.memory.components import COMPONENTS
from megacpp.memory.snapshot import QUIET
from megacpp.model.count import short
from megacpp.report.charts import Bar, ChartLine, bars, lines, stacked
from megacpp.report.html import (
    columns,
    document,
    figures,
    of_ranks,
    pairs,
    plain,
    power,
    signed,
    table,
    tiles,
)
from megacpp.report.style import SLIDER
from megacpp.run.goodput import CLASSES

ABOUT = {
    "step": "training",
    "compile": "first step of compiled blocks",
    "data": "waiting for batches",
    "checkpoint": "saving and resuming",
    "evaluation": "held-out loss",
    "oom_retry": "attempts out of memory",
    "restart_lost": "lost by restarts",
    "idle": "all the rest",
}


def page(data: Mapping[str, Any]) -> str:
    """Return the whole page about what `data.gather` has read."""
    name = data["header"].get("preset") or "run"
    parts = [
        f"<h1>{escape(str(name))}</h1>",
        *_header(data),
        *_curves(data),
        *_samples(data["samples"]),
        *_memory(data["memory"]),
        *_growth(data["growth"]),
        *_traffic(data["traffic"]),
        *_speed(data["speed"]),
        *_goodput(data["goodput"]),
        *_attempts(data["attempts"]),
        *_events(data["events"]),
        *_missing(data["missing"]),
    ]
    return document(f"{name}: {data['folder']}", parts)


def _header(data: Mapping[str, Any]) -> list[str]:
    h, totals = data["header"], data["totals"]
    count = h["parameters"]
    large = []
    if totals:
        of = f" of {totals['of']}" if totals.get("of") else ""
        large += [("steps", f"{totals['steps']}{of}"), ("tokens", short(totals["tokens"]))]
        if totals.get("last_loss") is not None:
            large.append(("loss", f"{totals['last_loss']:.4f}"))
        if totals["median_tokens_per_s"] is not None:
            large.append(("tokens/s, median", short(totals["median_tokens_per_s"])))
    if data["evaluations"] and data["evaluations"][-1].get("bits_per_byte") is not None:
        large.append(("bits per byte, held out", f"{data['evaluations'][-1]['bits_per_byte']:.4f}"))
    if count:
        large.append(("parameters, active", " / ".join(short(n) for n in count.values())))
    if data["goodput"]:
        large.append(("goodput", f"{data['goodput']['goodput']:.1%}"))
    mesh = " x ".join(f"{axis} {n}" for axis, n in h["mesh"].items() if n > 1) or "one rank"
    plain = asdict(CheckpointingPolicy())
    policy = {k: v for k, v in h["policy"].items() if v != plain.get(k)}
    rows = {
        "folder": data["folder"],
        "started": h["started"],
        "commit": h["git_commit"],
        "config hash": h["config_hash"],
        "device": f"{h['world_size']} x {h['device']}" if h["device"] else None,
        "mesh": mesh if h["device"] else None,
        "model": f"{h['pattern']} x {h['depth']}" if h["pattern"] else None,
        "precision, optimizer": f"{h['precision']}, {h['optimizer']}" if h["optimizer"] else None,
        "batch": pairs(h["batch"]),
        "recompute": pairs(policy) or ("as by default" if h["policy"] else None),
        "versions": pairs({k: v for k, v in h["versions"].items() if v}),
        "command": " ".join(h["command"]) if h["command"] else None,
    }
    return [tiles(large), table(rows)]


def _curves(data: Mapping[str, Any]) -> list[str]:
    """Return charts of learning, the optimizer, experts, and the machine."""
    steps, evaluations = data["steps"], data["evaluations"]
    if not steps:
        return []
    at = [step + 1 for step in steps["step"]]

    def points(name: str) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(at, steps.get(name, []), strict=False) if y is not None]

    def noisy(name: str, words: Callable[[float], str], **more: Any) -> str:
        return lines([ChartLine("", points(name), noisy=True)], words, **more)

    def learned(name: str, **more: Any) -> str:
        found = [(row["step"] + 1, row[name]) for row in evaluations if row.get(name) is not None]
        series = [ChartLine("training", points(name), noisy=True)]
        series += [ChartLine("held out", found, dots=True)] if found else []
        return lines(series, plain, **more)

    def grouped(name: str, words: Callable[[float], str], **more: Any) -> str:
        alike: dict[str, list[str]] = {}  # names of equal lines: one would hide the others
        for label, line in data["groups"][name].items():
            alike.setdefault(json.dumps(line), []).append(label)
        series = [ChartLine(", ".join(labels), json.loads(line)) for line, labels in alike.items()]
        return lines(series, words, **more)

    held_out = evaluations[-1] if evaluations else {}
    bars = compressor_bars(held_out)
    levels = [(bits, name) for name, bits, _ in bars]
    said = [f"dashed: {name} at {bits:.4f}, {how}" for name, bits, how in bars]
    if held_out.get("no_verdict"):
        said.append(f"no verdict against them: {held_out['no_verdict']}")
    peak = max(steps.get("peak_bytes") or [0], default=0)
    of = "resident set" if (data["header"]["device"] or "cpu") == "cpu" else "allocator"
    unit, called = (2.0**30, "GiB") if peak >= 2**30 else (2.0**20, "MiB")
    sizes = [(x, size / unit) for x, size in points("peak_bytes")]
    memory = lines([ChartLine("", sizes)], plain, from_zero=True)
    rates = grouped("rates", power) or lines([ChartLine("", points("lr"))], power)
    drawn = [
        ("loss, nats a token", learned("loss")),
        ("loss by source of the mixture, nats a token", grouped("sources", plain)),
        ("bits per byte", learned("bits_per_byte", levels=levels, said=said)),
        ("tasks", grouped("tasks", plain)),
        ("gradient norm", noisy("grad_norm", plain)),
        ("learning rate by parameter group", rates),
        ("busiest expert over the mean of its layer", grouped("load", plain)),
        ("tokens read", lines([ChartLine("", points("tokens_read"))], short, from_zero=True)),
    ]
    machine = [
        ("tokens a second", noisy("tokens_per_s", short, from_zero=True)),
        ("seconds a step", noisy("step_s", plain, from_zero=True)),
        ("model FLOP utilisation", noisy("mfu", plain, from_zero=True)),
        (f"peak memory so far, rank 0 ({of}), {called}", memory),
    ]
    return [
        "<h2>Curves, by step</h2>",
        SLIDER,
        figures(drawn),
        "<h2>The machine, by step</h2>",
        figures(machine),
    ]


def _samples(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Return generated texts, the newest first."""
    shown = [
        f'<p class="dim">{escape(one["name"])}</p><pre>{escape(one["text"])}</pre>'
        for one in reversed(found)
    ]
    return ["<h2>Samples</h2>", *shown] if shown else []


def _speed(speed: Mapping[str, Any] | None) -> list[str]:
    """Return the predicted step beside the measured one."""
    if not speed:
        return []
    ahead, real = speed["predicted"], speed["measured_s"]
    low, high = (1e3 * x for x in ahead["step_s_range"])
    rows = [
        ("predicted", f"{1e3 * ahead['step_s']:,.1f} ms ({low:,.1f} to {high:,.1f})"),
        ("measured, median", f"{1e3 * real:,.1f} ms" if real else "no steps"),
        ("after ten steps", speed["verdict"] or "fewer than ten steps"),
        ("not modelled", ahead["not_modelled"]),
    ]
    parts = sorted(ahead["parts_s"].items(), key=lambda p: -p[1])
    rows += [(f"predicted {name}", f"{1e3 * time:,.1f} ms") for name, time in parts]
    cells = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return ["<h2>Speed</h2>", f"<table>{cells}</table>"]


def _memory(memory: Mapping[str, Any]) -> list[str]:
    """Return a waterfall chart: each component begins where the one above it ends."""
    predicted, measured = memory["predicted"], memory["measured"]
    if not predicted and not measured:
        return []
    rows, was, now = [], 0.0, 0.0
    for name in COMPONENTS:
        a, b = predicted.get(name, 0), measured.get(name)
        if not a and not b:
            continue
        pieces = [(was, a, "s0")] if predicted else []
        pieces += [(now, b or 0, "s1")] if measured else []
        rows.append(Bar(name, pieces, _both(predicted, a, measured, b)))
        was, now = was + a, now + (b or 0)
    partly = any(predicted.get(name) and name not in measured for name in COMPONENTS)
    whole = None if partly else now
    pieces = [(0.0, was, "s0")] if predicted else []
    pieces += [(0.0, whole or 0.0, "s1")] if measured else []
    rows.append(Bar("all", pieces, _both(predicted, was, measured, whole)))
    budget = memory["budget_bytes"]
    near = budget if budget and budget < 4 * max(was, now) else None
    drawn = bars(rows, words, (near, "may be used") if near else None, ["predicted", "measured"])
    point = memory["predicted_bytes"]
    at = f", in {memory['moment']}" if memory["moment"] else ""
    facts = {
        "predicted": point is not None
        and f"{words(point)}, at most {words(memory['upper_bytes'])}{at}, rank {memory['rank']}",
        "may be used": budget and words(budget),
        "gate": memory["gate"] and f"{memory['gate']}: {memory['verdict']}",
        "measured": measured and f"{words(memory['measured_bytes'])}: {memory['measured_from']}",
        "off by": _off(memory),
    }
    peaks = memory["peaks"]
    called = {"peak_reserved_bytes": "peak reserved", "peak_resident_bytes": "process, resident"}
    for name, label in called.items():
        if peaks.get(name) and max(peaks[name]):
            facts[label] = of_ranks(peaks[name])
    if memory["calibration"].get("measures") == "tensors":
        facts["not predicted"] = (
            "the resident set (Python, libraries, freed memory), nor how long threads of gloo hold "
            "the buffers of a collective"
        )
    caption = "bytes of a rank at the fullest moment of a step, predicted / measured"
    return [
        "<h2>Memory, predicted against measured</h2>",
        figures([(caption, drawn)]),
        table(facts),
    ]


def _both(predicted: object, a: float, measured: object, b: float | None) -> str:
    """Return predicted and measured bytes; a missing measurement isn't zero."""
    said = [words(a)] if predicted else []
    if measured:
        said.append("not measured" if b is None else words(b))
    return " / ".join(said)


def _off(memory: Mapping[str, Any]) -> str | None:
    """Return the difference between estimate and measurement, in the same kind of bytes."""
    record = memory["calibration"]
    if record:
        measured, predicted = record["measured_bytes"], record["predicted_bytes"]
        of = {"tensors": "tensors", "device": "all that the device has in use"}
        said = f"of {of.get(record['measures'], record['measures'])}, the most of any rank"
        residual = round(measured / max(1, predicted) - 1, 3) + 0.0  # no -0.0
        return f"{residual:+.1%}: {words(measured)} measured for {words(predicted)} ({said})"
    if memory["predicted_tensors"] and memory["measured_bytes"]:
        return f"{memory['measured_bytes'] / memory['predicted_tensors'] - 1:+.1%}, of tensors"
    return None


def _growth(growth: Mapping[str, Any]) -> list[str]:
    """Return the growth from the first to the last recorded step."""
    found, record = growth.get("difference"), growth.get("record")
    if not found and not record:
        return []
    parts = ["<h2>Memory over the run</h2>"]
    if len(growth["peaks"]) > 2:
        most = max(peak for _, peak in growth["peaks"])
        unit = 2.0**30 if most >= 2**30 else 2.0**20
        peaks = lines(
            [ChartLine("", growth["peaks"])], words, height=150, unit=unit, from_zero=True
        )
        parts.append(figures([("peak of a step, rank 0", peaks)]))
    if record:
        a, b = record["steps"]
        parts.append(
            f"<p>Largest growth over all ranks, from step {a} to {b}: "
            f"<b>{escape(record['bucket'])}</b> by {words(record['grown_bytes'])} on rank "
            f"{record['rank']} ({escape(record['cause'])}).</p>"
        )
    if found:
        steps = found["steps"]
        parts.append(
            f"<p>Rank {found['rank']}, from step {steps[0]} to {steps[1]}: "
            f"{escape(found['diagnosis'])}. {escape(_fix(found))}</p>"
        )
        seen = QUIET * max(found["peak_bytes"])
        top = [row for row in found["buckets"] if abs(row["grown"]) > seen][:8]
        cells = [
            [row["bucket"], words(row["before"]), words(row["after"]), signed(row["grown"])]
            for row in top
        ]
        if cells:
            parts.append(columns(["component", "before", "after", "grown"], cells))
    return parts


def _fix(found: Mapping[str, Any]) -> str:
    return "" if found["cause"] == "steady" else f"Fix: {found['fix']}."


def _traffic(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the bytes of a step by axis; the pieces of a bar are kinds of data."""
    if not found:
        return []
    kinds = sorted({what for parts in found.values() for what in parts})
    rows = []
    for axis, parts in found.items():
        start, pieces = 0.0, []
        for what, sent in parts.items():
            pieces.append((start, float(sent), f"s{kinds.index(what) % 8}"))
            start += sent
        rows.append(Bar(axis, pieces, words(start), joined=True))
    drawn = bars(rows, words, legend=kinds)
    caption = "larger side of each collective, rank 0, one optimizer step, in closed form"
    return ["<h2>Communication by axis</h2>", figures([(caption, drawn)])]


def _goodput(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    wall = found["wall_s"] or 1.0
    parts = [
        (name, found["seconds"][name], f"{found['seconds'][name] / wall:.1%}")
        for name in CLASSES
        if found["seconds"][name]
    ]
    cells = [[name, ABOUT[name], f"{spent:,.1f}", said] for name, spent, said in parts]
    cells.append(["all", f"{found['starts']} starts", f"{found['wall_s']:,.1f}", "100.0%"])
    notes = [f"{found['startup_s']:,.1f} s of idle were before first steps"]
    if found["redone_s"]:
        notes.append(f"{found['redone_s']:,.1f} s of what restarts lost were steps done again")
    return [
        "<h2>Where the seconds went</h2>",
        figures([("", stacked(parts))]),
        columns(["", "", "seconds", "of the wall"], cells),
        f'<p class="dim">{"; ".join(notes)}.</p>',
    ]


def _attempts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    cells = [
        [
            a.get("attempt"),
            pairs(a.get("changed") or {}) or "as asked",
            a.get("outcome"),
            words(a["predicted_bytes"]) if a.get("predicted_bytes") is not None else "",
            words(a["peak_bytes"]) if a.get("peak_bytes") is not None else "",
            f"{a['median_step_s']:.3f} s" if a.get("median_step_s") else a.get("detail") or "",
        ]
        for a in found
    ]
    names = ["attempt", "changed", "outcome", "predicted", "peak", "median step"]
    return ["<h2>Attempts of memory.fit=auto</h2>", columns(names, cells)]


def _events(found: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [["" if e["step"] is None else e["step"], e["kind"], e["words"]] for e in found]
    return ["<h2>Events</h2>", columns(["step", "", ""], cells)] if cells else []


def _missing(found: Sequence[str]) -> list[str]:
    if not found:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in found)
    return ["<h2>Not in this report</h2>", f'<ul class="dim">{items}</ul>']
